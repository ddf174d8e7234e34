"""Schedules that no planner has, by `make_plan(..., schedule=...)` of both packages, against the oracle in float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
import cp_ref
from conformance.case import Case
from conformance.checks.values import check_logic
from conformance.tensors import plan_arguments
from cp_ref import ContextParallel, SimGroup, make_plan, supports
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence, Workload
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.proof import InvalidSchedule
from cp_ref.schedules.words import SOFTMAX_TYPES
from cp_ref.simulator import SimMember
from tests.marks import examples
from tests.spec.other_schedules.other_rings import backward_ring, ring_of_rings
from tests.spec.other_schedules.random_schedules import scheduled_problems

THREE = (Sequence(11, 7, 12, 12), Sequence(0, 0, 0, 0), Sequence(6, 6, 6, 6))
PACKED = Problem(3, THREE, qkv_format="thd", heads_q=6, heads_kv=2, dtype="float64")
PROBLEMS = {
    "padded, empty and full sequences": PACKED,
    "window, contiguous": replace(
        PACKED, cp_size=2, sequences=THREE, layout="contiguous", window_size=(4, 0), softmax_type="off-by-one"
    ),
    "cross attention, sink and softcap": Problem(
        4,
        (Sequence(16, 24, 16, 24),) * 2,
        attn_mask_type="causal_bottom_right",
        heads_q=4,
        heads_kv=4,
        softmax_type="learnable",
        softcap=2.0,
        dtype="float64",
    ),
}
RINGS: dict[str, Callable[[Workload], Schedule]] = {
    "the ring run backwards": backward_ring,
    "a ring of rings": lambda work: ring_of_rings(work, 2 if work.cp_size % 2 == 0 else 1),
}


PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}


def check(package: str, problem: Problem, schedule: Schedule, tail: int = 0) -> None:
    """The schedule, as its text reads back, gives every result of the oracle, forward and backward, to 1e-10."""
    played, read = PACKAGES[package], Schedule.parse(str(schedule))

    def plan_with_it(**arguments: Any) -> Any:
        plan = played.make_plan(**arguments, schedule=read)
        assert plan.schedule is read
        return plan

    names = ("ContextParallel", "Unsupported", "attention", "shard", "supports")
    implementation = SimpleNamespace(**{name: getattr(played, name) for name in names}, make_plan=plan_with_it)
    case = Case(problem, tail, tail, use_plan=True, return_lse=True, return_max_logit=True, loss="out+lse")
    assert check_logic(implementation, case) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_rings_that_no_planner_has(name: str, ring: str, package: str) -> None:
    check(package, PROBLEMS[name], RINGS[ring](PROBLEMS[name].workload))


@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(int(os.environ.get("CP_SCHEDULES", "250")), fast=9))
@given(
    drawn=scheduled_problems(),
    softmax_type=st.sampled_from(SOFTMAX_TYPES),
    softcap=st.sampled_from([0.0, 2.0]),
    tail=st.integers(0, 1),
)
def test_random_schedules(
    package: str, drawn: tuple[Problem, Schedule], softmax_type: str, softcap: float, tail: int
) -> None:
    problem = replace(drawn[0], softmax_type=softmax_type, softcap=softcap, d_qk=3, d_v=2, dtype="float64")
    check(package, problem, drawn[1], tail * problem.cp_size if problem.qkv_format == "thd" else 0)


def errors(problem: Problem, of_rank: Callable[[SimMember], Any], comm: Any = "p2p", **more: Any) -> list[Exception]:
    """What make_plan raises on every rank when it is given a schedule."""

    def one_rank(member: SimMember) -> Exception:
        name: Any = problem.layout_name
        cp = ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm, layout=name)
        with pytest.raises((ValueError, TypeError)) as caught:
            make_plan(cp=cp, **plan_arguments(problem), schedule=of_rank(member), **more)
        return caught.value

    return SimGroup(problem.cp_size).run(one_rank)


def test_an_invalid_schedule_raises_on_every_rank() -> None:
    schedule = backward_ring(PACKED.workload)
    first, *others = schedule.forward[1]
    rank_schedule = (first._replace(tiles=first.tiles.take(slice(1, None))), *others)
    wrong = replace(schedule, forward=(schedule.forward[0], rank_schedule, schedule.forward[2]))
    found = errors(PACKED, lambda member: wrong)
    assert {type(error) for error in found} == {InvalidSchedule}
    assert "computed never" in str(found[0])
    by_one = errors(PACKED, lambda member: wrong if member.rank == 2 else schedule)
    assert [type(error) for error in by_one] == [ValueError, ValueError, InvalidSchedule]
    assert "rank 2 refused its arguments" in str(by_one[0])
    assert "InvalidSchedule" in str(by_one[0])


def test_the_ranks_agree_on_the_schedule() -> None:
    one, other = backward_ring(PACKED.workload), make_schedule(PACKED)
    found = errors(PACKED, lambda member: one if member.rank else other)
    assert all("the ranks have different problems: " in str(error) and "schedule=" in str(error) for error in found)
    found = errors(PACKED, lambda member: one if member.rank else None)
    assert str(found[0]).startswith("the ranks have different problems: rank 0 has nothing where rank 1 has schedule=")


def test_refusals() -> None:
    schedule = backward_ring(PACKED.workload)
    (error, *_) = errors(PACKED, lambda member: str(schedule))
    assert str(error).startswith("schedule is a str; it must be a cp_ref.schedules.schedule.Schedule")
    (error, *_) = errors(PACKED, lambda member: schedule, max_sequences=3)
    assert str(error).startswith("schedule is given, but max_sequences is 3")
    (error, *_) = errors(PROBLEMS["cross attention, sink and softcap"], lambda member: schedule)
    assert "rank schedules for 3 forward and 3 backward ranks, but cp_size is 4" in str(error)


def test_messages_stay_inside_the_two_groups() -> None:
    """Neighbours in the ring of 4 are rank 1 and rank 2, too, which share no group of 2 x 2."""
    problem = PROBLEMS["cross attention, sink and softcap"]
    (error, *_) = errors(problem, lambda member: backward_ring(problem.workload), "a2a+p2p")
    assert "have neither their a2a group nor their p2p group in common" in str(error)


def test_supports_takes_a_schedule() -> None:
    def one_rank(member: SimMember) -> tuple[bool, str]:
        return supports(cp=ContextParallel(member), **plan_arguments(PACKED), schedule=backward_ring(PACKED.workload))

    assert SimGroup(3).run(one_rank) == [(True, "")] * 3
