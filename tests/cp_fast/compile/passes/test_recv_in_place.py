"""What arrives in a few pieces is received where it is wanted, and own rows are copied meanwhile: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.compile.program import Copy, Programs, Recv
from cp_fast.movers.mover_protocol import Rows
from cp_fast.passes import switched_off
from cp_ref import SimGroup
from cp_ref.simulator import SimMember

COMMS = [("a2a", 2), ("a2a", 4), ("a2a+p2p", 4), ("all_gather", 3), ("p2p", 3)]
DOCUMENTS = {"one": [96], "two": [48, 24], "many": [24, 48, 24, 48, 24, 72]}


def play(member: SimMember, comm: Any, lengths: list[int], layout: Any) -> tuple[list[torch.Tensor], Any]:
    cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm, layout=layout)
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    how: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": cu, "dtype": torch.float64}
    plan = cp_fast.make_plan(cp=cp, device="cpu", heads_q=8, heads_kv=4, d_qk=6, d_v=4, **how)
    draw = torch.Generator().manual_seed(cp.rank)
    rows = sum(lengths) // cp.size
    sizes = ((8, 6), (4, 6), (4, 4), (8, 4))
    q, k, v, dout = (torch.randn(rows, *size, generator=draw, dtype=torch.float64) for size in sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = cp_fast.attention(*leaves, cp=cp, plan=plan, return_lse=True)
    dlse = torch.randn(lse.shape, generator=draw, dtype=torch.float64)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse))], plan.instructions


def in_place(plan: Programs[Rows]) -> int:
    """How many messages are received in rows of a buffer that a launch reads."""
    return sum(one.made_by == "recv_in_place" for its in (plan.forward, plan.backward) for one in its.of(Recv))


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("comm", "size"), COMMS)
def test_the_bits_are_the_same(comm: Any, size: int, documents: str, layout: Any) -> None:
    lengths = DOCUMENTS[documents]
    found = SimGroup(size).run(lambda member: play(member, comm, lengths, layout))
    with switched_off("recv_in_place"):
        expected = SimGroup(size).run(lambda member: play(member, comm, lengths, layout))
    for (mine, plan), (its, plain) in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, its))
        assert not in_place(plain)
        assert in_place(plan) == 0 or "a2a" in comm
        if comm == "a2a" and documents == "one":  # of q and of kv, and of do, from every peer
            assert in_place(plan) == 3 * (size - 1)
            assert len([*plain.forward.of(Copy)]) == len([*plan.forward.of(Copy)]) + 2
        if documents == "many":
            assert in_place(plan) == 0 or layout == "contiguous"
