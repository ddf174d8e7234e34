"""Sparse attention of cp_fast: what is saved, what travels, and keys that are values too, the latent form."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import cp_fast
from cp_fast.checkpoint import save_attention
from cp_fast.compile.program import Recv
from cp_fast.kernels.sparse import torch_sparse
from cp_fast.layers.sparse_tables import KEYS, SparseTables
from cp_ref import SimGroup
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.problem import Problem, Sequence
from tests.dist.workers import Processes

CU, TOTAL = torch.tensor([0, 7, 7, 30]), 32
SIZES: dict[str, Any] = {"heads_q": 4, "heads_kv": 1, "d_qk": 6, "d_v": 4, "device": "cpu", "dtype": torch.float32}
THD: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": CU, "cu_seqlens_q_padded": torch.tensor([0, 8, 8, TOTAL])}


def made(member: Any, comm: Any = "all_gather", **more: Any) -> tuple[cp_fast.ContextParallel, cp_fast.Plan]:
    cp = cp_fast.ContextParallel(member, comm, layout=more.pop("layout", "dual_chunk"))
    return cp, cp_fast.make_plan(cp=cp, **(THD | SIZES | more))


def inputs(rows: int = TOTAL, seed: int = 0) -> dict[str, torch.Tensor]:
    """Global tensors: queries, latent keys, and those of an indexer with 3 heads of 5."""
    draw = torch.Generator().manual_seed(seed)
    sizes = {"q": (4, 6), "k": (1, 6), "q_index": (3, 5), "k_index": (5,), "weights": (3,)}
    return {name: torch.randn(rows, *size, generator=draw) for name, size in sizes.items()}


def layer(
    cp: Any,
    plan: Any,
    top_k: int,
    q: torch.Tensor,
    k: torch.Tensor,
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Selection, attention in the latent form, and the indexer's loss."""
    how: dict[str, Any] = {"cp": cp, "plan": plan}
    indices = cp_fast.select_keys(q_index, k_index, weights, top_k=top_k, **how)
    out, lse = cp_fast.sparse_attention(q, k, k[..., :4], indices, return_lse=True, **how)
    loss = cp_fast.index_loss(q_index, k_index, weights, lse.detach(), q, k, indices, **how)
    return torch.cat([out.flatten(1), loss[:, None]], 1)


def step(member: SimMember, call: Any = layer, comm: Any = "all_gather", **more: Any) -> list[torch.Tensor]:
    """The result and the gradients of all rows."""
    cp, plan = made(member, comm, **more)
    mine = [cp_fast.shard(x, cp=cp, plan=plan).requires_grad_() for x in inputs().values()]
    out = call(cp, plan, 4, *mine)
    out.square().sum().backward()
    found = [out.detach(), *(x.grad for x in mine if x.grad is not None)]
    return [cp_fast.unshard(x, cp=cp, plan=plan) for x in found]


def all_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("comm", ["all_gather", "a2a"])
def test_checkpointing_does_not_select_twice(comm: str, offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str, function: Any, *given: Any, **how: Any) -> Any:
        calls.append(name)
        return function(*given, **how)

    for name in ("select", "forward", "loss"):
        monkeypatch.setattr(torch_sparse, name, partial(counted, name, getattr(torch_sparse, name)))

    def saved(*given: Any) -> torch.Tensor:
        return checkpoint(layer, *given, use_reentrant=False, context_fn=save_attention(offload=offload))

    def recomputed(*given: Any) -> torch.Tensor:
        return checkpoint(layer, *given, use_reentrant=False)

    found = []
    for call, times in ((layer, 1), (saved, 1), (recomputed, 2)):
        calls.clear()
        found.append(SimGroup(2).run(lambda member, call=call: step(member, call, comm)))
        assert sorted(calls) == sorted(["select", "forward", "loss"] * 2 * times)
    assert all(all_equal(some, found[0][rank]) for ranks in found for rank, some in enumerate(ranks))


def test_rows_without_keys_have_no_gradient() -> None:
    """Whatever is made of their lse, which is -inf."""

    def one(member: SimMember) -> None:
        cp, plan = made(member)
        q, k, *_ = (cp_fast.shard(x, cp=cp, plan=plan).requires_grad_() for x in inputs().values())
        indices = torch.where(torch.arange(len(q)) % 2 == 0, 0, -1)[:, None].int()
        _, lse = cp_fast.sparse_attention(q, k, k[..., :4], indices, cp=cp, plan=plan, return_lse=True)
        lse.square().mean().backward()
        for x in (q.grad, k.grad):
            assert x is not None
            assert bool(x.isfinite().all())

    SimGroup(2).run(one)


def test_only_rows_that_are_seen_travel() -> None:
    """A rank receives the keys that its own queries see, and no others; a document on one rank sends nothing."""
    sequences = (Sequence(12, 12, 12, 12), Sequence(8, 8, 8, 8), Sequence(0, 0, 4, 4))
    table = ((0, 0, 0, 5), (0, 0, 8, 12), (1, 0, 5, 8), (1, 1, 0, 8), (1, 2, 0, 4))
    for layout, window in (("dual_chunk", (-1, -1)), ("contiguous", (3, 0)), (table, (-1, -1))):
        problem = Problem(2, sequences, "all_gather", 1, layout, "thd", "padding_causal", window)
        pairs = torch.zeros(problem.starts_q[-1], problem.starts_kv[-1], dtype=torch.bool)
        between = torch.arange(pairs.shape[1]) - torch.arange(len(pairs))[:, None]
        for q_start, q_stop, k_start, k_stop, low, high in problem.workload.areas.rows():
            there = (slice(q_start, q_stop), slice(k_start, k_stop))
            pairs[there] |= (between[there] >= low) & (between[there] <= high)
        for rank in range(2):
            plan = SparseTables(problem, rank, torch.device("cpu"))
            mine, own = plan.q.rows, plan.kv.rows
            wanted = set(pairs[mine].any(0).nonzero()[:, 0].tolist()) - set(own.tolist())
            messages = plan.messages(KEYS)
            assert sum(recv.size for recv in plan.exchange(KEYS).programs.forward.of(Recv)) == len(wanted)
            assert messages.rows["kv"].gathered.total == len(wanted) + len(own)
        if layout is table:
            (there,) = SparseTables(problem, 1, torch.device("cpu")).messages(KEYS).there
            assert [(m.peer, m.pieces.total) for m in there.sends] == [(0, 3)]  # of the first document alone


def test_the_latent_form_is_sent_once_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[bool] = []
    forward = torch_sparse.forward

    def looked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **how: Any) -> Any:
        shared.append(v.data_ptr() == k.data_ptr() and v.stride() == k.stride())
        return forward(q, k, v, *rest, **how)

    monkeypatch.setattr(torch_sparse, "forward", looked)

    def one(member: SimMember) -> None:
        cp, plan = made(member)
        q, k, *_ = (cp_fast.shard(x, cp=cp, plan=plan) for x in inputs().values())
        indices = torch.zeros(len(q), 2, dtype=torch.int32)
        cp_fast.sparse_attention(q, k, k[..., :4], indices, cp=cp, plan=plan)
        sent, exchange = [], member.exchange
        cp.comm.exchange = lambda sends, recvs: (sent.append(len(sends)), exchange(sends, recvs))[1]  # pyright: ignore
        cp_fast.sparse_attention(q, k, k[..., :4], indices, cp=cp, plan=plan)
        cp_fast.sparse_attention(q, k, k[..., :4].clone(), indices, cp=cp, plan=plan)
        assert sent == [1, 2]

    SimGroup(2).run(one)
    assert shared == [True] * 4 + [False] * 2


def test_gradients_of_the_latent_form() -> None:
    """One message where autograd sees v as a part of k, and else those of both; the same numbers in each case."""

    def one(member: SimMember, comm: str) -> None:
        cp, plan = made(member, comm, dtype=torch.float64)
        q, k, *_ = (cp_fast.shard(x.double(), cp=cp, plan=plan) for x in inputs().values())
        indices = torch.arange(3, dtype=torch.int32).expand(len(q), 3)
        sent, exchange = [], member.exchange
        cp.comm.exchange = lambda sends, recvs: (sent.append(len(sends)), exchange(sends, recvs))[1]  # pyright: ignore

        def gradients(keys: torch.Tensor, values: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor | None]:
            out = cp_fast.sparse_attention(q, keys, values, indices, cp=cp, plan=plan)
            sent.clear()
            out.square().sum().backward()
            return [x.grad for x in leaves]

        apart = [x.clone().requires_grad_() for x in (k, k[..., :4])]
        dk, dv = gradients(*apart, *apart)
        assert dk is not None
        assert dv is not None
        both = sum(sent)
        total = dk + torch.nn.functional.pad(dv, (0, 2))

        leaf = k.clone().requires_grad_()
        (found,) = gradients(leaf, leaf[..., :4], leaf)
        torch.testing.assert_close(found, total)
        assert sum(sent) < both
        inner = leaf.detach().requires_grad_() * 1  # not a leaf, and v is a view of another view
        inner.retain_grad()
        (found,) = gradients(inner[:, :, :], inner[..., :4], inner)
        torch.testing.assert_close(found, total)

        leaf = k.clone().requires_grad_()
        part = leaf[..., :4]
        part.retain_grad()
        for wanted, x in zip((total, dv), gradients(leaf, part, leaf, part), strict=True):
            torch.testing.assert_close(x, wanted)
        leaf = k.clone().requires_grad_()
        (found,) = gradients(leaf, leaf.detach()[..., :4], leaf)
        torch.testing.assert_close(found, dk)
        other = k.clone()
        values = other[..., :4].requires_grad_()
        (found,) = gradients(other, values, values)
        torch.testing.assert_close(found, dv)

    for comm in ("all_gather", "a2a"):
        SimGroup(2).run(partial(one, comm=comm))


class Halved(torch.autograd.Function):
    """A view, as functions that scale or sum gradients return one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 0.5


def halving(x: torch.Tensor, node: bool = False) -> torch.Tensor:
    """x, whose gradient a hook halves: one of the tensor, or of its node in autograd's graph."""
    if node:
        assert x.grad_fn is not None
        x.grad_fn.register_prehook(lambda grads: tuple(g * 0.5 for g in grads))
    else:
        x.register_hook(lambda grad: grad * 0.5)
    return x


def behind(x: torch.Tensor) -> torch.Tensor:
    """The values, behind a hook of a tensor between them and x."""
    return halving(x[..., :5])[..., :4]


BETWEEN: dict[str, tuple[Any, float, float]] = {  # keys and values of a leaf, and the share of each in its gradient
    "nothing": (lambda x: (x, x.split([4, 2], -1)[0]), 1, 1),
    "a function before v": (lambda x: (x, Halved.apply(x[..., :4])), 1, 0.5),
    "a function, then v": (lambda x: (x, Halved.apply(x)[..., :4]), 1, 0.5),
    "a function before k": (lambda x: (Halved.apply(x), x[..., :4]), 0.5, 1),
    "a hook of v": (lambda x: (x, halving(x[..., :4])), 1, 0.5),
    "a hook of v's node": (lambda x: (x, halving(x[..., :4], node=True)), 1, 0.5),
    "a hook before v": (lambda x: (x, behind(x)), 1, 0.5),
    "a hook of k": (lambda x: (halving(x[:, :, :]), x[..., :4]), 0.5, 1),
    "a hook of both": (lambda x: (lambda k: (k, k[..., :4]))(halving(x[:, :, :])), 0.5, 0.5),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_what_lies_between_keys_and_latent_values_has_its_part(between: str) -> None:
    """The gradients travel as one only where nothing is there."""
    cut, of_k, of_v = BETWEEN[between]

    def one(member: SimMember) -> None:
        cp, plan = made(member, dtype=torch.float64)
        q, k, *_ = (cp_fast.shard(x.double(), cp=cp, plan=plan) for x in inputs().values())
        indices = torch.arange(3, dtype=torch.int32).expand(len(q), 3)
        apart = [x.clone().requires_grad_() for x in (k, k[..., :4])]
        cp_fast.sparse_attention(q, apart[0], apart[1], indices, cp=cp, plan=plan).square().sum().backward()
        dk, dv = (x.grad for x in apart)
        assert dk is not None
        assert dv is not None

        leaf = k.clone().requires_grad_()
        x = leaf * 1
        keys, values = cut(x)
        cp_fast.sparse_attention(q, keys, values, indices, cp=cp, plan=plan).square().sum().backward()
        torch.testing.assert_close(leaf.grad, of_k * dk + of_v * torch.nn.functional.pad(dv, (0, 2)))

    SimGroup(2).run(one)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_plan_says_whether_gradients_have_a_fixed_order(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    for name in ("backward", "loss_backward"):

        def looked(*given: Any, function: Any, **how: Any) -> Any:
            asked.append(given[-1])
            return function(*given, **how)

        monkeypatch.setattr(torch_sparse, name, partial(looked, function=getattr(torch_sparse, name)))
    SimGroup(2).run(lambda member: step(member, deterministic=deterministic))
    assert asked == [deterministic] * 4


def over_gloo(comm: str, layout: str, *, compiled: bool) -> list[Any]:
    """One process."""
    cp, plan = made(dist.group.WORLD, comm, layout=layout)
    mine = [cp_fast.shard(x, cp=cp, plan=plan).requires_grad_() for x in inputs().values()]
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    out = call(cp, plan, 4, *mine)
    out.square().sum().backward()
    found = [out.detach(), *(x.grad for x in mine if x.grad is not None)]
    return [cp_fast.unshard(x, cp=cp, plan=plan).numpy() for x in found]


@pytest.mark.parametrize(
    ("comm", "layout", "compiled"),
    [
        ("all_gather", "dual_chunk", False),
        ("a2a", "balanced", False),
        pytest.param("a2a", "balanced", True, marks=pytest.mark.thorough),
    ],
)
def test_processes(two: Processes, comm: str, layout: str, compiled: bool) -> None:
    want = SimGroup(2).run(lambda member: step(member, comm=comm, layout=layout))
    for found, wanted in zip(two.run(partial(over_gloo, compiled=compiled), comm, layout), want, strict=True):
        assert not isinstance(found, Exception), found
        if not compiled:
            assert all_equal([torch.from_numpy(x) for x in found], wanted)
        for x, y in zip(found, wanted, strict=True):  # a graph adds the gradients of a latent k and its v elsewhere
            torch.testing.assert_close(torch.from_numpy(x), y)
