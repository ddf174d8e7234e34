"""The fast path's context: its backends are the kernel libraries, and one thread at a time calls on its group."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from cp_fast.api.group_lock import AloneIn, Turn, turns_of
from cp_fast.api.plan_cache import agreements_of
from cp_fast.backends import BACKENDS
from cp_fast.dispatch.opaque import OfThisProcess, handle_for
from cp_ref.common import context
from cp_ref.common.groups.process_groups import during

__all__ = ["ContextParallel"]


class ContextParallel(OfThisProcess, context.ContextParallel):
    __doc__ = context.ContextParallel.__doc__
    backends = ("auto", *(backend.name for backend in BACKENDS))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.handle = handle_for(self)  # what torch.compile knows this context by
        self._turns = turns_of(self.group)
        self.agreements = agreements_of(self._turns)  # of all contexts of the group

    def alone(self, what: str) -> AbstractContextManager[None]:
        """While a call is made, also: RuntimeError where another thread is inside one on the same group."""
        return _Call(self._turns, what)

    def next_number(self) -> int:
        """Of the checked calls on the group, from 1."""
        return self._turns[0].next_number()


class _Call:
    """A call on a context's group, alone and named."""

    __slots__ = ("_alone", "_during")

    def __init__(self, turns: tuple[Turn, ...], what: str) -> None:
        self._alone, self._during = AloneIn(turns, what), during(what)

    def __enter__(self) -> None:
        self._alone.__enter__()
        self._during.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._during.__exit__(*error)
        finally:
            self._alone.__exit__()
