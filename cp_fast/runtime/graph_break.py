"""Calls that are a graph break of torch.compile, with a message that names the cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["graph_break", "graph_break_of_a2a"]


@torch.compiler.disable(
    reason="linear and sparse layers say what is wrong with arguments outside of graphs; attention makes plans and "
    "looks at DTensors there: call make_plan outside, give local tensors"
)
def graph_break(function: Callable[..., Any], *given: Any, **arguments: Any) -> Any:
    """Call a function that makes a plan or takes one, with the same arguments."""
    return function(*given, **arguments)


@torch.compiler.disable(
    reason="only cp_comm_type 'p2p' and 'all_gather' of torchtitan's attention are part of a graph: an a2a keeps other "
    "tensors for each batch. Take one of the two, or leave compile off"
)
def graph_break_of_a2a(function: Callable[..., Any], *given: Any, **arguments: Any) -> Any:
    """Call torchtitan's attention, with the same arguments."""
    return function(*given, **arguments)
