"""A time-out for a peer that does not answer: nothing waits for ever.

A stream's wait for a word has no time-out, so a thread watches. After every exchange the stream writes the exchange's
number into host memory. If exchanges are in flight and none ends within the group's time-out, the thread reports the
exchange and the missing peers. It then ends all work on the GPU by an assertion there. Code that waits for the GPU gets
an error, never a result computed from missing messages. The next call raises the PeerError. A process that still waits
is ended, as by NCCL's watchdog.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

from cp_fast.log import log
from cp_ref.groups.process_groups import PeerError, under_way

__all__ = ["Watch"]

_all: WeakSet[Watch] = WeakSet()
_started = threading.Lock()
_INTERVAL = 0.5  # Seconds between checks.


class _Posted(NamedTuple):
    number: int
    at: float
    what: tuple[str, ...]  # The work that it is part of; words may be empty.
    peers: Sequence[int]


class Watch:
    """The exchanges of one rank that are in flight.

    Args:
        names: the name of every rank of the group.
        rank: this one.
        limit: seconds of the time-out.
        ended: -> the number of the last exchange that ended.
        word: the word that the stream writes it to.
        stop: ends all waits with a reason.
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
        """Register a posted exchange of this step; returns the word that marks its end, and its number."""
        self._number += 1
        self._under_way.append(_Posted(self._number, time.monotonic(), (*under_way(), where), peers))
        if not _started.locked():
            _start()
        return self._word, self._number

    def check(self) -> None:
        """Go on, or raise a PeerError: a peer did not answer."""
        if self._failure is not None:
            raise PeerError(self._failure)

    def late(self) -> str | None:
        """Forget ended exchanges; returns a message about a late one, or None. For one thread."""
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
        where = ": ".join(filter(None, (*first.what, self._names[self._rank])))
        return f"{where}: messages with {peers} did not come through within {self._limit:g} s"

    def end(self, complaint: str) -> None:
        """Report it, and end all waits."""
        self._failure = complaint
        log(complaint)
        self._stop(complaint)


def _start() -> None:
    """Start the watching thread, one a process."""
    if _started.acquire(blocking=False):
        threading.Thread(target=_look, name="cp_fast peers", daemon=True).start()


def _look() -> None:
    while True:
        time.sleep(_INTERVAL)
        for watch in list(_all):
            if (complaint := watch.late()) is not None:
                watch.end(complaint)
