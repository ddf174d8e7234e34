"""Allow one call at a time on a group: the messages of two calls would mix.

Calls of one thread follow each other, forward and backward. If two threads call at once, the second raises. Waiting
would only hide that the ranks may begin the calls in different orders.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AloneIn", "Turn", "turns_of"]


class Turn:
    """The lock of one group: the thread inside a call, and the call's name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._what = ""
        self._number = 0

    def next_number(self) -> int:
        """Count a call."""
        self._number += 1
        return self._number

    def take(self, what: str) -> bool:
        """Take it, for `what`; False if this thread already has it.

        Raises:
            RuntimeError: another thread has it.
        """
        here = threading.current_thread()
        if self._thread is here:
            return False
        if not self._lock.acquire(blocking=False):
            other = self._thread
            raise RuntimeError(
                f"{what} begins in thread {here.name!r} while {self._what} runs in thread "
                f"{'?' if other is None else other.name!r} on the same group: their messages would mix. Call one after "
                "the other, in the same order on all ranks, or give each thread a group of its own "
                "(torch.distributed.new_group)"
            )
        self._thread, self._what = here, what
        return True

    def give_back(self) -> None:
        """Release it."""
        self._thread = None
        self._lock.release()


_turns: WeakKeyDictionary[Any, Turn] = WeakKeyDictionary()
_making = threading.Lock()


def turns_of(group: Any) -> tuple[Turn, ...]:
    """The turns of a user's group; contexts of the same group share them."""
    if isinstance(group, DeviceMesh):
        group = tuple(group.get_all_groups())
    parts = group if isinstance(group, tuple | list) else (group,)
    with _making:
        return tuple(_turn_of(part) for part in parts)


def _turn_of(part: Any) -> Turn:
    try:
        return _turns.setdefault(part, Turn())
    except TypeError:  # A user's group without a hash or weak references: a turn for each context.
        return Turn()


class AloneIn:
    """Hold all of a context's turns while `what` is called; turns that this thread already has stay with it.

    Raises:
        RuntimeError: another thread has one of them.
    """

    __slots__ = ("_taken", "_turns", "_what")

    def __init__(self, turns: tuple[Turn, ...], what: str) -> None:
        self._turns, self._what = turns, what
        self._taken: list[Turn] = []

    def __enter__(self) -> None:
        try:
            for turn in self._turns:
                if turn.take(self._what):
                    self._taken.append(turn)
        except RuntimeError:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        while self._taken:
            self._taken.pop().give_back()
