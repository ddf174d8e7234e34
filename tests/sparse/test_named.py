"""Sparse attention: the same keys for any number of ranks, updates, checkpointing, autocast, what is refused, and
processes.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch.utils.checkpoint import checkpoint

import cp_fast
import cp_ref
from conformance.implementation import Implementation
from conformance.problems.sparse import (
    IndexLoss,
    SelectKeys,
    SparseAttention,
    SparseCase,
    check_sparse_probes,
    index_losses,
    selections,
    sparse_attentions,
)
from cp_ref import SimGroup, Unsupported
from cp_ref.reference.simulator import SimMember
from cp_ref.reference.sparse_oracle import dense_select_keys, dense_sparse_attention
from cp_ref.schedules.problem import Problem, Sequence
from tests.dist.workers import Processes
from tests.marks import examples

PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}
LENGTHS, SLOTS = (7, 0, 9), (8, 2, 10)
CU, PADDED = torch.tensor([0, 7, 7, 16]), torch.tensor([0, 8, 10, 20])
SIZES: dict[str, Any] = {"heads_q": 8, "heads_kv": 2, "d_qk": 6, "d_v": 4, "device": "cpu"}
THD: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": CU, "cu_seqlens_q_padded": PADDED}
Tensors = dict[str, torch.Tensor]


def made(package: str, member: Any, comm: str = "all_gather", layout: str = "dual_chunk", **more: Any) -> Any:
    module = PACKAGES[package]
    cp = module.ContextParallel(member, comm, layout=layout)
    return module, cp, module.make_plan(cp=cp, **(THD | SIZES | {"dtype": torch.float32} | more))


def inputs(dtype: torch.dtype = torch.float32) -> Tensors:
    """Global tensors of 20 rows: h_q 8, h_kv 2, d_qk 6, d_v 4, h_i 3, d_i 5."""
    draw = torch.Generator().manual_seed(1)
    sizes = {"q": (8, 6), "k": (2, 6), "v": (2, 4), "q_index": (3, 5), "k_index": (5,), "weights": (3,)}
    return {name: torch.randn(20, *size, generator=draw).to(dtype) for name, size in sizes.items()}


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
def test_the_same_keys_for_every_group_layout_and_schedule(dtype: torch.dtype, package: str) -> None:
    """Bit for bit, with scores that are equal, or differ in the last bits."""
    given, cu = inputs(dtype), torch.tensor([0, 11, 11, 20])
    given["q_index"][::3], given["k_index"][::2] = given["q_index"][:1].round(), given["k_index"][:1].round()
    heads: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_q_padded": None, "heads_q": 24, "dtype": dtype}
    found: list[torch.Tensor] = []
    for size in (1, 2, 3, 4, 8):
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
def test_documents_do_not_see_each_other(package: str) -> None:
    """NaN in all tokens of one document, and in the gradients of its results, reaches no other document."""

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member)
        for start, stop in ((0, 7), (10, 19)):
            others = torch.ones(20, dtype=torch.bool)
            others[start:stop] = False
            spoiled = {name: x.clone() for name, x in inputs().items()}
            for x in spoiled.values():
                x[start:stop] = torch.nan
            mine = sharded(module, spoiled, cp, plan)
            indices = torch.arange(9, dtype=torch.int32).expand(len(mine["q"]), -1)
            out, lse = attended(module, mine, indices, cp, plan, return_lse=True)
            loss = lost(module, mine, lse.detach(), indices, cp, plan)
            dout = module.shard(torch.ones(20, 8, 4).masked_fill(~others[:, None, None], torch.nan), cp=cp, plan=plan)
            dloss = module.shard(torch.ones(20).masked_fill(~others, torch.nan), cp=cp, plan=plan)
            grads = torch.autograd.grad((out, loss), list(mine.values()), (dout, dloss))
            for result in (out, loss, *grads):
                assert module.unshard(result.detach(), cp=cp, plan=plan)[others].isfinite().all()

    SimGroup(3).run(one)


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


@pytest.mark.parametrize("package", PACKAGES)
def test_a_plan_that_is_updated(package: str) -> None:
    """The same plan serves the next batch; a backward pass of the old batch is refused."""
    cu = torch.tensor([0, 3, 12])
    given = inputs()
    short = {name: torch.cat([x[:12], x.new_zeros(8, *x.shape[1:])]) for name, x in given.items()}

    def one(member: SimMember) -> list[torch.Tensor]:
        module, cp, plan = made(package, member, max_sequences=4, max_tokens_q=20)
        mine = sharded(module, given, cp, plan)
        indices = chosen(module, mine, cp, plan)
        old, lse = attended(module, mine, indices, cp, plan, return_lse=True)
        old_loss = lost(module, mine, lse.detach(), indices, cp, plan)
        plan.update(cp=cp, cu_seqlens_q=cu)
        for result in (old, old_loss):
            with pytest.raises(RuntimeError, match="the plan was updated between the forward and the backward pass"):
                result.sum().backward()
        mine = {name: module.shard(x[:12], cp=cp, plan=plan) for name, x in short.items()}
        mine = {n: torch.cat([x, x.new_zeros(10 - len(x), *x.shape[1:])]) for n, x in mine.items()}
        with pytest.raises(ValueError, match=r"q has 9 tokens, but the plan was made with max_tokens_q = 10"):
            attended(module, {n: x[:9] for n, x in mine.items()}, indices[:9], cp, plan)
        indices = chosen(module, mine, cp, plan)
        out = attended(module, mine, indices, cp, plan)
        return [module.unshard(x[:6], cp=cp, plan=plan) for x in (indices, out)]

    lengths = tuple(Sequence(n, n, n, n) for n in (3, 9))
    problem = Problem(1, lengths, qkv_format="thd", heads_q=8, heads_kv=2, d_qk=6, d_v=4)
    rows = {name: x[:12] for name, x in given.items()}
    wanted = dense_select_keys(problem, rows["q_index"], rows["k_index"], rows["weights"], top_k=3)
    want, _ = dense_sparse_attention(problem, rows["q"], rows["k"], rows["v"], wanted)
    for indices, out in SimGroup(2).run(one):
        assert torch.equal(indices, wanted)
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("package", PACKAGES)
def test_activation_checkpointing(package: str) -> None:
    given = inputs(torch.float64)

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member, dtype=torch.float64)
        found = []
        for recompute in (False, True):
            mine = sharded(module, given, cp, plan)

            def layer(tensors: Tensors) -> torch.Tensor:
                indices = chosen(module, tensors, cp, plan)
                out, lse = attended(module, tensors, indices, cp, plan, return_lse=True)
                loss = lost(module, tensors, lse.detach(), indices, cp, plan)
                return out.square().sum() + loss.sum()

            out = checkpoint(layer, mine, use_reentrant=False) if recompute else layer(mine)
            out.backward()
            found.append([out.detach(), *(x.grad for x in mine.values())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
def test_autocast_casts_what_attention_casts(package: str) -> None:
    """The indexer's tensors stay as they are, so that autocast changes no choice."""
    given = inputs()

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member, dtype=torch.bfloat16)
        mine = {name: module.shard(x, cp=cp, plan=plan) for name, x in given.items()}
        indices = chosen(module, mine, cp, plan)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(chosen(module, mine, cp, plan), indices)
            out, lse = attended(module, mine, indices, cp, plan, return_lse=True)
            assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
            assert lost(module, mine, lse, indices, cp, plan).dtype == torch.float32

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_ranks_agree_once_about_a_kind_of_call(package: str) -> None:
    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member)
        mine = {name: module.shard(x, cp=cp, plan=plan) for name, x in inputs().items()}
        asked, gather = [], cp.comm.all_gather_object
        cp.comm.all_gather_object = lambda value: (asked.append(value), gather(value))[1]
        counts = []
        for top_k in (3, 3, 4):
            indices = chosen(module, mine, cp, plan, top_k=top_k)
            _, lse = attended(module, mine, indices, cp, plan, return_lse=True)
            lost(module, mine, lse, indices, cp, plan)
            counts.append(len(asked))
        assert counts == [3, 3, 6]

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
def test_derivatives_that_are_refused(package: str) -> None:
    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member)
        mine = sharded(module, inputs(), cp, plan)
        indices = chosen(module, mine, cp, plan)
        out, lse = attended(module, mine, indices, cp, plan, return_lse=True)
        loss = lost(module, mine, lse, indices, cp, plan)
        constants = torch.autograd.grad(loss.sum(), [mine["q"], mine["k"]], allow_unused=True, retain_graph=True)
        assert constants == (None, None)
        for result, x in ((out, mine["q"]), (loss, mine["k_index"])):
            (dx,) = torch.autograd.grad(result.sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="differentiable once"):
                dx.sum().backward()
            with pytest.raises(NotImplementedError, match="a gradient of a gradient"):
                torch.autograd.grad(dx.sum(), x, allow_unused=True)
        both = torch.stack([torch.ones_like(out)] * 2)
        with pytest.raises(NotImplementedError, match=r"is_grads_batched=True.* is not supported"):
            torch.autograd.grad(out, mine["v"], both, is_grads_batched=True)

    SimGroup(2).run(one)


# ---- what is refused


WRONG: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "indices-int64": ("attention", {"indices": torch.Tensor.long}, TypeError, r"indices has dtype torch.int64"),
    "indices-rows": ("attention", {"indices": lambda x: x[:-1]}, ValueError, r"indices has shape \[9, 3\] and q \[10"),
    "indices-heads": (
        "attention", {"indices": lambda x: x[:, None].expand(-1, 3, -1)}, ValueError, r"its last sizes must be \[2, 3\]"
    ),
    "indices-none": ("attention", {"indices": lambda x: x[:, :0]}, ValueError, r"top_k of indices is 0; it must be"),
    "q-heads": ("attention", {"q": lambda x: x[:, :4]}, ValueError, r"q has shape \[10, 4, 6\]; its last sizes"),
    "k-rows": ("attention", {"k": lambda x: x[:-1]}, ValueError, r"k has 9 tokens; by the global lengths"),
    "v-dtype": ("attention", {"v": torch.Tensor.double}, TypeError, r"v has dtype torch.float64; it must be float32"),
    "softmax_scale": ("attention", {"softmax_scale": -1.0}, ValueError, r"softmax_scale is -1.0; it must be finite"),
    "softmax_offset": ("attention", {"softmax_offset": torch.ones(8)}, ValueError, r"'vanilla'; it needs 'learnable'"),
    "return_lse": ("attention", {"return_lse": 1}, TypeError, r"return_lse is 1; it must be True or False"),
    "top_k": ("selection", {"top_k": 0}, ValueError, r"top_k is 0; it must be at least 1"),
    "scale": ("selection", {"scale": float("nan")}, ValueError, r"scale is nan; it must be finite"),
    "k_index": ("selection", {"k_index": lambda x: x[:, :4]}, ValueError, r"k_index has shape \[10, 4\]; its"),
    "weights": ("selection", {"weights": torch.Tensor.half}, TypeError, r"weights has dtype torch.float16"),
    "lse": ("loss", {"lse": torch.Tensor.t}, ValueError, r"lse has shape \[10, 8\]; it must be \[h_q, s\] = \[8"),
    "lse-dtype": ("loss", {"lse": torch.Tensor.double}, TypeError, r"lse has dtype torch.float64; it"),
}  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_of_one_rank_raises_on_all(wrong: str, package: str) -> None:
    kind, changes, error, words = WRONG[wrong]

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member)
        mine: dict[str, Any] = {name: module.shard(x, cp=cp, plan=plan) for name, x in inputs().items()}
        mine |= {"indices": torch.zeros(10, 3, dtype=torch.int32), "lse": torch.zeros(8, 10), "top_k": 3}
        if member.rank == 1:
            mine |= {n: change(mine[n]) if callable(change) else change for n, change in changes.items()}
        names = {
            "attention": ("q", "k", "v", "indices", "softmax_scale", "softmax_offset", "return_lse"),
            "selection": ("q_index", "k_index", "weights", "top_k", "scale"),
            "loss": ("q_index", "k_index", "weights", "lse", "q", "k", "indices"),
        }[kind]
        given = {name: mine[name] for name in names if name in mine}
        function = {
            "attention": module.sparse_attention, "selection": module.select_keys, "loss": module.index_loss,
        }[kind]  # fmt: skip
        with pytest.raises(error if member.rank == 1 else ValueError, match=words):
            function(**given, cp=cp, plan=plan)

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"softcap": 30.0}, r"sparse_attention lacks softcap\n.*make the plan without it"),
        ({"softmax_type": "off-by-one"}, r"sparse_attention lacks softmax_type off-by-one"),
        ({"score_mod": lambda score, b, h, q_idx, kv_idx: score}, r"sparse_attention lacks score_mod"),
        ({"dropout_p": 0.5}, r"sparse_attention lacks dropout"),
        ({"comm": "p2p"}, r"by cp_comm_type 'p2p' is not supported:\n.*cp_comm_type='all_gather'"),
        ({"comm": "a2a+p2p"}, r"by cp_comm_type 'a2a\+p2p' is not supported:\n.*cp_comm_type='all_gather'"),
    ],
)
def test_what_is_refused_by_name(more: dict[str, Any], words: str, package: str) -> None:
    more = dict(more)
    comm = more.pop("comm", "all_gather")

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member.split(2) if comm == "a2a+p2p" else member, comm, **more)
        arguments: dict[str, Any] = THD | SIZES | {"dtype": torch.float32} | more
        supported, why = module.supports(cp=cp, **arguments, sparse=True)
        assert not supported
        assert re.search(words.replace("sparse_attention", "sparse attention"), why)
        assert module.supports(cp=cp, **arguments) == (True, "")
        mine = {name: module.shard(x, cp=cp, plan=plan) for name, x in inputs().items()}
        with pytest.raises(Unsupported, match=words):
            attended(module, mine, torch.zeros(10, 3, dtype=torch.int32), cp, plan)
        if comm != "all_gather":
            with pytest.raises(Unsupported, match=words):
                chosen(module, mine, cp, plan)

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_plan_says_that_it_is_for_sparse_attention(package: str) -> None:
    def one(member: SimMember) -> None:
        _, _, plan = made(package, member, sparse=True)
        assert "sparse attention too" in str(plan)
        with pytest.raises(TypeError, match=r"sparse is 1; it must be True or False"):
            made(package, member, sparse=1)

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
def test_keys_of_other_documents_are_refused(package: str) -> None:
    """A position in the row's document would have two meanings."""
    mask: dict[str, Any] = {"areas": torch.tensor([[0, 20, 0, 20, -1, 0]]), "attn_mask_type": None}

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member, **mask)
        mine = {name: module.shard(x, cp=cp, plan=plan) for name, x in inputs().items()}
        with pytest.raises(ValueError, match=r"indices is given, and areas connect documents 0 and 2"):
            attended(module, mine, torch.zeros(10, 3, dtype=torch.int32), cp, plan)
        with pytest.raises(ValueError, match=r"top_k is given, and areas connect documents 0 and 2"):
            chosen(module, mine, cp, plan)

    SimGroup(2).run(one)


# ---- random problems, and processes


SIDES = {name: Implementation(package) for name, package in PACKAGES.items()}


@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(int(os.environ.get("CP_SPARSE", "30")), fast=6))
@given(
    attention=sparse_attentions(dtypes=("float64",)),
    selection=selections(dtypes=("float64",)),
    loss=index_losses(dtypes=("float64",)),
)
def test_random_problems(package: str, attention: SparseAttention, selection: SelectKeys, loss: IndexLoss) -> None:
    cases: list[SparseCase] = [attention, selection, loss]
    for case in cases:
        assert case.check(SIDES[package]) == [], str(case)
    assert check_sparse_probes(SIDES[package], attention) == [], f"probes of {attention}"


def over_gloo(package: str, comm: str) -> Any:
    """One process."""
    given = inputs(torch.float64)
    module, cp, plan = made(package, dist.group.WORLD, comm, dtype=torch.float64)
    mine = sharded(module, given, cp, plan)
    indices = chosen(module, mine, cp, plan)
    out, lse = attended(module, mine, indices, cp, plan, return_lse=True)
    loss = lost(module, mine, lse.detach(), indices, cp, plan)
    grads = torch.autograd.grad(out.square().sum() + loss.sum(), list(mine.values()))
    whole = (module.unshard(x.detach(), cp=cp, plan=plan) for x in (indices, out, loss, *grads))
    return [x.numpy() for x in whole]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("comm", ["all_gather", "a2a"])
def test_processes(two: Processes, comm: str, package: str) -> None:
    """Two processes compute what one rank does."""

    def alone(member: SimMember) -> list[torch.Tensor]:
        given = inputs(torch.float64)
        module, cp, plan = made("cp_ref", member, comm, dtype=torch.float64)
        mine = sharded(module, given, cp, plan)
        indices = chosen(module, mine, cp, plan)
        out, lse = attended(module, mine, indices, cp, plan, return_lse=True)
        loss = lost(module, mine, lse.detach(), indices, cp, plan)
        grads = torch.autograd.grad(out.square().sum() + loss.sum(), list(mine.values()))
        return [module.unshard(x.detach(), cp=cp, plan=plan) for x in (indices, out, loss, *grads)]

    (wanted,) = SimGroup(1).run(alone)
    for found in two.run(over_gloo, package, comm):
        assert not isinstance(found, Exception), found
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(got), want)
