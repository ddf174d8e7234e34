"""`attention` where torch.compile meets what is done outside of graphs: that the graph ends here is said with the cure."""

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
