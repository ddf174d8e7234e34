"""Sparse attention in both packages: the same keys for any number of ranks, attention to all keys, and rows without
keys.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cp_ref import SimGroup
from cp_ref.reference.simulator import SimMember
from tests.layers.layer_table import LAYERS, PACKAGES, Tensors, made


def inputs(dtype: torch.dtype = torch.float32) -> Tensors:
    """The global tensors of the table's layers."""
    given = LAYERS["sparse_attention"].inputs(dtype) | LAYERS["select_keys"].inputs(dtype)
    return {name: x for name, x in given.items() if name != "indices"}


def chosen(module: Any, mine: Tensors, cp: Any, plan: Any, top_k: int = 3) -> torch.Tensor:
    return module.select_keys(mine["q_index"], mine["k_index"], mine["weights"], cp=cp, plan=plan, top_k=top_k)


def attended(module: Any, mine: Tensors, indices: torch.Tensor, cp: Any, plan: Any, **more: Any) -> Any:
    return module.sparse_attention(mine["q"], mine["k"], mine["v"], indices, cp=cp, plan=plan, **more)


def lost(module: Any, mine: Tensors, lse: torch.Tensor, indices: torch.Tensor, cp: Any, plan: Any) -> torch.Tensor:
    tensors = [mine["q_index"], mine["k_index"], mine["weights"], lse, mine["q"], mine["k"], indices]
    return module.index_loss(*tensors, cp=cp, plan=plan)


def sharded(module: Any, given: Tensors, cp: Any, plan: Any) -> Tensors:
    return {name: module.shard(x, cp=cp, plan=plan).requires_grad_() for name, x in given.items()}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.one_in(3)
def test_the_same_keys_for_every_group_layout_and_schedule(dtype: torch.dtype, package: str) -> None:
    """Bit for bit, with scores that are equal, or differ in the last bits."""
    given, cu = inputs(dtype), torch.tensor([0, 11, 11, 20])
    given["q_index"][::3], given["k_index"][::2] = given["q_index"][:1].round(), given["k_index"][:1].round()
    heads: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_q_padded": None, "heads_q": 24, "dtype": dtype}
    found: list[torch.Tensor] = []
    for size in (1, 3, 4):
        for comm in ("all_gather", "a2a"):
            for layout in ("dual_chunk", "contiguous", "balanced"):

                def one(member: SimMember, comm: str = comm, layout: str = layout) -> torch.Tensor:
                    kv = 24 if comm == "a2a" else 2
                    module, cp, plan = made(package, member, comm, layout, **(heads | {"heads_kv": kv}))
                    mine = {name: module.shard(x, cp=cp, plan=plan) for name, x in given.items()}
                    indices = chosen(module, mine, cp, plan, top_k=6)
                    assert indices.dtype == torch.int32
                    assert not indices.requires_grad
                    return module.unshard(indices, cp=cp, plan=plan)

                found.append(SimGroup(size).run(one)[0])
    assert all(torch.equal(x, found[0]) for x in found)
    assert (found[0][5] >= 0).all()
    assert found[0][0].tolist() == [0, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("comm", ["all_gather", "a2a"])
def test_all_keys_are_attention(comm: str, package: str) -> None:
    """With all positions as indices, in any order and more often than once, results and gradients are attention's."""
    given = inputs(torch.float64)

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member, comm, dtype=torch.float64, window_size=(4, 0))
        results: list[list[torch.Tensor]] = []
        for sparse in (True, False):
            mine = sharded(module, given, cp, plan)
            positions = torch.arange(12, dtype=torch.int32).flip(0).repeat(2).expand(len(mine["q"]), -1)
            q, k, v = (mine[name] for name in ("q", "k", "v"))
            if sparse:
                out, lse = attended(module, mine, positions, cp, plan, return_lse=True)
            else:
                out, lse = module.attention(q, k, v, cp=cp, plan=plan, return_lse=True)
            loss = out.square().sum() + lse[lse.isfinite()].square().sum()
            results.append([out.detach(), lse.detach(), *torch.autograd.grad(loss, [q, k, v])])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("comm", ["all_gather", "a2a"])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_name_nothing_pass_no_gradient_on(sinks: bool, comm: str, package: str) -> None:
    """Whatever comes to them, NaN included: here the second head of row 3, and row 12."""
    indices = torch.arange(3, dtype=torch.int32).repeat(20, 2, 1)
    indices[3, 1], indices[12] = -1, -1

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member, comm, softmax_type="learnable" if sinks else "vanilla")
        found, offset = [], torch.ones(8, requires_grad=True) if sinks else None
        for spoilt in (0.0, torch.nan):
            mine = sharded(module, inputs(), cp, plan)
            named = module.shard(indices, cp=cp, plan=plan)
            out, lse = attended(module, mine, named, cp, plan, return_lse=True, softmax_offset=offset)
            blind = (named < 0).all(-1).repeat_interleave(4, 1)
            _, of_all = attended(module, mine, named[:, 0], cp, plan, return_lse=True, softmax_offset=offset)
            loss = lost(module, mine, of_all.detach(), named[:, 0], cp, plan)
            upstream = [torch.ones_like(out).masked_fill(blind[..., None], spoilt)]
            upstream.append(torch.ones_like(lse).masked_fill(blind.t(), 0.0 if sinks else spoilt))
            upstream.append(torch.ones_like(loss).masked_fill(blind[:, 0], spoilt))
            leaves = [*mine.values(), *([] if offset is None else [offset])]
            found.append(torch.autograd.grad([out, lse, loss], leaves, upstream))
        for clean, got in zip(*found, strict=True):
            torch.testing.assert_close(got, clean)

    SimGroup(2).run(one)
