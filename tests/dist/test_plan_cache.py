"""Calls without a plan over gloo: what one rank finds and another does not is no message, and groups are let go."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cp_fast
from cp_fast.api import plan_cache
from tests.dist.workers import Processes


def layers() -> tuple[list[int], list[bool], int]:
    """Agreements after each layer of two batches in a group of their own; whether results are those with a plan; and
    groups with plans after it is gone. Rank 1 writes its calls otherwise, with a new context each.
    """
    group: Any = dist.new_group([0, 1])
    cp = cp_fast.ContextParallel(group)
    gathered = [0]
    member: Any = type(cp.comm)
    gather = member.all_gather_object

    def count(self: Any, value: Any) -> Any:
        gathered[0] += 1
        return gather(self, value)

    member.all_gather_object = count
    other = dist.get_rank() == 1
    cu, x = torch.tensor([0, 8, 24, 48], dtype=torch.int64 if other else torch.int32), torch.randn(24, 2, 8)
    found: list[int] = []
    same: list[bool] = []
    plan = None
    try:
        for batch in range(2):
            cu[1] = 8 + 8 * batch
            sizes: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": x.dtype, "device": "cpu"}
            plan = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, **sizes)
            for _ in range(3):
                cp = cp_fast.ContextParallel(group) if other else cp
                more: dict[str, Any] = {"cu_seqlens_kv": cu.clone(), "deterministic": True} if other else {}
                out = cp_fast.attention(x, x, x, cp=cp, qkv_format="thd", cu_seqlens_q=cu, **more)
                found.append(gathered[0])
                same.append(torch.equal(out, cp_fast.attention(x, x, x, cp=cp, plan=plan)))
    finally:
        member.all_gather_object = gather
    kept = len(plan_cache._caches)
    dist.destroy_process_group(group)
    del cp, group, plan
    gc.collect()
    return found, same, kept - len(plan_cache._caches)


def test_layers_of_a_batch_agree_once(two: Processes) -> None:
    for result in two.run(layers):
        assert result == ([2, 2, 2, 4, 4, 4], [True] * 6, 1), result
