"""Heads that an a2a schedule exchanges in stages: the rewrite is proven, however they are cut, and what it hides is
counted; the choice of a cut follows from its costs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from cp_ref.spec import Message, Problem, RankSchedule, Schedule, Sequence, make_program, make_schedule, report, verify
from cp_ref.spec.planners.stage_costs import head_stages, ways_to_cut
from tests.marks import examples
from tests.spec.staged import ALWAYS, NEVER, costs, staged


@settings(max_examples=examples(200))
@given(staged())
def test_any_stages_verify_and_read_back(drawn: tuple[Problem, tuple[int, ...]]) -> None:
    problem, stages = drawn
    schedule = make_schedule(problem, stages=stages)
    assert Schedule.parse(str(schedule)) == schedule
    for rank in range(problem.cp_size):
        assert make_program(problem, rank, stages) == (schedule.forward[rank], schedule.backward[rank])
    groups = problem.cp_size // problem.a2a_size
    steps = groups * len(stages) + 2
    assert {len(program) for program in schedule.forward} == {steps}
    assert {len(program) for program in schedule.backward} == {steps + (groups > 1)}
    assert verify(problem, schedule).sent_bytes == report(problem, make_schedule(problem, stages=())).sent_bytes


@settings(max_examples=examples(60))
@given(staged())
def test_what_is_chosen_is_a_cut_of_the_heads(drawn: tuple[Problem, tuple[int, ...]]) -> None:
    problem, stages = drawn
    with costs(ALWAYS):
        chosen = replace(problem).workload.stages
        assert sum(chosen) == sum(stages)
        assert problem.pairs == 0 or sum(stages) == 1 or len(chosen) > 1
        verify(problem, make_schedule(replace(problem)))
    with costs(NEVER):
        assert replace(problem).workload.stages == (sum(stages),)


def exposed(program: RankSchedule) -> int:
    """Rows times heads that a rank sends in steps without a tile."""

    def size(m: Message) -> int:
        p = m.pieces
        return int(((p.stop - p.start) * (p.head_stop - p.head_start)).sum())

    return sum(size(m) for step in program if not len(step.tiles) for m in step.sends)


@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_not_hidden_is_the_first_and_the_last_stage(groups: int) -> None:
    comm = "a2a" if groups == 1 else "a2a+p2p"
    problem = Problem(2 * groups, (Sequence(16, 16, 16, 16),), comm, 2, heads_q=16, heads_kv=8)
    at_once, cut = (make_schedule(problem, stages=stages) for stages in ((4,), (1, 2, 1)))
    for one, other in ((at_once.forward, cut.forward), (at_once.backward, cut.backward)):
        assert [4 * exposed(program) for program in other] == [exposed(program) for program in one]


def test_kv_heads_that_go_to_several_ranks_are_not_cut() -> None:
    problem = Problem(4, (Sequence(16, 16, 16, 16),), "a2a", 4, heads_q=16, heads_kv=2)
    with costs(ALWAYS):
        assert problem.workload.stages == (1,)
        assert [len(program) for program in make_schedule(problem).forward] == [3] * 4


H200 = {"heads_q": 32, "d_qk": 128, "d_v": 128, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("heads_kv", "cuts"), [(8, [(4,), (4,), (4,), (4,)]), (32, [(16,), (1, 14, 1), (1, 14, 1), (16,)])]
)
def test_heads_are_cut_where_there_is_much_to_hide(heads_kv: int, cuts: list[tuple[int, ...]]) -> None:
    """Of one sequence over two ranks, from what the host hardly launches to what messages are nothing to.

    With few heads a launch more costs what it hides.
    """
    found = []
    for tokens in (2**10, 2**15, 2**17, 2**22):
        problem = Problem(2, (Sequence(tokens, tokens, tokens, tokens),), "a2a", 2, heads_kv=heads_kv, **H200)
        found.append(head_stages(problem, problem.pairs))
    assert found == cuts


def test_the_cuts_to_choose_from() -> None:
    for heads in range(1, 33):
        ways = ways_to_cut(heads)
        assert ways[0] == (heads,)
        assert len(set(ways)) == len(ways)
        assert {sum(way) for way in ways} == {heads}
        assert all(len(a) <= len(b) for a, b in pairwise(ways))
