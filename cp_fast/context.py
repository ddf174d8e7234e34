"""The fast path's context: its backends are the kernel libraries."""

from __future__ import annotations

from cp_fast.backends import BACKENDS
from cp_fast.handles import handle_for
from cp_ref.common import context

__all__ = ["ContextParallel"]


class ContextParallel(context.ContextParallel):
    __doc__ = context.ContextParallel.__doc__
    backends = ("auto", *(backend.name for backend in BACKENDS))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.handle = handle_for(self)  # what torch.compile knows this context by
