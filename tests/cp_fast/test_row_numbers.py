"""Row numbers are int32: what would need more is refused by name, with a plan, without one, and as room."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_fast
from cp_ref import SimGroup

FAR = torch.tensor([0, 2**32])
PROBLEM: dict[str, Any] = {
    "qkv_format": "thd",
    "attn_mask_type": "padding_causal",
    "heads_q": 8,
    "heads_kv": 8,
    "d_qk": 8,
    "d_v": 8,
    "dtype": torch.float32,
    "device": "cpu",
}


def planned(cp_size: int, cp_comm_type: Any, **arguments: Any) -> object:
    def make(member: Any) -> object:
        return cp_fast.supports(cp=cp_fast.ContextParallel(member, cp_comm_type), **(PROBLEM | arguments))

    return SimGroup(cp_size).run(make)[0]


@pytest.mark.parametrize(
    ("cp_size", "cp_comm_type", "rows"),
    [(1, "p2p", 2**32), (2, "p2p", 2**31), (4, "all_gather", 2**32), (4, "a2a", 2**32)],
)
def test_more_rows_than_int32_counts(cp_size: int, cp_comm_type: str, rows: int) -> None:
    side = "kv" if cp_comm_type == "all_gather" else "q"
    words = rf"cu_seqlens_{side}, padding included, ends at 4294967296: .* would hold {rows} rows of {side}"
    with pytest.raises(ValueError, match=words):
        planned(cp_size, cp_comm_type, cu_seqlens_q=FAR)


def test_a_rank_holds_its_share_alone() -> None:
    assert planned(4, "p2p", cu_seqlens_q=FAR) == (True, "")


def test_without_a_plan() -> None:
    def call(member: Any) -> None:
        x = torch.zeros(4, 1, 8)
        cp_fast.attention(
            x,
            x,
            x,
            cp=cp_fast.ContextParallel(member),
            qkv_format="thd",
            attn_mask_type="padding",
            cu_seqlens_q=torch.tensor([0, 4]),
            cu_seqlens_kv=FAR,
        )

    with pytest.raises(ValueError, match=r"cu_seqlens_kv"):
        SimGroup(1).run(call)


def test_room() -> None:
    few = torch.tensor([0, 8])
    with pytest.raises(ValueError, match=r"max_tokens_q is 4294967296: .* would hold 2147483648 rows of q"):
        planned(2, "p2p", cu_seqlens_q=few, max_sequences=2, max_tokens_q=2**32)
    with pytest.raises(ValueError, match=r"max_sequences is 1048577; it must be at most 1048576"):
        planned(2, "p2p", cu_seqlens_q=few, max_sequences=2**20 + 1, max_tokens_q=64)
    assert planned(2, "p2p", cu_seqlens_q=few, max_sequences=2**20, max_tokens_q=64) == (True, "")
