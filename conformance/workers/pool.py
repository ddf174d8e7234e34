"""A pool of processes, a rank in each; and the choice between it and one process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.implementation import LoadError
from conformance.record import Played
from conformance.reference import Hang
from conformance.runner import FAILING, Offer, Pairs, Task
from conformance.workers.isolated import IsolatedRunner
from conformance.workers.remote import RemotePlayer, first_word, tell
from conformance.workers.turn import GRACE_S, Turn
from conformance.workers.worker import Worker, WorkerDied

__all__ = ["ProcessRunner", "start_runner"]


def start_runner(name: str, device: str, limit_s: float, cp_sizes: Callable[[str], tuple[int, ...]]) -> RemotePlayer:
    """The runner that the implementation needs, by its `group_kind`; it is loaded already.

    Args:
        limit_s: when a problem is taken for hanging, in seconds.
        cp_sizes: the group sizes that will be played, for a `group_kind`; the largest is how many processes a pool has.

    Raises:
        LoadError: there is no such implementation, or loading it crashes or takes too long.
    """
    isolated = IsolatedRunner(name, device, limit_s)
    kind = isolated.info.group_kind
    sizes = cp_sizes(kind)
    if kind == "member":
        return isolated
    isolated.close()
    return ProcessRunner(name, device, limit_s, max(2, *sizes))


class ProcessRunner(RemotePlayer):
    """A pool of processes, one for each rank, for implementations that take a torch.distributed group."""

    def __init__(self, name: str, device: str, limit_s: float, size: int) -> None:
        super().__init__(name, device, limit_s)
        self._size = size
        self._workers: list[Worker] = []
        self._info: Offer | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def info(self) -> Offer:
        """The levels and members that the implementation offers."""
        self._start()
        assert self._info is not None
        return self._info

    def _running(self) -> list[Worker]:
        return self._workers

    def _question(self, message: tuple[str, Any]) -> tuple[bool, str]:
        task = Task("schedule", "probe", "what the implementation supports")
        answer = self._together(message, task, self._limit_s)
        if not isinstance(answer, Played):
            return answer
        if answer.verdict == "hung":
            raise Hang("; ".join(answer.findings))
        return True, ""

    def _play(self, task: Task) -> Played:
        played = self._together(("play", task), task, self._limit_s)
        if played.verdict in FAILING and self._workers:  # messages may be left on the wire
            self._renew(task)
        return played

    def pairs(self, case: str) -> Pairs | None:
        """The (query, key) pairs that carried weight in a small case."""
        task = Task("schedule", "pairs", case)
        found = self._together(("pairs", case), task, self._limit_s)
        if isinstance(found, Played):
            return None
        self._renew(task)
        return found

    def _renew(self, task: Task) -> None:
        """New groups over gloo; over NCCL, where destroying one may hang, new processes."""
        if self._device == "cpu":
            self._together(("renew",), task, self._limit_s)
        else:
            self.close()

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.stop()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        if self._workers:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="conformance-")
        store = str(Path(self._folder.name) / "store")
        problems = self._name, self._device, self._limit_s
        self._workers = [Worker(*problems, (rank, self._size, store)) for rank in range(self._size)]
        try:
            offers = [first_word(worker, f"rank {rank}") for rank, worker in enumerate(self._workers)]
            self._info = offers[0]
            tell(self._workers, self._known)
        except LoadError:
            self.close()
            raise

    def _together(self, message: Any, task: Task, limit_s: float) -> Any:
        """Let all ranks do the same, and pass their outcomes around, until all are done.

        Returns:
            What rank 0 answers; or a `Played` for ranks that died or did not finish.
        """
        self._start()
        began = time.monotonic()
        try:
            for worker in self._workers:
                worker.send(message)
        except WorkerDied as death:
            return self._ended(task, "crashed", [f"a rank died before the problem began: {death}"], began)
        turn = Turn(self._workers)
        deadline = began + limit_s
        while not turn.over:
            for rank in turn.ready(deadline - time.monotonic()):
                try:
                    turn.take(rank)
                except WorkerDied as death:
                    verdict = "out of memory" if death.by_memory else "crashed"
                    return self._ended(task, verdict, [f"rank {rank} died: {death}", *turn.errors()], began)
            # only while this round waits for the rest of it: a refusal by all is the end of a round, not of the problem
            grace = turn.failed + min(GRACE_S, limit_s) if turn.failed and not turn.over else deadline
            if time.monotonic() > min(deadline, grace):
                return self._ended(task, "hung", [*turn.errors(), *turn.waiting(time.monotonic() - began)], began)
        word, answer = turn.answers[0]
        if word == "refused":
            raise ValueError(answer)
        if "context lost" in (word for word, _ in turn.answers.values()):
            self._end()
        return answer
