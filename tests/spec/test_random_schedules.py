"""Random legal schedules are legal, read back, and are as different as they are meant to be; so are two that have names
and no planner.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from cp_ref.schedules.planners.all_gather import plan_all_gather_rank
from cp_ref.schedules.planners.p2p import plan_p2p_rank
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Problem, Workload
from cp_ref.schedules.schedule import Message, Schedule, Step
from cp_ref.schedules.verify.proof import verify, verify_tables
from tests.marks import examples
from tests.spec.problems import small_problems
from tests.spec.random_schedules import (
    backward_ring,
    random_schedules,
    random_workloads,
    ring_of_rings,
    scheduled_problems,
)


@settings(max_examples=examples(int(os.environ.get("CP_PLANS", "400"))))
@given(scheduled_problems())
def test_they_verify_and_read_back(drawn: tuple[Problem, Schedule]) -> None:
    problem, schedule = drawn
    report = verify(problem, schedule)
    assert Schedule.parse(str(schedule)) == schedule
    if not any(len(step.tiles) for rank_schedule in schedule.forward for step in rank_schedule):
        assert problem.pairs == 0
    assert sum(r.pairs for r in report.ranks) == problem.pairs * problem.heads_q


@settings(max_examples=examples(200))
@given(random_workloads().flatmap(lambda work: st.tuples(st.just(work), random_schedules(work))))
def test_there_are_some_for_any_tables(drawn: tuple[Workload, Schedule]) -> None:
    verify_tables(*drawn)


@settings(max_examples=examples(200))
@given(random_workloads())
def test_rings_take_any_tables(work: Workload) -> None:
    verify_tables(work, backward_ring(work))
    for plan in (plan_p2p_rank, plan_all_gather_rank):
        rank_schedules = [plan(Visibility(work), rank) for rank in range(work.cp_size)]
        forward, backward = (tuple(p[n] for p in rank_schedules) for n in (0, 1))
        verify_tables(work, Schedule("planned", (work.heads_q, work.heads_kv), forward, backward))


def _steps(schedule: Schedule) -> list[tuple[int, int, Step]]:
    return [(r, n, step) for r, rank_schedule in enumerate(schedule.forward) for n, step in enumerate(rank_schedule)]


def _sent(schedule: Schedule, kind: str) -> list[tuple[int, int, Message]]:
    return [(r, n, m) for r, n, step in _steps(schedule) for m in step.sends if m.kind == kind]


def _relayed(problem: Problem, schedule: Schedule, kind: str) -> bool:
    """Whether a rank sends rows that it does not own."""
    side = problem.workload.ownership.side("kv" if kind == "kv" else "q")
    return any(
        not ((side.of(r).start <= start) & (stop <= side.of(r).stop)).any()
        for r, _, m in _sent(schedule, kind)
        for start, stop, _, _ in m.pieces.rows()
    )


KINDS_OF_SCHEDULES: dict[str, Callable[[Problem, Schedule], bool]] = {
    "keys through a third rank": lambda p, s: _relayed(p, s, "kv"),
    "queries travel": lambda p, s: bool(_sent(s, "q")),
    "partial outputs handed to a rank that is not their owner": lambda p, s: any(
        not ((p.workload.ownership.q.start <= m.pieces.start[0]) & (p.workload.ownership.q.rank == m.peer)).any()
        for _, _, m in _sent(s, "out")
    ),
    "a cut inside a kv group": lambda p, s: any(
        (step.tiles.head_start % p.heads_per_kv > 0).any() for _, _, step in _steps(s)
    ),
    "a send and its receive at different steps": lambda p, s: any(
        all(n != m for r, m, step in _steps(s) for got in step.recvs if r == sent.peer and got.tag == sent.tag)
        for _, n, sent in _sent(s, "kv")
    ),
    "rank schedules of different lengths": lambda p, s: len({len(rank_schedule) for rank_schedule in s.forward}) > 1,
    "several messages in a step": lambda p, s: any(len(step.sends) > 1 for _, _, step in _steps(s)),
    "several pieces in a message": lambda p, s: any(len(m.pieces) > 1 for _, _, m in _sent(s, "kv")),
    "a step that sends, receives and computes": lambda p, s: any(
        step.sends and step.recvs and len(step.tiles) for _, _, step in _steps(s)
    ),
    "other tiles in the backward pass": lambda p, s: (
        sum(len(step.tiles) for rank_schedule in s.backward for step in rank_schedule)
        != sum(len(step.tiles) for _, _, step in _steps(s))
    ),
    "operands that are kept": lambda p, s: bool(s.saved) and bool(_sent(s, "kv")),
}


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("name", KINDS_OF_SCHEDULES)
@pytest.mark.one_in(2)
def test_there_is_every_kind(name: str) -> None:
    rules = settings(max_examples=2000, phases=(Phase.generate,), database=None, deadline=None)
    find(scheduled_problems(), lambda drawn: KINDS_OF_SCHEDULES[name](*drawn), settings=rules)


@given(small_problems(cp_sizes=(1, 2, 3, 4, 6)))
def test_rings_that_no_planner_has(problem: Problem) -> None:
    work = problem.workload
    sizes = [n for n in range(1, work.cp_size + 1) if work.cp_size % n == 0]
    for schedule in (backward_ring(work), *(ring_of_rings(work, size) for size in sizes)):
        verify(problem, schedule)
