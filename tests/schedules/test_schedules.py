"""Schedules that no planner has, by `make_plan(..., schedule=...)` of both packages, against the oracle in float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
import cp_ref
from conformance.case import Case
from conformance.checks.values import check_logic
from conformance.tensors import plan_arguments
from cp_fast.compile.chosen_head_chunks import choose_head_chunks
from cp_ref import ContextParallel, SimGroup, make_plan, supports
from cp_ref.problems.read_problem import check_one_document
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence, Workload
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.proof import InvalidSchedule
from cp_ref.schedules.words import SOFTMAX_TYPES
from tests.cp_fast.compile.planned_at import ALWAYS_CHUNKS, planned_at
from tests.marks import examples
from tests.spec.random_schedules import backward_ring, ring_of_rings, scheduled_problems
from tests.spec.test_planners import chunked_problems

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
    "scores of places": replace(PACKED, cp_size=4, score_mod="by_document", dropout_p=0.3),
}
RINGS: dict[str, Callable[[Workload], Schedule]] = {
    "the ring run backwards": backward_ring,
    "a ring of rings": lambda work: ring_of_rings(work, 2 if work.cp_size % 2 == 0 else 1),
}


PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}


def check(package: str, problem: Problem, schedule: Schedule, tail: int = 0) -> None:
    """The schedule, as its text reads back, gives every result of the oracle, forward and backward, to 1e-10. With a
    score_mod the problem has ALiBi too.
    """
    played, read = PACKAGES[package], Schedule.parse(str(schedule))

    def plan_with_it(**arguments: Any) -> Any:
        plan = played.make_plan(**arguments, schedule=read)
        assert plan.schedule is read
        return plan

    names = ("ContextParallel", "Unsupported", "attention", "shard", "supports")
    implementation = SimpleNamespace(**{name: getattr(played, name) for name in names}, make_plan=plan_with_it)
    alibi = "head" if problem.score_mod else ""
    wishes: dict[str, Any] = {"use_plan": True, "return_lse": True, "return_max_logit": True, "alibi": alibi}
    case = Case(problem, tail, tail, **wishes, loss="out+lse")
    assert check_logic(implementation, case) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.one_in(3)
def test_rings_that_no_planner_has(name: str, ring: str, package: str) -> None:
    check(package, PROBLEMS[name], RINGS[ring](PROBLEMS[name].workload))


@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(int(os.environ.get("CP_SCHEDULES", "120")), fast=9))
@given(
    drawn=scheduled_problems(),
    softmax_type=st.sampled_from(SOFTMAX_TYPES),
    softcap=st.sampled_from([0.0, 2.0]),
    tail=st.integers(0, 1),
    scored=st.booleans(),
)
def test_random_schedules(
    package: str, drawn: tuple[Problem, Schedule], softmax_type: str, softcap: float, tail: int, scored: bool
) -> None:
    problem = replace(drawn[0], softmax_type=softmax_type, softcap=softcap, d_qk=3, d_v=2, dtype="float64")
    problem = of_places(problem) if scored else problem
    check(package, problem, drawn[1], tail * problem.cp_size if problem.qkv_format == "thd" else 0)


def of_places(problem: Problem) -> Problem:
    """The problem with scores of places, unless areas connect its documents."""
    try:
        check_one_document(problem, "score_mod")
    except ValueError:
        return problem
    return replace(problem, score_mod="by_document", dropout_p=0.5)


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


DRAWN = given(chunked_problems(), st.sampled_from(SOFTMAX_TYPES), st.booleans())


def small(problem: Problem, softmax_type: str, tail: bool) -> tuple[Problem, int]:
    """The problem in float64, and the rows of its tail."""
    problem = replace(problem, softmax_type=softmax_type, d_qk=3, d_v=2, dtype="float64")
    return problem, problem.cp_size if tail and problem.qkv_format == "thd" else 0


@settings(max_examples=examples(60))
@DRAWN
def test_the_reference_plays_any_head_chunks(
    drawn: tuple[Problem, tuple[int, ...]], softmax_type: str, tail: bool
) -> None:
    problem, tail_rows = small(drawn[0], softmax_type, tail)
    check("cp_ref", problem, make_schedule(problem, head_chunks=drawn[1]), tail_rows)


@pytest.mark.parametrize("use_plan", [False, True])
@settings(max_examples=examples(30))
@DRAWN
def test_chosen_head_chunks(
    use_plan: bool, drawn: tuple[Problem, tuple[int, ...]], softmax_type: str, tail: bool
) -> None:
    problem, tail_rows = small(drawn[0], softmax_type, tail)
    asked: dict[str, Any] = {"use_plan": use_plan, "return_lse": True, "return_max_logit": True, "loss": "out+lse"}
    with planned_at(ALWAYS_CHUNKS):
        assert check_logic(cp_fast, Case(problem, tail_rows, tail_rows, **asked)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("comm", ["a2a", "a2a+p2p"])
def test_an_updated_plan_keeps_its_head_chunks(comm: str) -> None:
    """Later batches have too little work for head chunks of their own, but the messages stay as they are."""
    most, ranks, width = 48, 4, 4
    sizes: dict[str, Any] = {"heads_q": 16, "heads_kv": 8, "d_qk": width, "d_v": width, "dtype": torch.float64}
    room: dict[str, Any] = {"device": "cpu", "max_sequences": 6, "max_tokens_q": most}

    def one_rank(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)  # type: ignore[arg-type]
        made = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=torch.tensor([0, most]), **sizes, **room)
        chunks, steps = made.head_chunks, len(made.batch.steps[0])
        assert len(chunks) == 2
        assert f"steps forward, in head chunks of {chunks[0]}, {chunks[1]} kv heads; " in str(made)
        for lengths in ([8, 8, 8], [8], [0, 8, 0, 8]):
            cu = torch.tensor([0, *accumulate(lengths)])
            generator = torch.Generator().manual_seed(len(lengths))
            rows = sum(lengths)
            q, k, v = (torch.randn(rows, h, width, generator=generator).double() for h in (16, 8, 8))
            made.update(cp=cp, cu_seqlens_q=cu)
            assert choose_head_chunks(made.problem) == ()
            assert made.head_chunks == chunks
            assert {len(rank_schedule) for rank_schedule in made.schedule.forward} == {steps}
            padded = [torch.cat([x, x.new_zeros(most - rows, *x.shape[1:])]) for x in (q, k, v)]
            out = cp_fast.attention(*(cp_fast.shard(x, cp=cp, plan=made) for x in padded), cp=cp, plan=made)
            want = cp_ref.dense_attention(q, k, v, qkv_format="thd", cu_seqlens_q=cu)[0]
            torch.testing.assert_close(cp_fast.unshard(out, cp=cp, plan=made)[:rows], want, atol=1e-10, rtol=1e-10)

    with planned_at(replace(ALWAYS_CHUNKS, flops_per_us=1.0, exchange_us=0.0, host_us=13_000.0)):
        SimGroup(ranks).run(one_rank)
