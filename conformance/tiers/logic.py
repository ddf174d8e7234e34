"""Tier `logic`: float64 and float32 against the oracle, so closely that only a wrong formula or a wrong token can be
the reason.

Padding and tail are exact: 0 in out and gradients, -inf in lse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from conformance.case import Case
from conformance.implementation import Implementation
from conformance.judge.compare_tensors import worst
from conformance.judge.reference import exact_results
from conformance.run.case_tensors import GlobalTensors, batch_axis, build, sequence_axis
from conformance.run.placement import where
from conformance.run.play_case import play
from cp_ref.schedules.schedule import side_of

__all__ = ["check", "check_tensors", "compare", "tolerance"]


def check(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Where the implementation's results differ from the oracle's: the worst place of each result.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    return check_tensors(impl, case, build(case, device))


def check_tensors(impl: Implementation, case: Case, tensors: GlobalTensors) -> list[str]:
    """`check` with tensors of one's own."""
    played = play(impl, case, tensors)  # before the oracle: fresh memory may hold the right answer
    found = list(played.findings)
    exact = exact_results(case, tensors)
    for name, got in played.results.items():
        found += compare(case, tensors, name, got, exact[name])
    return found


def tolerance(case: Case, exact: torch.Tensor) -> float:
    """The largest error that re-ordered sums may make: relative to the largest exact value, 1 at least.

    Scores grow with the square of the magnitude of q and k, and their rounding errors with them. In float16 and
    bfloat16, which this tier does not draw, it is some roundings: the budget tier is closer there.
    """
    finite = exact[exact.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    eps = torch.finfo(getattr(torch, case.problem.dtype)).eps
    base = {"float64": 1e-10, "float32": 2e-5}.get(case.problem.dtype, 8 * eps)
    return base * case.magnitude**2 * max(1.0, largest)


def compare(case: Case, tensors: GlobalTensors, name: str, got: torch.Tensor, exact: torch.Tensor) -> list[str]:
    """Findings about one result: padding first, then infinities and NaN, then the largest error."""
    found, limit = [], tolerance(case, exact)
    got = got.double()
    if name == "max_logit":
        limit = max(
            limit, 1e-6 * max(1.0, exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 1.0)
        )
    elif name != "d_offset":
        empty = -torch.inf if name == "lse" else 0.0
        padding = _padding(case, tensors, name, got)
        wrong = padding & (got != empty)
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            found.append(
                f"{name} is {got[tuple(place)].item()} at {_place(case, name, place)}; it must be {empty:g} there"
            )
        got, exact = got.masked_fill(padding, 0.0), exact.masked_fill(padding, 0.0)
    return found + worst(name, got, exact, limit, lambda index: _place(case, name, index))


def _padding(case: Case, tensors: GlobalTensors, name: str, x: torch.Tensor) -> torch.Tensor:
    """Which values of a result belong to no real token: bool, x's shape."""
    real = tensors.real_q if side_of(name) == "q" else tensors.real_kv
    if name == "lse":
        real = {"bshd": real, "sbhd": real.t(), "thd": real[None]}[case.problem.qkv_format]  # [b, s] or [1, t]
        real = real if case.problem.qkv_format == "thd" else real[:, None]
    else:
        real = real[..., None, None]
    return ~real.expand(x.shape)


def _place(case: Case, name: str, index: Sequence[int]) -> str:
    """An index of a result in words."""
    if name in ("max_logit", "d_offset"):
        return f"head {index[0]}"
    fmt = case.problem.qkv_format
    side = side_of(name)
    if name == "lse":
        batch, head, row = (None, index[0], index[1]) if fmt == "thd" else (index[0], index[1], index[2])
        return f"{where(case, side, batch, row)}, head {head}"
    axis = batch_axis(fmt)
    batch = None if axis is None else index[axis]
    return f"{where(case, side, batch, index[sequence_axis(fmt)])}, head {index[-2]}, dim {index[-1]}"
