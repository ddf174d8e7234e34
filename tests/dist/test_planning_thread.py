"""Plans that another thread makes, on a group of its own, while this one computes; over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cp_fast
from cp_ref.schedules.words import CPCommType
from tests.dist.workers import Processes

BATCHES = [[16, 8], [40], [8, 8, 24], [48, 16]]
COMMS = ["p2p", "all_gather", "a2a"]


def plan_of(cp: cp_fast.ContextParallel, lengths: list[int]) -> cp_fast.Plan:
    cumulative = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    sizes: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float64, "device": "cpu"}
    return cp_fast.make_plan(cp=cp, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=cumulative, **sizes)


def results(cp: cp_fast.ContextParallel, plan: cp_fast.Plan) -> list[torch.Tensor]:
    """out and all gradients."""
    generator = torch.Generator().manual_seed(cp.rank)
    rows = plan.problem.starts_q[-1] // cp.size
    q, k, v, dout = (
        torch.randn(rows, heads, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (4, 2, 2, 4)
    )
    out = cp_fast.attention(q, k, v, cp=cp, plan=plan)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def train(comm: Any) -> int:
    """Every batch is computed several times while the thread makes the plan of the next one; how often in all."""
    cp = cp_fast.ContextParallel(dist.group.WORLD, comm)
    meanwhile = cp_fast.ContextParallel(dist.new_group(backend="gloo"), comm)
    wanted = [results(cp, plan_of(cp, lengths)) for lengths in BATCHES]
    calls = 0
    with ThreadPoolExecutor(max_workers=1) as planner:
        plan = plan_of(cp, BATCHES[0])
        for number, want in enumerate(wanted):
            coming = [planner.submit(plan_of, meanwhile, BATCHES[number + 1])] if number + 1 < len(BATCHES) else []
            for _ in range(5):  # as often on every rank: attention is collective
                for mine, theirs in zip(results(cp, plan), want, strict=True):
                    assert torch.equal(mine, theirs)
                calls += 1
            plan = coming[0].result() if coming else plan
    return calls


@pytest.mark.parametrize("comm", COMMS)
def test_the_next_plan_is_made_while_this_batch_is_computed(two: Processes, comm: str) -> None:
    """And gives the same bits as one that was made between batches."""
    assert two.run(train, comm) == [5 * len(BATCHES)] * 2
