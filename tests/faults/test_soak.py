"""2,000 calls: memory, open files, threads and handles stay where they were after the first few hundred."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.runtime import handles
from cp_ref import SimGroup

pytestmark = pytest.mark.faults

ROUNDS = 200  # of 10 calls: on each of 2 ranks make_plan, update, and attention with each plan and without one
WARM = 50
SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def held() -> dict[str, int]:
    gc.collect()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "handles": len(handles._handles),  # pyright: ignore[reportPrivateUsage]
    }


def test_nothing_grows() -> None:
    before: dict[str, Any] = {}

    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        lengths = [torch.tensor([0, 4 * n, 16], dtype=torch.int32) for n in range(5)]
        how: dict[str, Any] = {"cp": cp, "qkv_format": "thd"}
        room = cp_fast.make_plan(**how, **SIZES, cu_seqlens_q=lengths[4], max_sequences=2)
        x = torch.randn(8, 2, 8, requires_grad=True)
        for n in range(ROUNDS):
            if n == WARM and cp.rank == 0:
                before.update(held() | {"memory": resident_mb()})
            cu = lengths[n % 5]
            plan = cp_fast.make_plan(**how, **SIZES, cu_seqlens_q=cu)
            room.update(cp=cp, cu_seqlens_q=lengths[4])
            kinds: list[dict[str, Any]] = [{"plan": plan}, {"plan": room}, {"qkv_format": "thd", "cu_seqlens_q": cu}]
            for given in kinds:
                cp_fast.attention(x, x, x, cp=cp, **given).sum().backward()
        if cp.rank == 0:
            after = held()
            assert after["files"] <= before["files"] + 2, (before, after)
            assert after["threads"] <= before["threads"] + 2, (before, after)
            assert after["handles"] <= before["handles"] + 4, (before, after)
            assert resident_mb() < before["memory"] + 64, (before, resident_mb())

    SimGroup(2).run(one)
    assert before
