"""Schedules of states on integers: proved for every random problem, printed and read back, wrong ones found."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_ref.contract.linear_schedules import (
    document_fragments,
    halo_workload,
    make_halo,
    make_rank_halo,
    make_rank_states,
    make_states,
)
from cp_ref.contract.verify_states import verify_states
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.proof import InvalidSchedule, verify, verify_tables
from tests.linear.problems import linear_problems
from tests.linear.state_mutants import MUTANTS, mutated
from tests.marks import examples

THREE = (Sequence(5, 5, 6, 6), Sequence(0, 0, 2, 2), Sequence(8, 8, 8, 8))
GOLDEN = """\
schedule state cp_size 2 heads 1/1 saved -
forward rank 0
  step
    send state [0:2] [8:10] to 1 tag 0
    recv state [10:14] from 1 tag 0
  step
    scan 0 [0:2]
    scan 2 [8:10] [10:14] [14:16]
forward rank 1
  step
    send state [10:14] to 0 tag 0
    recv state [0:2] [8:10] from 0 tag 0
  step
    scan 0 [0:2] [2:5]
    scan 2 [8:10] [10:14]
"""


def messages(schedule: Schedule) -> int:
    return sum(len(step.sends) for ranks in (schedule.forward, schedule.backward) for steps in ranks for step in steps)


@settings(max_examples=examples(int(os.environ.get("CP_PLANS", "600"))), deadline=None)
@given(linear_problems(), st.integers(1, 40))
def test_random_problems_are_proved(problem: Problem, kernel_size: int) -> None:
    states, halo = make_states(problem), make_halo(problem, kernel_size)
    verify_states(problem, states)
    verify_tables(halo_workload(problem, kernel_size), halo)
    for schedule in (states, halo):
        assert Schedule.parse(str(schedule)) == schedule
        for rank, passes in enumerate(zip(schedule.forward, schedule.backward, strict=True)):
            for steps in passes:
                for message in (message for step in steps for message in step.sends):
                    row, column = divmod(message.peer, problem.a2a_size)
                    joined = problem.cp_comm_type != "a2a+p2p"
                    assert joined or rank // problem.a2a_size == row or rank % problem.a2a_size == column
            made = make_rank_states(problem, rank) if schedule is states else make_rank_halo(problem, kernel_size, rank)
            assert made == passes


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_schedules_are_found(name: str) -> None:
    tried = 0

    @settings(max_examples=examples(200), deadline=None, derandomize=True, database=None)
    @given(linear_problems((2, 3, 4)), st.integers(0, 2**16))
    def each(problem: Problem, seed: int) -> None:
        nonlocal tried
        schedule = mutated(name, problem, make_states(problem), seed)
        if schedule is not None:
            tried += 1
            with pytest.raises(InvalidSchedule):
                verify_states(problem, schedule)

    each()
    assert tried > 2


def test_one_document_in_one_piece_sends_nothing() -> None:
    whole = ((0, 0, 0, 6), (1, 1, 0, 2), (1, 2, 0, 8))
    for problem in (
        Problem(2, THREE, qkv_format="thd", layout=whole),
        Problem(1, THREE, qkv_format="thd"),
        Problem(3, (Sequence(0, 0, 4, 4),), qkv_format="thd"),
    ):
        assert messages(make_states(problem)) == messages(make_halo(problem, 4)) == 0


def test_two_pieces_that_follow_on_each_other_on_one_rank_send_nothing() -> None:
    """Rows 0 to 2 lie behind rows 3 to 5 in the rank's buffer, so that these are two fragments."""
    problem = Problem(2, (Sequence(6, 6, 6, 6),), qkv_format="thd", layout=((0, 0, 3, 6), (0, 0, 0, 3)))
    assert len(document_fragments(problem)) == 2
    assert messages(make_states(problem)) == 0
    verify_states(problem, make_states(problem))


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_the_schedule_does_not_depend_on_the_schedule_of_attention(comm: str) -> None:
    size = 4 if comm == "a2a" else 1
    problem = Problem(4, THREE, comm, size, qkv_format="thd", heads_q=4, heads_kv=4)
    assert make_states(problem) == make_states(Problem(4, THREE, qkv_format="thd"))


def test_a_pair_of_groups_forwards() -> None:
    problem = Problem(4, (Sequence(16, 16, 16, 16),), "a2a+p2p", 2, "contiguous", "thd", heads_q=2, heads_kv=2)
    first, second, _ = make_states(problem).forward[2]
    assert [(m.peer, list(m.pieces.rows())) for m in first.recvs] == [(0, [(0, 4, 0, 1)])]
    assert [(m.peer, list(m.pieces.rows())) for m in second.sends] == [(3, [(0, 4, 0, 1), (8, 12, 0, 1)])]


def test_a_schedule_of_states_is_none_of_attention_and_the_reverse() -> None:
    problem = Problem(2, THREE, qkv_format="thd")
    with pytest.raises(InvalidSchedule, match=r"there is no kind 'state'"):
        verify(problem, make_states(problem))
    alone = Problem(1, THREE, qkv_format="thd")
    with pytest.raises(InvalidSchedule, match=r"a schedule of attention has no scans"):
        verify(alone, make_states(alone))
    with pytest.raises(InvalidSchedule, match=r"there is no kind 'kv'"):
        verify_states(problem, make_halo(problem, 4))
    with pytest.raises(InvalidSchedule, match=r"saves kv, but a schedule of states saves nothing"):
        verify_states(alone, replace(make_states(alone), saved=("kv",)))


def test_the_text() -> None:
    problem = Problem(2, THREE, qkv_format="thd")
    assert str(make_states(problem)).split("backward")[0] == GOLDEN
