"""Problems of linear attention as a batch and a layer, judged by the suite."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from conformance.implementation import Implementation
from conformance.problems.linear import LinearAttention
from cp_ref.schedules.problem import Problem

__all__ = ["Layer", "case_of", "check_layer"]


@dataclass(frozen=True)
class Layer:
    """Sizes and options of a linear attention."""

    kind: str = "gated_delta_rule"
    heads: int = 1
    shared: int = 1  # value heads for each head
    d_k: int = 3
    d_v: int = 2
    scale: float | None = None
    initial_state: bool = False
    output_final_state: bool = False
    tail: int = 0  # rows of each rank's slice, thd alone


def case_of(problem: Problem, layer: Layer, seed: int = 0) -> LinearAttention:
    """The suite's problem of a batch and a layer."""
    named = ("cp_size", "qkv_format", "layout", "cp_comm_type", "a2a_size", "dtype")
    lengths = zip(problem.lengths.len_q, problem.lengths.slots_q, strict=True)
    documents = tuple((int(tokens), int(slots)) for tokens, slots in lengths)
    batch = {name: getattr(problem, name) for name in named}
    return LinearAttention(
        documents=documents, seed=seed, **batch, **{f.name: getattr(layer, f.name) for f in fields(layer)}
    )


def check_layer(package: Any, problem: Problem, layer: Layer, seed: int = 0) -> None:
    """A layer over the simulated group meets the oracle."""
    case = case_of(problem, layer, seed)
    assert case.check(Implementation(package)) == [], str(case)
