"""The schedule that runs: its head chunks, and own keys that wait."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
from conformance.case import Case
from conformance.checks.values import check_logic
from cp_fast.compile.chosen_head_chunks import choose_head_chunks, ways_to_cut
from cp_fast.compile.chosen_schedule import Choices, choose, chosen_rank_schedule, chosen_schedule
from cp_fast.compile.own_keys import choose_own_first
from cp_fast.compile.pipeline import compiled
from cp_fast.compile.program import Launch
from cp_fast.tools.cost.counts import LIBRARY
from cp_ref import masks
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Schedule, Tiles
from cp_ref.schedules.verify.proof import verify
from tests.cp_fast.compile.planned_at import ALWAYS_CHUNKS, ALWAYS_WAIT, NEVER_CHUNKS, NEVER_WAIT, planned_at
from tests.marks import examples
from tests.schedules.test_schedules import check
from tests.spec.problems import problems, problems_of_areas
from tests.spec.test_planners import chunked_problems

# ---- Head chunks


@settings(max_examples=examples(60))
@given(chunked_problems())
def test_a_chosen_cut_is_a_cut_of_the_heads(drawn: tuple[Problem, tuple[int, ...]]) -> None:
    problem, any_cut = drawn
    with planned_at(ALWAYS_CHUNKS):
        chosen = choose_head_chunks(problem)
        assert sum(chosen) in (0, sum(any_cut))
        exchanged = Visibility(problem.workload).exchanged.areas.pairs.sum()
        assert exchanged == 0 or sum(any_cut) == 1 or len(chosen) > 1
        verify(problem, chosen_schedule(problem, choose(problem), {}))
    with planned_at(NEVER_CHUNKS):
        assert choose_head_chunks(problem) == ()


@settings(max_examples=examples(60))
@given(problems((1, 2, 4)))
def test_a_rank_schedule_is_a_part_of_the_schedule(problem: Problem) -> None:
    chosen = choose(problem)
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


@pytest.mark.parametrize(
    ("lengths", "cut"),
    [((65536,), (1, 7)), ((60000, 5536), (1, 7)), ((32768, 16384, 8192, 4096, 4096), ()), ((8192,), ())],
)
def test_keys_of_several_documents_are_gathered_at_once(lengths: tuple[int, ...], cut: tuple[int, ...]) -> None:
    """Over four ranks. The estimate errs by as much as chunks save there; a batch that is nearly one document counts as
    one.
    """
    documents = tuple(Sequence(n, n, n, n) for n in lengths)
    packed = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
    assert choose_head_chunks(Problem(4, documents, "all_gather", heads_kv=8, **packed, **H200)) == cut


def test_documents_at_home_are_not_exchanged_and_hide_messages() -> None:
    """A document over both ranks, 16,384 tokens on each, beside documents of 2,048 on one rank. A few of these are
    exchanged too. From 16 a rank on they stay at home and hide what comes. Alone, they exchange nothing.
    """

    def chosen(long: int, short: int) -> tuple[int, ...]:
        parts = [(rank, 0, rank * long, (rank + 1) * long) for rank in range(2) if long]
        home = [(n % 2, n + len(parts) // 2, 0, 2048) for n in range(2 * short)]
        lengths = [2 * long] * (len(parts) // 2) + [2048] * 2 * short
        documents, layout = tuple(Sequence(*[n] * 4) for n in lengths), tuple(sorted(parts + home))
        given = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "heads_kv": 32, **H200}
        return choose_head_chunks(Problem(2, documents, "a2a", 2, layout=layout, **given))

    assert [chosen(16_384, short) for short in (0, 1, 4, 16, 64)] == [(1, 14, 1), (1, 14, 1), (2, 12, 2), (), ()]
    assert chosen(0, 64) == ()


def test_the_cuts_to_choose_from() -> None:
    for heads in range(1, 33):
        ways = ways_to_cut(heads)
        assert ways[0] == (heads,)
        assert len(set(ways)) == len(ways)
        assert {sum(way) for way in ways} == {heads}
        assert all(len(a) <= len(b) for a, b in pairwise(ways))


# ---- Own keys that wait
#
# Own keys that wait for the others: the rewrite is proven on trees and on any areas. It adds no launch and no row to
# one, and the messages that were hidden stay hidden.


def planned(problem: Problem) -> Schedule:
    """Without head chunks."""
    return chosen_schedule(problem, Choices(choose_own_first(problem)), {})


@st.composite
def trees(draw: st.DrawFn) -> Problem:
    """Prompts with answers, nested ones too, over several ranks."""
    unit, number = draw(st.sampled_from([1, 4])), draw(st.integers(2, 8))
    lengths = [unit * draw(st.integers(1, 12)) for _ in range(number)]
    nested = [draw(st.integers(-1, n - 1)) for n in range(1, number)]
    areas = masks.tree(lengths, [-1, *draw(st.sampled_from([nested, [0] * (number - 1)]))])
    return Problem(
        draw(st.sampled_from([2, 3, 4, 8])),
        (Sequence(*[sum(lengths)] * 4),),
        draw(st.sampled_from(["p2p", "all_gather"])),
        layout=draw(st.sampled_from(["balanced", "contiguous", "dual_chunk"])),
        qkv_format="thd",
        areas=tuple(map(tuple, areas.tolist())),
    )


@settings(max_examples=examples(30))
@given(trees())
def test_no_launch_more_and_none_with_more_rows(problem: Problem) -> None:
    found = []
    for costs in (NEVER_WAIT, ALWAYS_WAIT):
        with planned_at(costs):
            schedule = planned(problem)
            verify(problem, schedule)
            passes = [compiled(problem, rank, LIBRARY).programs.forward for rank in range(problem.cp_size)]
            launches = [list(program.of(Launch)) for program in passes]
            found.append([(len(some), sum(one.q_rows.total for one in some)) for some in launches])
    for before, after in zip(*found, strict=True):
        assert after <= before
        assert after[1] <= before[1]


@settings(max_examples=examples(50))
@given(problems_of_areas((2, 3, 4, 6)))
def test_any_areas_verify_with_the_same_messages_and_tiles(problem: Problem) -> None:
    with planned_at(NEVER_WAIT):
        before = planned(problem)
    with planned_at(ALWAYS_WAIT):
        after = planned(problem)
    assert before == make_schedule(problem) or choose_own_first(problem)
    assert verify(problem, before).sent_bytes == verify(problem, after).sent_bytes
    for one, other in zip((*before.forward, *before.backward), (*after.forward, *after.backward), strict=True):
        assert [step[:2] for step in one] == [step[:2] for step in other]
        tiles = [sorted(Tiles.concat([step.tiles for step in steps]).rows()) for steps in (one, other)]
        assert tiles[0] == tiles[1]


@settings(max_examples=examples(20))
@given(trees())
def test_plans_meet_the_oracle(problem: Problem) -> None:
    small = replace(problem, heads_q=2, d_qk=3, d_v=2, dtype="float64")
    with planned_at(ALWAYS_WAIT):
        case = Case(small, return_lse=True, return_max_logit=True, loss="out+lse")
        assert check_logic(cp_fast, case) == []  # type: ignore[arg-type]


@settings(max_examples=examples(10))
@given(trees())
def test_the_reference_plays_such_schedules_too(problem: Problem) -> None:
    small = replace(problem, heads_q=2, d_qk=3, d_v=2, dtype="float64")
    with planned_at(ALWAYS_WAIT):
        schedule = planned(small)
    check("cp_ref", small, schedule)


def prompt(answers: int, answer: int, comm: str) -> Problem:
    """A prompt of 4,096 tokens over two ranks."""
    areas = masks.shared_prefix(4096, [answer] * answers)
    sizes = {"heads_q": 32, "heads_kv": 8, "d_qk": 128, "d_v": 128, "dtype": "bfloat16"}
    rows, one = tuple(map(tuple, areas.tolist())), Sequence(*[4096 + answers * answer] * 4)
    return Problem(2, (one,), comm, layout="balanced", qkv_format="thd", areas=rows, **sizes)


@pytest.mark.parametrize("comm", ["p2p", "all_gather"])
@pytest.mark.parametrize(("answers", "answer", "wait"), [(28, 1024, True), (16, 32, False)])
def test_keys_wait_where_the_rest_hides_the_messages(answers: int, answer: int, wait: bool, comm: str) -> None:
    problem = prompt(answers, answer, comm)
    with planned_at(NEVER_WAIT):
        before = planned(problem)
    for one, other in zip(before.forward, planned(problem).forward, strict=True):
        assert (one != other) == wait
        assert (len(one[1].tiles) < len(other[1].tiles)) == wait
