"""The reference's context: plain PyTorch is its only backend."""

from __future__ import annotations

from cp_ref.common import context

__all__ = ["ContextParallel"]


class ContextParallel(context.ContextParallel):
    __doc__ = context.ContextParallel.__doc__
