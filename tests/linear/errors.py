"""Errors of linear layers in low precision, on any device: how far results and gradients are from the oracle's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conformance.implementation import Implementation, context
from conformance.problems.linear import build_linear, judged_results, play_layer
from cp_ref import SimGroup
from cp_ref.schedules.problem import Problem
from tests.linear.played import Layer, case_of

__all__ = ["relative_errors"]


def relative_errors(
    package: Any,
    problem: Problem,
    layer: Layer,
    dtype: torch.dtype,
    device: str,
    *,
    cp_size: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Of every result and gradient, the root of the mean square of the error over that of the oracle's value.

    The tensors and the oracle are those of the suite; with a low dtype g and beta are in float32. cp_size: instead of
    the problem's, with the schedule p2p and rows in order. Of the ranks' final states the worst counts.
    """
    words: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    if cp_size is not None:
        words |= {"cp_size": cp_size, "cp_comm_type": "p2p", "a2a_size": 1, "layout": "contiguous"}
    case = case_of(replace(problem, **words), layer, seed)
    case = replace(case, wide=dtype in (torch.bfloat16, torch.float16))
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
