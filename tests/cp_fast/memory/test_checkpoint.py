"""Selective checkpointing: attention is saved, all else is recomputed, and the bits are those without checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import cp_fast
from cp_fast.api import attention as api
from cp_fast.checkpoint import attention_forward, save_attention
from cp_ref import SimGroup
from cp_ref.reference.simulator import RankScheduler, SimMember

COMMS = ("p2p", "all_gather", "a2a", "a2a+p2p")
LAYERS, HEADS, DIM = 3, 4, 8
ContextFn = Callable[[], tuple[Any, Any]]


class Layer(torch.nn.Module):
    """A projection, attention, a projection, around which the residual goes: [b, s/cp, h * d] -> the same."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.out = torch.nn.Linear(HEADS * DIM, HEADS * DIM)
        self.how = how

    def forward(self, x: torch.Tensor, cp: cp_fast.ContextParallel, plan: cp_fast.Plan | None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, DIM)).chunk(3, dim=-2)
        results = cp_fast.attention(q, k, v, cp=cp, plan=plan, **self.how)
        if isinstance(results, tuple):
            out, lse = results
            return x + self.out(out.flatten(2)) * lse.mean()
        return x + self.out(results.flatten(2))


class Counting:
    """A rank of a simulated group that counts the exchanges of its group."""

    def __init__(self, member: SimMember) -> None:
        self.exchanges, inner = 0, member.exchange

        def exchange(*given: Any) -> Any:
            self.exchanges += 1
            return inner(*given)

        member.exchange = exchange  # pyright: ignore[reportAttributeAccessIssue]


def step(
    member: SimMember, comm: Any, context_fn: Any, *, planned: bool = True, **how: Any
) -> tuple[int, list[torch.Tensor]]:
    """One step of a model of some layers: how often the rank exchanged, and its outputs and gradients.

    context_fn: None: without checkpointing; "plain": all is recomputed.
    """
    counting = Counting(member)
    cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
    sizes: dict[str, Any] = {"batch_size": 2, "seqlen_q": 8 * cp.size, "dtype": torch.float32, "device": "cpu"}
    dims: dict[str, Any] = {"heads_q": HEADS, "heads_kv": HEADS, "d_qk": DIM, "d_v": DIM}
    plan = cp_fast.make_plan(cp=cp, **sizes, **dims) if planned else None
    layers = [Layer(**how) for _ in range(LAYERS)]
    x = torch.randn(2, 8, HEADS * DIM, generator=torch.Generator().manual_seed(member.rank)).requires_grad_()
    y: Any = x
    before = counting.exchanges
    for layer in layers:
        if context_fn is None:
            y = layer(y, cp, plan)
        elif context_fn == "plain":
            y = checkpoint(layer, y, cp, plan, use_reentrant=False)
        else:
            y = checkpoint(layer, y, cp, plan, use_reentrant=False, context_fn=context_fn)
    y.square().sum().backward()
    grads = [p.grad for p in (x, *(p for layer in layers for p in layer.parameters()))]
    return counting.exchanges - before, [y.detach(), *(g for g in grads if g is not None)]


def run(comm: str, make: Callable[[], ContextFn | str | None], **how: Any) -> list[tuple[int, list[torch.Tensor]]]:
    """A step on all ranks, each with a `context_fn` of its own."""
    return SimGroup(4 if comm == "a2a+p2p" else 2).run(lambda member: step(member, comm, make(), **how))


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """As many exchanges, and the same bits."""
    for (count, mine), (wanted, theirs) in zip(found, expected, strict=True):
        assert count == wanted
        assert len(mine) == len(theirs) == 2 + 4 * LAYERS
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def products(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """The usual policy: save matrix products."""
    saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def everything(*_: Any, **__: Any) -> CheckpointPolicy:
    """A policy that saves what each operator returns."""
    return CheckpointPolicy.MUST_SAVE


WAYS: dict[str, Callable[[], ContextFn]] = {
    "saved": save_attention,
    "offloaded": partial(save_attention, offload=True),
    "with products": partial(save_attention, products),
    "offloaded, with products": partial(save_attention, products, offload=True),
    "offloaded, with everything": partial(save_attention, everything, offload=True),
}


@pytest.mark.parametrize(
    ("comm", "way"), [*(("p2p", way) for way in WAYS), *((comm, "offloaded, with everything") for comm in COMMS[1:])]
)
@pytest.mark.one_in(3)
def test_nothing_is_exchanged_twice_and_the_bits_are_those_without_checkpointing(comm: str, way: str) -> None:
    expected = run(comm, lambda: None)
    assert_same(run(comm, WAYS[way]), expected)
    assert run(comm, lambda: "plain")[0][0] > expected[0][0]  # what is counted is what is saved


@pytest.mark.parametrize("way", ["saved", "offloaded, with products"])
@pytest.mark.parametrize("how", [{"planned": False}, {"return_lse": True}])
def test_calls_without_a_plan_and_calls_that_return_lse(how: dict[str, Any], way: str) -> None:
    assert_same(run("p2p", WAYS[way], **how), run("p2p", lambda: None, **how))


@pytest.mark.parametrize("comm", COMMS)
def test_the_usual_policy_sees_one_operator(comm: str) -> None:
    """It recomputes attention. It used to see the matrix products inside, and to fail on a CPU."""
    expected = run(comm, lambda: "plain")
    assert_same(run(comm, lambda: partial(create_selective_checkpoint_contexts, products)), expected)


def test_a_policy_that_saves_every_operator() -> None:
    expected = run("p2p", lambda: None, planned=False)
    assert_same(run("p2p", lambda: partial(create_selective_checkpoint_contexts, everything), planned=False), expected)


def test_a_policy_of_ones_own_may_name_attention() -> None:
    contexts = partial(create_selective_checkpoint_contexts, [attention_forward])
    assert_same(run("all_gather", lambda: contexts), run("all_gather", lambda: None))


@pytest.mark.parametrize("way", ["saved", "offloaded"])
def test_checked_calls(way: str) -> None:
    with cp_fast.checked():
        found = run("p2p", WAYS[way])
    for (_, mine), (_, theirs) in zip(found, run("p2p", lambda: None), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="policy is a list"):
        save_attention([attention_forward])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="offload"):
        save_attention(offload=1)  # pyright: ignore[reportArgumentType]


def alone() -> tuple[cp_fast.ContextParallel, torch.Tensor]:
    """A group of one, in this thread, and an input."""
    x = torch.randn(2, 8, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    return cp_fast.ContextParallel(SimMember(0, 1, RankScheduler(1))), x.requires_grad_()


@pytest.mark.parametrize("changed", ["at once", "after the next call"])
def test_results_that_are_changed_in_place_before_they_left_are_refused(changed: str) -> None:
    cp, x = alone()

    def region(x: torch.Tensor) -> torch.Tensor:
        first = cp_fast.attention(x, x, x, cp=cp)
        if changed == "at once":
            first.detach().zero_()
        second = cp_fast.attention(x, x, x, cp=cp)
        if changed != "at once":
            first.detach().zero_()
        return second

    def call() -> None:
        y: Any = checkpoint(region, x, use_reentrant=False, context_fn=save_attention(offload=True))
        y.sum().backward()

    if changed == "at once":
        with pytest.raises(RuntimeError, match="changed in place"):
            call()
    else:
        call()


def test_a_graph_may_be_kept_where_results_are_offloaded() -> None:
    cp, x = alone()
    y: Any = checkpoint(
        lambda x: cp_fast.attention(x, x, x, cp=cp), x, use_reentrant=False, context_fn=save_attention(offload=True)
    )
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("comm", "backend"),
    [
        ("p2p", "aot_eager"),
        pytest.param("a2a", "aot_eager", marks=pytest.mark.thorough),
        pytest.param("p2p", "inductor", marks=pytest.mark.thorough),
    ],
)
def test_in_a_compiled_graph_attention_runs_forward_once(
    comm: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over one rank: Dynamo is not made for the threads of a simulated group."""
    torch._dynamo.reset()
    forwards, inner = [], api.forward_pass

    def counted(*given: Any, **how: Any) -> Any:
        forwards.append(1)
        return inner(*given, **how)

    monkeypatch.setattr(api, "forward_pass", counted)
    cp, layer = cp_fast.ContextParallel(SimMember(0, 1, RankScheduler(1)), comm), Layer()
    dims: dict[str, Any] = {"heads_q": HEADS, "heads_kv": HEADS, "d_qk": DIM, "d_v": DIM}
    plan = cp_fast.make_plan(cp=cp, batch_size=2, seqlen_q=8, dtype=torch.float32, device="cpu", **dims)
    x = torch.randn(2, 8, HEADS * DIM, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (expected,) = torch.autograd.grad(layer(x, cp, plan).square().sum(), x)
    for context_fn, count in ((None, 2), (save_attention(), 1), (save_attention(products), 1)):
        how: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

        def call(x: torch.Tensor, how: dict[str, Any] = how) -> Any:
            return checkpoint(layer, x, cp, plan, use_reentrant=False, **how)

        torch._dynamo.reset()
        forwards.clear()
        (found,) = torch.autograd.grad(torch.compile(call, fullgraph=True, backend=backend)(x).square().sum(), x)
        assert len(forwards) == count
        torch.testing.assert_close(found, expected)


def test_offload_inside_torch_compile_is_refused() -> None:
    torch._dynamo.reset()
    cp, x = alone()
    dims: dict[str, Any] = {"heads_q": HEADS, "heads_kv": HEADS, "d_qk": DIM, "d_v": DIM}
    plan = cp_fast.make_plan(cp=cp, batch_size=2, seqlen_q=8, dtype=torch.float32, device="cpu", **dims)
    context_fn = save_attention(offload=True)

    def call(x: torch.Tensor) -> Any:
        return checkpoint(
            lambda x: cp_fast.attention(x, x, x, cp=cp, plan=plan), x, use_reentrant=False, context_fn=context_fn
        )

    with pytest.raises(Exception, match=r"save_attention\(offload=True\) inside torch.compile is not supported"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(x)
