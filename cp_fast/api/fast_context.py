"""The fast path's context: its backends are the kernel libraries, and one thread at a time calls on its group."""

from __future__ import annotations

from contextlib import AbstractContextManager

from cp_fast.api.plan_cache import agreements_of
from cp_fast.backends import BACKENDS
from cp_fast.dispatch.group_lock import HoldLocks, locks_of
from cp_fast.dispatch.opaque import OfThisProcess, opaque_for
from cp_ref.contract import context

__all__ = ["ContextParallel"]


class ContextParallel(OfThisProcess, context.ContextParallel):
    __doc__ = context.ContextParallel.__doc__
    backends = ("auto", *(backend.name for backend in BACKENDS))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._locks = locks_of(self.group)
        self.agreements = agreements_of(self._locks)  # of all contexts of the group
        self.handle = opaque_for(self)  # what torch.compile knows this context by

    def alone(self, what: str) -> AbstractContextManager[None]:
        """While a call is made, also: RuntimeError where another thread is inside one on the same group."""
        return HoldLocks(self._locks, what)

    def next_number(self) -> int:
        """Of the checked calls on the group, from 1."""
        return self._locks[0].next_number()
