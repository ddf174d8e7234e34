"""Allow one call at a time on a group: the messages of two calls would mix.

Calls of one thread follow each other, forward and backward. If two threads call at once, the second raises. Waiting
would only hide that the ranks may begin the calls in different orders.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed.device_mesh import DeviceMesh

from cp_ref.contract.process_groups import during

__all__ = ["GroupLock", "HoldLocks", "locks_of"]


class GroupLock:
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

    def acquire_for(self, what: str) -> bool:
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

    def release(self) -> None:
        """Release it."""
        self._thread = None
        self._lock.release()


_locks: WeakKeyDictionary[Any, GroupLock] = WeakKeyDictionary()
_making = threading.Lock()


def locks_of(group: Any) -> tuple[GroupLock, ...]:
    """The locks of a user's group; contexts of the same group share them."""
    if isinstance(group, DeviceMesh):
        group = tuple(group.get_all_groups())
    parts = group if isinstance(group, tuple | list) else (group,)
    with _making:
        return tuple(_lock_of(part) for part in parts)


def _lock_of(part: Any) -> GroupLock:
    try:
        return _locks.setdefault(part, GroupLock())
    except TypeError:  # A user's group without a hash or weak references: a lock for each context.
        return GroupLock()


class HoldLocks:
    """Hold all of a context's locks while `what` is called, which errors of messages then name. Locks that this thread
    already has stay with it.

    Raises:
        RuntimeError: another thread has one of them.
    """

    __slots__ = ("_during", "_locks", "_taken", "_what")

    def __init__(self, locks: tuple[GroupLock, ...], what: str) -> None:
        self._locks, self._what = locks, what
        self._taken: list[GroupLock] = []
        self._during = during(what)

    def __enter__(self) -> None:
        try:
            for lock in self._locks:
                if lock.acquire_for(self._what):
                    self._taken.append(lock)
        except RuntimeError:
            self._release()
            raise
        self._during.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._during.__exit__(*error)
        finally:
            self._release()

    def _release(self) -> None:
        while self._taken:
            self._taken.pop().release()
