"""What arrives in a few pieces is received where it is wanted, and own rows are copied meanwhile: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_fast
import cp_fast.plan
from cp_fast.program import LoweredProgram
from cp_fast.rows import Rows
from cp_ref import SimGroup
from cp_ref.sim import SimMember

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
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse))], plan.program


def in_place(program: LoweredProgram[Rows]) -> int:
    """How many messages are received in rows of another buffer."""
    return sum(bool(recv.rows) for step in (*program.forward, *program.backward) for recv in step.recvs)


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("comm", "size"), COMMS)
def test_the_bits_are_the_same(
    comm: str, size: int, documents: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = DOCUMENTS[documents]
    found = SimGroup(size).run(lambda member: play(member, comm, lengths, layout))
    for rewrite in ("landed", "meanwhile"):
        monkeypatch.setattr(cp_fast.plan, rewrite, lambda draft: draft)
    expected = SimGroup(size).run(lambda member: play(member, comm, lengths, layout))
    for (mine, program), (its, plain) in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, its))
        assert not in_place(plain)
        assert in_place(program) == 0 or "a2a" in comm
        if comm == "a2a" and documents == "one":  # of q and of kv, and of do, from every peer
            assert in_place(program) == 3 * (size - 1)
            assert sum(len(step.copies) for step in plain.forward) == sum(len(s.copies) for s in program.forward) + 2
        if comm == "a2a":  # one step exchanges, and the next one computes with what came
            for direction in ("forward", "backward"):
                exchanges, computes = getattr(program, direction)[:2]
                came = {recv.buffer for recv in exchanges.recvs}
                assert all(copy.source.buffer in came for copy in computes.copies)
                assert not any(copy.source.buffer in came for copy in exchanges.copies)
                assert exchanges.copies
                assert not getattr(plain, direction)[0].copies
        if documents == "many":
            assert in_place(program) == 0 or layout == "contiguous"
