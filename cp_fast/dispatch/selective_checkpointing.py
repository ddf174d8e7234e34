"""Whether PyTorch's selective checkpointing looks at each operator; then attention is one operator to it.

Its modes count operators in the forward pass, and count again while they recompute. They must see the same ones in both
passes: attention as one, and none of the work that makes plans, as a later call finds its plan in a cache.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import _python_dispatch as modes

__all__ = ["is_selective", "unseen"]

_MODULES = {
    "torch.utils.checkpoint",
    "cp_fast.checkpoint.offload",
}  # of the modes, and of those that others derive from them


def is_selective() -> bool:
    """Whether a mode of selective checkpointing is active: its first pass, or its recomputation."""
    if not torch._C._len_torch_dispatch_stack():  # in most calls, and cheap
        return False
    stack = modes._get_current_dispatch_mode_stack()  # pyright: ignore[reportPrivateUsage]
    return any(kind.__module__ in _MODULES for mode in stack for kind in type(mode).__mro__)


def unseen() -> AbstractContextManager[Any]:
    """Work on the host that selective checkpointing must not count."""
    if is_selective():
        return modes._disable_current_modes()  # pyright: ignore[reportPrivateUsage]
    return nullcontext()
