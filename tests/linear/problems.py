"""Problems of linear layers: drawn, judged by the suite, and how far low precision is from the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from conformance.case import Case
from conformance.implementation import Implementation, context
from conformance.problems.linear import (
    LinearAttention,
    batches,
    build_linear,
    judged_results,
    play_layer,
)
from conformance.problems.strategies import FEW_SIZES
from cp_ref import SimGroup
from cp_ref.schedules.problem import Problem

__all__ = [
    "check_layer",
    "linear_problems",
    "relative_errors",
]


def check_layer(package: Any, problem: Problem, layer: LinearAttention) -> None:
    """A layer over the simulated group meets the oracle. layer: of any batch."""
    case = replace(layer, case=Case(problem))
    assert case.check(Implementation(package)) == [], str(case)


def linear_problems(cp_sizes: tuple[int, ...] = FEW_SIZES) -> st.SearchStrategy[Problem]:
    """Self-attention problems of at most four documents, of at most 24 slots each."""
    return batches(cp_sizes, most=24, long=()).map(lambda case: case.problem)


def relative_errors(
    package: Any,
    problem: Problem,
    layer: LinearAttention,
    dtype: torch.dtype,
    device: str,
    *,
    cp_size: int | None = None,
) -> dict[str, float]:
    """Of every result and gradient, the root of the mean square of the error over that of the oracle's value.

    The tensors and the oracle are those of the suite; with a low dtype g and beta are in float32. cp_size: instead of
    the problem's, with the schedule p2p and rows in order. Of the ranks' final states the worst counts.
    """
    words: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    if cp_size is not None:
        words |= {"cp_size": cp_size, "cp_comm_type": "p2p", "a2a_size": 1, "layout": "contiguous"}
    case = replace(layer, case=Case(replace(problem, **words)), wide=dtype in (torch.bfloat16, torch.float16))
    impl, tensors = Implementation(package), build_linear(case, device)
    ranks = SimGroup(case.cp_size).run(
        lambda member: play_layer(impl, case, tensors, context(impl, case.problem, member), member.rank)
    )
    found: dict[str, float] = {}
    for name, (got, exact) in judged_results(case, tensors, ranks).items():
        name = name.partition(" of rank")[0]
        found[name] = max(found.get(name, 0.0), _relative(got, exact))
    return found


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    norm = wanted.norm().item()
    return (got.double() - wanted).norm().item() / norm if norm else got.double().norm().item()
