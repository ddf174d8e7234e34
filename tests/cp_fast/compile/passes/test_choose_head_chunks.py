"""The choice of head chunks follows from its costs, and is always a cut of a rank's kv heads."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings

from cp_fast.compile.chosen_schedule import choose_head_chunks, chosen_rank_schedule, chosen_schedule, ways_to_cut
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.verify.proof import verify
from tests.cp_fast.compile.passes.planned_at import ALWAYS_CHUNKS, NEVER_CHUNKS, planned_at
from tests.marks import examples
from tests.spec.problems import problems
from tests.spec.test_planners import chunked_problems


@settings(max_examples=examples(60))
@given(chunked_problems())
def test_a_chosen_cut_is_a_cut_of_the_heads(drawn: tuple[Problem, tuple[int, ...]]) -> None:
    problem, any_cut = drawn
    with planned_at(ALWAYS_CHUNKS):
        chosen = choose_head_chunks(problem)
        assert sum(chosen) in (0, sum(any_cut))
        assert problem.pairs == 0 or sum(any_cut) == 1 or len(chosen) > 1
        verify(problem, chosen_schedule(problem, chosen, {}))
    with planned_at(NEVER_CHUNKS):
        assert choose_head_chunks(problem) == ()


@settings(max_examples=examples(60))
@given(problems((1, 2, 4)))
def test_a_rank_schedule_is_a_part_of_the_schedule(problem: Problem) -> None:
    chosen = choose_head_chunks(problem)
    rank_schedules = {rank: chosen_rank_schedule(problem, rank, chosen) for rank in range(problem.cp_size)}
    schedule = chosen_schedule(problem, chosen, {})
    assert schedule == chosen_schedule(problem, chosen, rank_schedules)
    assert rank_schedules == dict(enumerate(zip(schedule.forward, schedule.backward, strict=True)))


def test_kv_heads_that_go_to_several_ranks_are_not_cut() -> None:
    problem = Problem(4, (Sequence(16, 16, 16, 16),), "a2a", 4, heads_q=16, heads_kv=2)
    with planned_at(ALWAYS_CHUNKS):
        assert choose_head_chunks(problem) == ()


H200 = {"heads_q": 32, "d_qk": 128, "d_v": 128, "dtype": "bfloat16"}


@pytest.mark.parametrize(("heads_kv", "cuts"), [(8, [(), (), (), ()]), (32, [(), (1, 14, 1), (1, 14, 1), ()])])
def test_heads_are_cut_where_there_is_much_to_hide(heads_kv: int, cuts: list[tuple[int, ...]]) -> None:
    """One sequence over two ranks: the shortest one is too short for the host, and the longest one's messages cost
    next to nothing. With few heads a further launch costs as much as it hides.
    """
    found = []
    for tokens in (2**10, 2**15, 2**17, 2**22):
        problem = Problem(2, (Sequence(tokens, tokens, tokens, tokens),), "a2a", 2, heads_kv=heads_kv, **H200)
        found.append(choose_head_chunks(problem))
    assert found == cuts


def test_the_cuts_to_choose_from() -> None:
    for heads in range(1, 33):
        ways = ways_to_cut(heads)
        assert ways[0] == (heads,)
        assert len(set(ways)) == len(ways)
        assert {sum(way) for way in ways} == {heads}
        assert all(len(a) <= len(b) for a, b in pairwise(ways))
