"""The fast path's context: its backends are the kernel libraries, and one thread at a time calls on its group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from cp_fast.backends import BACKENDS
from cp_fast.handles import OfThisProcess, handle_for
from cp_fast.recent import recent_of
from cp_fast.turns import Turn, alone_in, turns_of
from cp_ref.common import context
from cp_ref.common.processes import during

__all__ = ["ContextParallel"]


class ContextParallel(OfThisProcess, context.ContextParallel):
    __doc__ = context.ContextParallel.__doc__
    backends = ("auto", *(backend.name for backend in BACKENDS))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.handle = handle_for(self)  # what torch.compile knows this context by
        self._turns = turns_of(self.group)
        self.recent = recent_of(self._turns)  # of all contexts of the group

    def alone(self, what: str) -> AbstractContextManager[None]:
        """While a call is made: RuntimeError where another thread is inside one on the same group; a PeerError says
        what was called.
        """
        return _call(self._turns, what)

    def next_number(self) -> int:
        """Of the checked calls on the group, from 1."""
        return self._turns[0].next_number()


@contextmanager
def _call(turns: tuple[Turn, ...], what: str) -> Iterator[None]:
    with alone_in(turns, what), during(what):
        yield
