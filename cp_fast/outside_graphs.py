"""`attention` where torch.compile meets what is no part of a graph: it ends here, and the cure is said."""

from __future__ import annotations

from typing import Any

import torch

from cp_fast.api import attention

__all__ = ["attention_outside_graphs"]


@torch.compiler.disable(
    reason="attention makes plans and looks at DTensors outside of graphs: call make_plan outside, give local tensors"
)
def attention_outside_graphs(*tensors: torch.Tensor, **arguments: Any) -> Any:
    """`attention`, of the same arguments."""
    return attention(*tensors, **arguments)
