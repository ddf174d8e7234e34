"""Cooperative scheduling of a simulated group: one rank runs until it has to wait, then the next one that can."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cp_ref.simulator.posted_messages import MessageError, PostedMessage

__all__ = ["Deadlock", "RankScheduler"]


class Deadlock(RuntimeError):
    """No rank can go on. The message names the operation that each rank waits for."""


@dataclass
class RankScheduler:
    """Runs one rank at a time, and sees when none can run.

    Delivered messages become None, so a long run needs no more memory than a short one.
    """

    size: int
    running: int = 0
    sent: dict[tuple[int, int], list[PostedMessage | None]] = field(default_factory=lambda: defaultdict(list))
    awaited: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    taken: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    errors: dict[int, BaseException] = field(default_factory=dict[int, BaseException])

    def __post_init__(self) -> None:
        self.gathered: dict[tuple[int, ...], dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self.read: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)  # by how many ranks, of those gathered
        self._changed = threading.Condition()
        self._blocked: dict[int, tuple[Callable[[], bool], str]] = {}
        self._finished: set[int] = set()
        self._dead = ""

    def wait_to_run(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.running == rank)

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until `ready()`."""
        if ready():
            return
        self._blocked[rank] = (ready, what)
        self._pass_on(rank)
        self.wait_to_run(rank)
        del self._blocked[rank]
        if not ready():
            raise Deadlock(self._dead)

    def finish(self, rank: int) -> None:
        self._finished.add(rank)
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        """Let the next rank run that can. If none can, the next blocked one runs, and raises."""
        others = [(rank + n) % self.size for n in range(1, self.size + 1)]
        waiting = [r for r in others if r not in self._finished]
        able = [r for r in waiting if r not in self._blocked or self._blocked[r][0]()]
        if not able and waiting and not self._dead:
            self._dead = self._describe()
        with self._changed:
            self.running = (able or waiting or [-1])[0]
            self._changed.notify_all()

    def _describe(self) -> str:
        lines = ["deadlock: no rank can go on"]
        for rank in range(self.size):
            if rank in self.errors:
                lines.append(f"  rank {rank} failed: {type(self.errors[rank]).__name__}: {self.errors[rank]}")
            elif rank in self._finished:
                lines.append(f"  rank {rank} has finished")
            else:
                lines.append(f"  rank {rank} waits for {self._blocked[rank][1]}")
        return "\n".join(lines)

    def raise_errors(self) -> None:
        """Raise the first error: a rank's failure, before the deadlock that it caused."""
        ranks = sorted(self.errors, key=lambda r: (isinstance(self.errors[r], Deadlock), r))
        if ranks:
            raise self.errors[ranks[0]]
        for (src, dst), messages in self.sent.items():
            for message in filter(None, messages):
                raise MessageError(
                    f"rank {src} sent a message with tag {message.tag} to rank {dst}, which never took it"
                )
        for (src, dst), tags in self.awaited.items():
            if len(tags) > self.taken[src, dst]:
                tag = tags[self.taken[src, dst]]
                raise MessageError(
                    f"rank {dst} posted a receive with tag {tag} from rank {src} and never waited for it"
                )
