"""A peer that does not answer: nothing waits for ever.

A stream that waits for a word cannot be given a time-out, so a thread looks. Behind every exchange the stream writes
the exchange's number into memory of the host. Where exchanges are under way and none of them has ended for as long as
the group's time-out, the thread says which one and whose messages are missing, and ends everything on the GPU by an
assertion on it: whoever waits for the GPU gets an error, and no number that was computed from messages that never came.
The next call raises the PeerError. A process that goes on waiting all the same is ended, as NCCL's own watchdog does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

from cp_fast.remarks import say
from cp_ref.common.processes import PeerError, under_way

__all__ = ["Watch"]

_all: WeakSet[Watch] = WeakSet()
_started = threading.Lock()
_INTERVAL = 0.5  # seconds between looks


class _Posted(NamedTuple):
    number: int
    at: float
    what: str
    peers: Sequence[int]


class Watch:
    """The exchanges of one rank that are under way.

    Args:
        names: what every rank of the group is called.
        rank: this one.
        limit: seconds of the time-out.
        ended: -> the number of the last exchange that ended.
        word: the word that the stream writes it to.
        stop: end what waits, saying why.
    """

    def __init__(
        self,
        names: Sequence[str],
        rank: int,
        limit: float,
        ended: Callable[[], int],
        word: Any,
        stop: Callable[[str], None],
    ) -> None:
        self._names, self._rank, self._limit, self._word = names, rank, limit, word
        self._ended, self._stop = ended, stop
        self._under_way: deque[_Posted] = deque()
        self._number, self._moved = 0, time.monotonic()
        self._failure: str | None = None
        _all.add(self)

    def posted(self, peers: Sequence[int], where: str = "") -> tuple[Any, int]:
        """An exchange is posted, in this step: the word that says that it has ended, and its number."""
        self._number += 1
        what = ": ".join(filter(None, (under_way(), where)))
        self._under_way.append(_Posted(self._number, time.monotonic(), what, peers))
        _start()
        return self._word, self._number

    def check(self) -> None:
        """Go on, or raise a PeerError: a peer did not answer."""
        if self._failure is not None:
            raise PeerError(self._failure)

    def late(self) -> str | None:
        """Forget what has ended; what is to be said of an exchange that is late, None if none is. For one thread."""
        ended, queue = self._ended(), self._under_way
        while queue and queue[0].number <= ended:
            queue.popleft()
            self._moved = time.monotonic()
        if not queue or self._failure is not None:
            return None
        first = queue[0]
        if time.monotonic() - max(first.at, self._moved) < self._limit:
            return None
        peers = ", ".join(self._names[peer] for peer in first.peers)
        return (
            f"{first.what + ': ' if first.what else ''}{self._names[self._rank]}: messages with {peers} did not come "
            f"through within {self._limit:g} s"
        )

    def end(self, complaint: str) -> None:
        """Say so, and let nothing wait any longer."""
        self._failure = complaint
        say(complaint)
        self._stop(complaint)


def _start() -> None:
    """The thread that looks, one a process."""
    if not _started.locked() and _started.acquire(blocking=False):
        threading.Thread(target=_look, name="cp_fast peers", daemon=True).start()


def _look() -> None:
    while True:
        time.sleep(_INTERVAL)
        for watch in list(_all):
            if (complaint := watch.late()) is not None:
                watch.end(complaint)
