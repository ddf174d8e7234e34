"""Tiers `logic`, `budget` and `pairs`: results against the oracle's, closely in float64 and float32, by a budget in low
precision."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from conformance.case import Case
from conformance.checks.baselines import eager_attention, rounded_results
from conformance.checks.budgets import compare, largest, tolerance, worst
from conformance.checks.play import play
from conformance.checks.reference import exact_results, results_of
from conformance.implementation import Implementation
from conformance.record import Judged
from conformance.scores import CaseScores
from conformance.tensors import GlobalTensors, batch_axis, build, sequence_axis, where
from cp_ref.schedules.schedule import side_of

__all__ = ["check_budget", "check_logic", "check_logic_of", "check_pairs", "compare_result", "eager_results"]

# ---- logic


def check_logic(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Where the implementation's results differ from the oracle's: the worst place of each result.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    return check_logic_of(impl, case, build(case, device))


def check_logic_of(impl: Implementation, case: Case, tensors: GlobalTensors) -> list[str]:
    """`check` with tensors of one's own."""
    played = play(impl, case, tensors)  # before the oracle: fresh memory may hold the right answer
    found = list(played.findings)
    exact = exact_results(case, tensors)
    for name, got in played.results.items():
        found += compare_result(case, tensors, name, got, exact[name])
    return found


def compare_result(case: Case, tensors: GlobalTensors, name: str, got: torch.Tensor, exact: torch.Tensor) -> list[str]:
    """Findings about one result: padding first, then infinities and NaN, then the largest error."""
    found, limit = [], tolerance(case, exact)
    got = got.double()
    if name == "max_logit":
        limit = max(limit, 1e-6 * max(1.0, largest(exact)))
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


# ---- budget
#
# Tier `budget`: float32, bfloat16 and float16 against the oracle. The unit is the error of plain PyTorch or, if
# larger, of a rounded reference that is float32 inside.


def check_budget(impl: Implementation, case: Case, device: str = "cpu") -> Judged:
    """The results that exceed their budget, and how much of it every result used.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    tensors = build(case, device)
    played = play(impl, case, tensors)  # before the oracle: fresh memory may hold the right answer
    if played.findings:
        return Judged(played.findings)
    exact = exact_results(case, tensors)
    eager, rounded = eager_results(case, tensors), rounded_results(case, tensors)
    rows = compare(played.results, exact, eager, getattr(torch, case.problem.dtype), rounded)
    used = {f"{row.name} max": row.max_error / row.max_bound for row in rows if row.max_bound > 0}
    used |= {f"{row.name} mean": row.mean_error / row.mean_bound for row in rows if row.mean_bound > 0}
    return Judged([str(row) for row in rows if not row.ok], used)


def eager_results(case: Case, tensors: GlobalTensors) -> dict[str, torch.Tensor]:
    """The baseline's results, under the oracle's names, and with its upstream gradients."""
    more = {"problem": case.problem, "case_scores": CaseScores.of(case, tensors.q.device)}
    return results_of(partial(eager_attention, **more), case, tensors, None)


# ---- pairs
#
# Tier `pairs`: every possible pair of features in one problem, and every schedule with every format and mask.
#
# The cases are not drawn but made (`conformance.problems.covering`); each is judged by logic, or by the budget in low
# precision.


def check_pairs(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Findings of the tier that sees most in the case's dtype.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    check = check_logic if case.problem.dtype in ("float64", "float32") else check_budget
    return check(impl, case, device)
