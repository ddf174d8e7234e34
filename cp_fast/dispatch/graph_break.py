"""Calls that are a graph break of torch.compile, with a message that names the cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["graph_break"]


@torch.compiler.disable(
    reason="linear layers run outside of graphs; attention makes plans and looks at DTensors there: call make_plan "
    "outside, give local tensors"
)
def graph_break(function: Callable[..., Any], *given: Any, **arguments: Any) -> Any:
    """Call `attention`, a function that calls it, or a linear layer, with the same arguments."""
    return function(*given, **arguments)
