"""Head chunks by both packages, with and without a plan, in place and not, against the oracle in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
import cp_ref
from conformance.case import Case
from conformance.checks.values import check_logic
from cp_fast.compile.chosen_schedule import choose_head_chunks
from cp_ref import SimGroup
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.words import SOFTMAX_TYPES
from cp_ref.simulator import SimMember
from tests.cp_fast.compile.passes.planned_at import ALWAYS_CHUNKS, planned_at
from tests.marks import examples
from tests.schedules.test_schedules import check
from tests.spec.planners.chunked_problems import chunked_problems

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
        chunks, steps = made.head_chunks, len(made.steps[0])
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
