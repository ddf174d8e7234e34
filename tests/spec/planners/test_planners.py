"""Every schedule of every problem verifies; four hundred of them here, more with CP_PLANS in the environment."""

import os

import pytest
from hypothesis import given, settings

from cp_ref.schedules.planners.make_schedule import make_rank_schedule, make_schedule
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.proof import verify
from tests.marks import examples
from tests.spec.problems import problems


@pytest.mark.thorough
@settings(max_examples=examples(int(os.environ.get("CP_PLANS", "400"))))
@given(problems())
def test_every_schedule_verifies_and_reads_back(problem: Problem) -> None:
    schedule = make_schedule(problem)
    report = verify(problem, schedule)
    assert sum(r.pairs for r in report.ranks) == problem.pairs * problem.heads_q
    assert Schedule.parse(str(schedule)) == schedule
    assert Problem.parse(str(problem)) == problem


@given(problems())
def test_one_ranks_plan_is_its_part_of_the_whole(problem: Problem) -> None:
    schedule = make_schedule(problem)
    for rank in range(problem.cp_size):
        assert make_rank_schedule(problem, rank) == (schedule.forward[rank], schedule.backward[rank])
