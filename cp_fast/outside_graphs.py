"""`attention` where torch.compile meets what is no part of a graph: it ends here, and the cure is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["outside_graphs"]


@torch.compiler.disable(
    reason="attention makes plans and looks at DTensors outside of graphs: call make_plan outside, give local tensors"
)
def outside_graphs(function: Callable[..., Any], *given: Any, **arguments: Any) -> Any:
    """`attention`, or a function that calls it, of the same arguments."""
    return function(*given, **arguments)
