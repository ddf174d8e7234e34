"""What `cp_comm_type="auto"` chooses, on integers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from cp_ref.schedules.planners.choose_schedule import PRICES, choose_schedule, estimates, why_chosen
from cp_ref.schedules.problem import Problem, Sequence, workload_of
from cp_ref.schedules.words import AUTO
from tests.marks import examples
from tests.spec.problems import problems

SIZES: dict[str, Any] = {"heads_q": 32, "heads_kv": 8, "d_qk": 128, "d_v": 128, "dtype": "bfloat16"}


def one_sequence(tokens: int, ranks: int, **fields: Any) -> Problem:
    return Problem(ranks, (Sequence(tokens, tokens, tokens, tokens),), "all_gather", **SIZES | fields)


@given(problems(comms=("p2p", "all_gather")))
@settings(max_examples=examples(300), deadline=None)
def test_a_choice_is_the_problem_by_a_schedule_that_takes_it(problem: Problem) -> None:
    """The tables that it keeps are those of a problem made by that name, and the schedule before does not matter."""
    chosen = choose_schedule(problem, AUTO)
    name, size = chosen.cp_comm_type, problem.cp_size
    heads = problem.heads_q % size == 0 and (problem.heads_kv % size == 0 or size % problem.heads_kv == 0)
    assert name in AUTO
    assert heads or name != "a2a"
    made = replace(problem, cp_comm_type=name, a2a_size=size if name == "a2a" else 1)
    assert (chosen, chosen.fingerprint) == (made, made.fingerprint)
    tables = workload_of(made)
    assert (str(chosen.workload.areas), chosen.workload.ownership) == (str(tables.areas), tables.ownership)
    assert chosen.workload.a2a_size == tables.a2a_size
    assert chosen.slots == made.slots
    other = replace(problem, cp_comm_type="p2p" if problem.cp_comm_type == "all_gather" else "all_gather")
    assert choose_schedule(other, AUTO).cp_comm_type == name
    assert why_chosen(chosen, AUTO).startswith(f"'auto' took {name} by ")


@given(problems(comms=("all_gather",)))
@settings(max_examples=examples(100), deadline=None)
def test_only_schedules_that_are_named_are_taken(problem: Problem) -> None:
    for names in (("all_gather", "a2a"), ("p2p",), ("all_gather",)):
        assert choose_schedule(problem, names).cp_comm_type in names


@pytest.mark.parametrize(
    ("name", "problem"),
    {
        "all_gather": one_sequence(1 << 15, 2),
        "all_gather with a window": one_sequence(1 << 16, 4, window_size=(4096, 0)),
        "all_gather where nothing travels": one_sequence(1 << 15, 1),
        "all_gather where a2a refuses the heads": one_sequence(1 << 16, 4, heads_q=6, heads_kv=3),
        "all_gather of few tokens": one_sequence(64, 4),
        "a2a": one_sequence(1 << 16, 4),
        "p2p for its memory": one_sequence(1 << 20, 64, heads_q=30, heads_kv=6),
    }.items(),
)
def test_what_is_chosen(name: str, problem: Problem) -> None:
    assert choose_schedule(problem, AUTO).cp_comm_type == name.split()[0]


def test_a_gib_is_worth_a_share_of_the_time() -> None:
    problem = one_sequence(1 << 20, 8, heads_q=30, heads_kv=6)
    gathered, ring = estimates(problem, ("all_gather", "p2p"))
    assert gathered.us < ring.us
    assert gathered.size > ring.size
    saved = (ring.us / gathered.us - 1) / ((gathered.size - ring.size) / 2**30)
    for worth, name in ((0.99 * saved, "all_gather"), (1.01 * saved, "p2p")):
        at = PRICES._replace(of_a_gib=worth)
        assert choose_schedule(problem, ("all_gather", "p2p"), at).cp_comm_type == name


def test_documents_on_one_rank_cost_no_messages() -> None:
    """All three then do the same, and the first one is taken."""
    length = Sequence(4096, 4096, 4096, 4096)
    problem = Problem(2, (length,) * 8, "all_gather", layout="balanced", qkv_format="thd", **SIZES)
    found = estimates(problem, AUTO)
    assert [one.size for one in found] == [0.0, 0.0, 0.0]
    assert len({one.us for one in found}) == 1
    assert choose_schedule(problem, AUTO).cp_comm_type == "all_gather"
