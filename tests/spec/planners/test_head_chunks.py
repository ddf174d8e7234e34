"""Head chunks of an a2a schedule: the rewrite is proven for any sizes, and the messages that it hides are counted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from cp_ref.schedules.planners.make_schedule import make_rank_schedule, make_schedule
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Message, RankSchedule, Schedule
from cp_ref.schedules.verify.costs import report
from cp_ref.schedules.verify.proof import verify
from tests.marks import examples
from tests.spec.planners.chunked_problems import chunked_problems

FOUR = Problem(2, (Sequence(16, 16, 16, 16),), "a2a", 2, heads_q=16, heads_kv=8)  # kv heads a rank


@settings(max_examples=examples(200))
@given(chunked_problems())
def test_any_head_chunks_verify_and_read_back(drawn: tuple[Problem, tuple[int, ...]]) -> None:
    problem, head_chunks = drawn
    schedule = make_schedule(problem, head_chunks=head_chunks)
    assert Schedule.parse(str(schedule)) == schedule
    for rank in range(problem.cp_size):
        assert make_rank_schedule(problem, rank, head_chunks) == (schedule.forward[rank], schedule.backward[rank])
    groups = problem.cp_size // problem.a2a_size
    steps = groups * len(head_chunks) + 2
    assert {len(rank_schedule) for rank_schedule in schedule.forward} == {steps}
    assert {len(rank_schedule) for rank_schedule in schedule.backward} == {steps + (groups > 1)}
    assert verify(problem, schedule).sent_bytes == report(problem, make_schedule(problem)).sent_bytes


def exposed(rank_schedule: RankSchedule) -> int:
    """Rows times heads that a rank sends in steps without a tile."""

    def size(m: Message) -> int:
        p = m.pieces
        return int(((p.stop - p.start) * (p.head_stop - p.head_start)).sum())

    return sum(size(m) for step in rank_schedule if not len(step.tiles) for m in step.sends)


@pytest.mark.parametrize("groups", [1, 2])
def test_only_the_first_and_the_last_chunk_are_exposed(groups: int) -> None:
    comm = "a2a" if groups == 1 else "a2a+p2p"
    problem = Problem(2 * groups, (Sequence(16, 16, 16, 16),), comm, 2, heads_q=16, heads_kv=8)
    at_once, cut = (make_schedule(problem, head_chunks=chunks) for chunks in ((), (1, 2, 1)))
    assert at_once == make_schedule(problem, head_chunks=(4,))
    for one, other in ((at_once.forward, cut.forward), (at_once.backward, cut.backward)):
        assert [4 * exposed(rank_schedule) for rank_schedule in other] == [
            exposed(rank_schedule) for rank_schedule in one
        ]


SHARED = Problem(4, (Sequence(16, 16, 16, 16),), "a2a", 4, heads_q=16, heads_kv=2)  # two ranks have the same kv head


@pytest.mark.parametrize(
    ("problem", "head_chunks", "needs"),
    [
        (FOUR, (1, 2), "integers from 1 with sum 4"),
        (FOUR, (4, 0), "integers from 1 with sum 4"),
        (FOUR, (2.0, 2), "integers from 1 with sum 4"),
        (SHARED, (1,), "no rank has kv heads of its own to exchange"),
        (Problem(2, (Sequence(4, 4, 4, 4),)), (1,), "no rank has kv heads of its own to exchange"),
    ],
)
def test_other_sizes_are_refused(problem: Problem, head_chunks: Any, needs: str) -> None:
    for plan in (make_schedule, lambda problem, head_chunks: make_rank_schedule(problem, 0, head_chunks)):
        with pytest.raises(ValueError, match=needs):
            plan(problem, head_chunks=head_chunks)


def test_by_default_all_heads_are_exchanged_at_once() -> None:
    assert [len(rank_schedule) for rank_schedule in make_schedule(FOUR).forward] == [3] * 2
    assert [len(rank_schedule) for rank_schedule in make_schedule(SHARED).forward] == [3] * 4
