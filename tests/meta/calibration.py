"""How the budgets' allowances were found: python -m tests.meta.calibration [PROBLEMS]

Drawn problems are computed by `rounded_results`. For each allowance of `conformance.checks.budgets` this prints the
smallest value with which every result is within its budget, the others being what they are. The allowances are twice
that, or more where a comment says why. No implementation under test takes part.
"""

from __future__ import annotations

import sys
from unittest import mock

import torch

from conformance.checks import budgets
from conformance.checks.baselines import rounded_results
from conformance.checks.reference import exact_results
from conformance.checks.values import eager_results
from conformance.problems.strategies import cases
from conformance.tensors import build
from tests.meta.mutants.hunt import drawn_problems

__all__ = ["ALLOWANCES", "measured", "needed"]

ALLOWANCES = ("_NOISE", "_WIDE_NOISE", "_MEAN_NOISE", "_LUCK", "_DELTA")
_DTYPES = ("bfloat16", "float16", "float32")

Results = dict[str, torch.Tensor]
Measured = tuple[Results, Results, Results, torch.dtype]  # rounded, exact, eager


def measured(count: int) -> list[Measured]:
    """The rounded, the exact and the eager results of drawn problems."""
    found: list[Measured] = []
    for case in drawn_problems("calibration", cases(dtypes=_DTYPES), count):
        tensors = build(case)
        got = rounded_results(case, tensors)
        mine = {name: got[name] for name in case.results}
        exact, eager = exact_results(case, tensors), eager_results(case, tensors)
        found.append((mine, exact, eager, getattr(torch, case.problem.dtype)))
    return found


def needed(name: str, problems: list[Measured]) -> float:
    """The smallest value of one allowance with which every problem is within its budgets, to a tenth."""
    critical = [p for p in problems if not _within(name, 0.0, [p])]
    if not critical:
        return 0.0
    low, high = 0.0, getattr(budgets, name)
    while not _within(name, high, critical):
        high *= 2
    while high - low > 0.1 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _within(name, middle, critical) else (middle, high)
    return high


def _within(name: str, value: float, problems: list[Measured]) -> bool:
    with mock.patch.object(budgets, name, value):
        return all(row.ok for problem in problems for row in budgets.compare(*problem))


if __name__ == "__main__":
    torch.set_num_threads(1)
    drawn = measured(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
    print(f"{len(drawn)} problems")
    for allowance in ALLOWANCES:
        print(f"{allowance:16} is {getattr(budgets, allowance):<12.4g} needed {needed(allowance, drawn):.3g}")
