"""Tier `budget`: float32, bfloat16 and float16 against the oracle. The unit is the error of plain PyTorch or, if
larger, of a rounded reference that is float32 inside."""

from __future__ import annotations

from functools import partial

import torch

from conformance.case import Case
from conformance.implementation import Implementation
from conformance.judge.baseline import eager_attention
from conformance.judge.budgets import compare
from conformance.judge.reference import exact_results, results_of
from conformance.judge.rounded_reference import rounded_results
from conformance.judge.run_record import Judged
from conformance.run.case_tensors import GlobalTensors, build
from conformance.run.play_case import play
from conformance.scores.score_formula import CaseScores

__all__ = ["check", "eager_results"]


def check(impl: Implementation, case: Case, device: str = "cpu") -> Judged:
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
