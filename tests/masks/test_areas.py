"""Attention slices through whole schedules: proved on integers, and computed by both packages against the oracle in
float64.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
import cp_ref
from conformance.case import Case
from conformance.checks.values import check_logic
from conformance.tensors import seen
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.verify.proof import verify
from tests.marks import examples
from tests.masks.problems import problems

NUMBER = int(os.environ.get("CP_AREAS", "100"))


@settings(max_examples=examples(2 * NUMBER))
@given(problems((1, 2, 3, 4, 6, 8)))
def test_schedules_compute_every_pair_once(problem: Problem) -> None:
    assert Problem.parse(str(problem)) == problem
    areas = problem.workload.areas
    shown = {
        (i, j)
        for q0, q1, k0, k1, lo, hi in areas.rows()
        for i in range(q0, q1)
        for j in range(k0, k1)
        if lo <= j - i <= hi
    }
    assert shown == {(i, j) for i, keys in seen(problem) for j in keys}
    assert problem.pairs == areas.pairs.sum() == len(shown)
    verify(problem, make_schedule(problem))


@pytest.mark.parametrize("package", [cp_ref, cp_fast])
@settings(max_examples=examples(NUMBER))
@given(problems(), st.booleans(), st.integers(0, 1))
def test_both_packages_meet_the_oracle(package: object, problem: Problem, use_plan: bool, tail: int) -> None:
    tail *= problem.cp_size
    case = Case(problem, tail, tail, use_plan=use_plan, return_lse=True, return_max_logit=True, loss="out+lse")
    assert check_logic(package, case) == []  # type: ignore[arg-type]
