"""Sparse layers in both packages: the same bits for any number of ranks; and calls with compressed keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_fast
from cp_ref import SimGroup
from cp_ref.reference.simulator import SimMember
from tests.layers.layer_table import CU, PACKAGES, ROWS, made

WINDOWS = {4: [(0, 0), (2, 0), (2, 1)], 7: [(0, 0), (2, 0)], 8: [(2, 0)]}  # of documents of 7, 0 and 9 tokens
each_package = pytest.mark.parametrize("package", PACKAGES)


@each_package
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("rate", "overlap"), [(3, True), (4, False)])
@pytest.mark.one_in(7)
def test_the_same_entries_and_choices_for_every_group_and_layout(
    rate: int, overlap: bool, dtype: torch.dtype, package: str
) -> None:
    """Bit for bit, also where scores of tokens are equal."""
    draw = torch.Generator().manual_seed(2)
    given = {n: torch.randn(ROWS, *size, generator=draw).to(dtype) for n, size in _SIZES.items()}
    given["q_index"][::3], given["k_index"][::2] = given["q_index"][:1].round(), given["k_index"][:1].round()
    found: list[tuple[torch.Tensor, ...]] = []
    for size in (1, 2, 3, 4, 8):
        for layout in ("dual_chunk", "contiguous", "balanced"):

            def one(member: SimMember, layout: str = layout) -> tuple[torch.Tensor, ...]:
                module, cp, plan = made(package, member, "all_gather", layout, dtype=dtype)
                mine = {name: module.shard(x, cp=cp, plan=plan) for name, x in given.items()}
                how: dict[str, Any] = {"cp": cp, "plan": plan, "rate": rate}
                entries = module.compress_keys(mine["values"], mine["gates"], **how, overlap=overlap)
                keys = entries if overlap else entries[:, :5].contiguous()
                chosen = module.select_keys(mine["q_index"], keys, mine["weights"], **how, top_k=2)
                tokens = module.select_keys(
                    mine["q_index"], mine["k_index"], mine["weights"], cp=cp, plan=plan, top_k=6
                )
                of = plan.entries(rate)
                whole = (module.unshard(x, cp=cp, plan=plan) for x in (chosen, tokens))
                return entries, of.documents * ROWS + of.numbers, *whole

            entries, order, chosen, tokens = zip(*SimGroup(size).run(one), strict=True)
            found.append((torch.cat(entries)[torch.cat(order).argsort()], chosen[0], tokens[0]))
    assert all(torch.equal(x, y) for each in found for x, y in zip(each, found[0], strict=True))


_SIZES = {"values": (10,), "gates": (10,), "q_index": (3, 5), "k_index": (5,), "weights": (3,)}


@each_package
@pytest.mark.parametrize("rate", WINDOWS)
def test_the_entries_of_a_plan(rate: int, package: str) -> None:
    """Each has one owner: the rank of its last token."""

    def one(member: SimMember) -> list[tuple[int, int]]:
        module, cp, plan = made(package, member)
        position, document = torch.full((ROWS,), -1), torch.full((ROWS,), -1)
        for n, (start, length) in enumerate(zip((0, 8, 10), CU.diff().tolist(), strict=True)):
            position[start : start + length], document[start : start + length] = torch.arange(length), n
        here = {
            *zip(*(module.shard(x, cp=cp, plan=plan).tolist() for x in (document, position)), strict=True),
        }
        entries = plan.entries(rate)
        assert entries.first.tolist() == [rate * n for n in entries.numbers.tolist()]
        assert all(pair in here for pair in zip(entries.documents.tolist(), entries.last.tolist(), strict=True))
        return [*zip(entries.documents.tolist(), entries.numbers.tolist(), strict=True)]

    for size in (1, 3):
        assert sorted(pair for pairs in SimGroup(size).run(one) for pair in pairs) == WINDOWS[rate]


@each_package
def test_all_that_the_mask_shows_needs_no_indices(package: str) -> None:
    """`sparse_attention` without indices is `attention`, on any head dim."""

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member, window_size=(4, 0), dtype=torch.float64)
        draw = torch.Generator().manual_seed(member.rank)
        rows = len(plan.position_ids)
        q, k, v = (torch.randn(rows, *s, generator=draw, dtype=torch.float64) for s in ((8, 6), (2, 6), (2, 4)))
        wanted = module.attention(q, k, v, cp=cp, plan=plan, return_lse=True)
        found = module.sparse_attention(q, k, v, None, cp=cp, plan=plan, return_lse=True)
        torch.testing.assert_close(found, wanted)

    SimGroup(3).run(one)


def test_keys_that_are_values_travel_once() -> None:
    """Their gradient is one tensor; a rank without entries agrees with the others."""

    def one(member: SimMember) -> list[torch.Tensor]:
        cp = cp_fast.ContextParallel(member, "all_gather", layout="contiguous")
        sizes: dict[str, Any] = {"heads_q": 2, "heads_kv": 1, "d_qk": 4, "d_v": 4, "device": "cpu"}
        batch: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 12])}
        plan = cp_fast.make_plan(cp=cp, **batch, **sizes, dtype=torch.float64)
        draw = torch.Generator().manual_seed(1)
        whole = [torch.randn(12, *s, generator=draw, dtype=torch.float64) for s in ((2, 4), (1, 4), (4,), (4,))]
        q, kv, values, gates = (cp_fast.shard(x, cp=cp, plan=plan).requires_grad_() for x in whole)
        entries = cp_fast.compress_keys(values, gates, cp=cp, plan=plan, rate=7)[:, None]
        keys = (kv, kv, entries, entries) if member.size > 1 else (kv, kv.clone(), entries, entries.clone())
        out = cp_fast.compressed_attention(q, *keys, cp=cp, plan=plan, rate=7)
        grads = torch.autograd.grad(out.square().sum(), (q, kv, values, gates))
        return [cp_fast.unshard(x, cp=cp, plan=plan) for x in grads]

    for found, wanted in zip(SimGroup(3).run(one)[0], SimGroup(1).run(one)[0], strict=True):
        torch.testing.assert_close(found, wanted)


def test_inside_torch_compile() -> None:
    """Results and gradients are those of a call; attention is part of one graph."""

    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member, "all_gather")
        sizes: dict[str, Any] = {"heads_q": 2, "heads_kv": 1, "d_qk": 8, "d_v": 8, "device": "cpu"}
        batch: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 13, 24]), "window_size": (3, 0)}
        plan = cp_fast.make_plan(cp=cp, **batch, **sizes, dtype=torch.float32)
        draw, how = torch.Generator().manual_seed(1), {"cp": cp, "plan": plan, "rate": 3}
        shapes = (2, 8), (1, 8), (16,), (16,)
        leaves = [torch.randn(24, *s, generator=draw, requires_grad=True) for s in shapes]
        q_index, weights = torch.randn(24, 2, 8, generator=draw), torch.randn(24, 2, generator=draw)

        def attended(q: torch.Tensor, kv: torch.Tensor, e: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return cp_fast.compressed_attention(q, kv, kv, e, e, i, **how)

        def layer(q: torch.Tensor, kv: torch.Tensor, x: torch.Tensor, z: torch.Tensor, attend: Any) -> torch.Tensor:
            e = torch.nn.functional.normalize(cp_fast.compress_keys(x, z, **how, overlap=True), dim=-1)
            return attend(q, kv, e[:, None], cp_fast.select_keys(q_index, e.detach(), weights, **how, top_k=2))

        found = list[Any]()
        of_graph: Any = torch.compile(attended, backend="aot_eager", fullgraph=True)
        whole: Any = torch.compile(layer, backend="aot_eager")
        ways: list[tuple[Any, Any]] = [(layer, attended), (layer, of_graph), (whole, attended)]
        for run, attend in ways:
            out = run(*leaves, attend)
            found.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0])

    SimGroup(1).run(one)
