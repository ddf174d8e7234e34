"""Heads in stages by both packages, with and without a plan, in place and not, against the oracle in float64."""

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
from conformance.implementation import Implementation
from conformance.tiers import logic
from cp_ref import SimGroup
from cp_ref.simulator.sim_group import SimMember
from cp_ref.spec import SOFTMAX_TYPES, Problem
from tests.marks import examples
from tests.spec.staged import ALWAYS, costs, staged

PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}


@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(60))
@given(staged(), st.sampled_from(SOFTMAX_TYPES), st.booleans(), st.booleans())
def test_any_problem(
    package: str, drawn: tuple[Problem, tuple[int, ...]], softmax_type: str, tail: bool, use_plan: bool
) -> None:
    problem = replace(drawn[0], softmax_type=softmax_type, d_qk=3, d_v=2, dtype="float64")
    tail_rows = problem.cp_size if tail and problem.qkv_format == "thd" else 0
    asked: dict[str, Any] = {"use_plan": use_plan, "return_lse": True, "return_max_logit": True, "loss": "out+lse"}
    with costs(ALWAYS):
        assert (
            logic.check(Implementation(PACKAGES[package], package), Case(problem, tail_rows, tail_rows, **asked)) == []
        )


@pytest.mark.parametrize("comm", ["a2a", "a2a+p2p"])
def test_a_plan_that_is_updated_keeps_its_stages(comm: str) -> None:
    """Later batches have too little work for stages of their own; but which messages there are stays as it is."""
    most, ranks, width = 48, 4, 4
    sizes: dict[str, Any] = {"heads_q": 16, "heads_kv": 8, "d_qk": width, "d_v": width, "dtype": torch.float64}
    room: dict[str, Any] = {"device": "cpu", "max_sequences": 6, "max_tokens_q": most}

    def one_rank(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)  # type: ignore[arg-type]
        made = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=torch.tensor([0, most]), **sizes, **room)
        stages, steps = made.problem.workload.stages, len(made.steps[0])
        assert len(stages) == 2
        for lengths in ([8, 8, 8], [8], [0, 8, 0, 8]):
            cu = torch.tensor([0, *accumulate(lengths)])
            generator = torch.Generator().manual_seed(len(lengths))
            rows = sum(lengths)
            q, k, v = (torch.randn(rows, h, width, generator=generator).double() for h in (16, 8, 8))
            made.update(cp=cp, cu_seqlens_q=cu)
            assert made.problem.workload.stages == (sum(stages),)
            assert {len(program) for program in made.schedule.forward} == {steps}
            padded = [torch.cat([x, x.new_zeros(most - rows, *x.shape[1:])]) for x in (q, k, v)]
            out = cp_fast.attention(*(cp_fast.shard(x, cp=cp, plan=made) for x in padded), cp=cp, plan=made)
            want = cp_ref.dense_attention(q, k, v, qkv_format="thd", cu_seqlens_q=cu)[0]
            torch.testing.assert_close(cp_fast.unshard(out, cp=cp, plan=made)[:rows], want, atol=1e-10, rtol=1e-10)

    with costs(replace(ALWAYS, flops_per_us=1.0, exchange_us=0.0, host_us=13_000.0)):
        SimGroup(ranks).run(one_rank)
