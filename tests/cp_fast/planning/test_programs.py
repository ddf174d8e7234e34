"""Every rank's program is what the specification's schedule says, token by token."""

from __future__ import annotations

import os

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.strategies import problems as conformance_problems
from cp_fast.planning.compile import compile_program
from cp_ref.spec import Problem, make_schedule
from tests.cp_fast.planning.played import check_programs
from tests.spec.problems import problems

CPU = torch.device("cpu")
EXAMPLES = int(os.environ.get("CP_PLANS", "1000"))


@settings(max_examples=EXAMPLES)
@given(st.one_of(problems(cp_sizes=(1, 2, 3, 4, 5, 8)), conformance_problems()))
def test_programs_do_what_the_schedule_says(problem: Problem) -> None:
    programs = [compile_program(problem, rank, CPU) for rank in range(problem.cp_size)]
    check_programs(problem, programs, make_schedule(problem))
