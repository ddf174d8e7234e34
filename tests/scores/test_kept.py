"""The pairs that dropout keeps are the same, bit for bit, for every number of ranks, schedule, layout and format.

The probe: with q = 0 and v the unit vectors, out is positive at the keys that were kept. With dout the unit vectors, dv
is positive at the queries that kept the key in the backward pass.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_ref import SimGroup
from cp_ref.contract.scores import kept

LENGTHS = (19, 0, 8, 13)  # of documents; the batched formats have two of the first length
HEADS = 24  # one number for all group sizes of an a2a
DROPOUT, SEED = 0.4, -(2**50) - 3
PACKAGES: dict[str, Any] = {"cp_ref": cp_ref, "cp_fast": cp_fast}
SCHEDULES = [
    (comm, size, inner)
    for comm in ("p2p", "all_gather", "a2a", "a2a+p2p")
    for size in (1, 2, 3, 4, 8)
    for inner in ((2, 4) if comm == "a2a+p2p" else (1,))
    if size % inner == 0 and (inner == 1 or size > inner)
]


@cache
def expected(lengths: tuple[int, ...]) -> torch.Tensor:
    """bool [rows, h, rows]: which visible pairs are kept, by the definition, document by document."""
    rows = sum(lengths)
    found = torch.zeros(rows, HEADS, rows, dtype=torch.bool)
    head = torch.arange(HEADS, dtype=torch.int32)[None, :, None]
    for number, (start, length) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
        i = torch.arange(length, dtype=torch.int32)
        document = torch.full((1, 1, 1), number, dtype=torch.int32)
        drawn = kept(document, head, i[:, None, None], i[None, None, :], torch.tensor(SEED), DROPOUT)
        found[start : start + length, :, start : start + length] = drawn & (i[:, None, None] >= i[None, None, :])
    return found


def table(size: int) -> list[tuple[int, int, int, int]]:
    """A layout as a user gives it: three uneven parts of every document, on any ranks, the last part first."""
    rows = [
        ((7 * number + part) % size, number, start, stop)
        for number, length in enumerate(LENGTHS)
        for part, (start, stop) in enumerate([(length // 2, length), (length // 5, length // 2), (0, length // 5)])
        if start < stop
    ]
    return sorted(rows, key=lambda row: row[0])


def masks(package: Any, qkv_format: str, layout: str, comm: str, size: int, inner: int) -> tuple[torch.Tensor, ...]:
    """What the probes of both passes saw: bool [rows of queries, h, rows of keys], over all documents."""
    packed = qkv_format == "thd"
    lengths = LENGTHS if packed else LENGTHS[:1] * 2
    rows = sum(lengths)
    units = torch.eye(rows, dtype=torch.float64)[:, None].expand(-1, HEADS, -1)  # [rows, h, rows]
    nothing = torch.zeros(rows, HEADS, 8, dtype=torch.float64)

    def shaped(x: torch.Tensor) -> torch.Tensor:
        if packed:
            return x
        x = x.unflatten(0, (2, -1))
        return x.transpose(0, 1).contiguous() if qkv_format == "sbhd" else x

    cu = {"cu_seqlens_q": torch.tensor([0, *accumulate(lengths)])} if packed else {}
    more = {} if packed else {"batch_size": 2, "seqlen_q": LENGTHS[0]}
    sizes = {"heads_q": HEADS, "heads_kv": HEADS, "d_qk": 8, "d_v": rows, "dtype": torch.float64, "device": "cpu"}

    def one(member: Any) -> tuple[torch.Tensor, torch.Tensor]:
        group = member.split(inner) if comm == "a2a+p2p" else member
        cp = package.ContextParallel(group, comm, layout="contiguous" if layout == "table" else layout)
        how: dict[str, Any] = {"qkv_format": qkv_format, **cu, "dropout_p": DROPOUT}
        how |= {"layout": table(size)} if layout == "table" else {}
        plan = package.make_plan(cp=cp, **how, **more, **sizes)
        q, v = (package.shard(shaped(x), cp=cp, plan=plan) for x in (nothing, units))
        v = v.clone().requires_grad_()
        out = package.attention(q, q, v, cp=cp, plan=plan, dropout_seed=SEED)
        out.backward(v.detach())
        assert v.grad is not None
        return package.unshard(out.detach(), cp=cp, plan=plan), package.unshard(v.grad, cp=cp, plan=plan)

    found: list[torch.Tensor] = []
    for x in SimGroup(size).run(one)[0]:
        if not packed:
            x = (x.transpose(0, 1) if qkv_format == "sbhd" else x).flatten(0, 1)
        found.append(x > 0)
    return found[0], found[1].permute(2, 1, 0)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("comm", "size", "inner"), SCHEDULES)
def test_packed_documents(comm: str, size: int, inner: int, package: str) -> None:
    for layout in ("dual_chunk", "contiguous", "balanced", "table"):
        for mask in masks(PACKAGES[package], "thd", layout, comm, size, inner):
            assert torch.equal(mask, expected(LENGTHS)), layout


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
@pytest.mark.parametrize(
    ("comm", "size", "inner"),
    [pytest.param(*one, marks=() if one[1] == 4 else pytest.mark.thorough) for one in SCHEDULES],
)
def test_batches(comm: str, size: int, inner: int, qkv_format: str, package: str) -> None:
    for layout in ("dual_chunk", "contiguous"):
        for mask in masks(PACKAGES[package], qkv_format, layout, comm, size, inner):
            assert torch.equal(mask, expected(LENGTHS[:1] * 2)), layout
