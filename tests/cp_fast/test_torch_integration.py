"""cp_fast.attention inside PyTorch: compiled graphs, activation checkpointing, autocast, retained graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cp_fast
import cp_ref
from cp_fast.runtime.handles import copy_of, new_handle, object_of
from cp_ref import SimGroup
from cp_ref.reference.simulator import RankScheduler, SimMember

COMMS = ("p2p", "all_gather", "a2a", "a2a+p2p")
FORMATS = {"bshd": (2, 8, 4, 8), "sbhd": (8, 2, 4, 8), "thd": (20, 4, 8)}
CU, PADDED = torch.tensor([0, 7, 15], dtype=torch.int32), torch.tensor([0, 8, 16], dtype=torch.int32)


class Layer(torch.nn.Module):
    """A projection, attention, a projection."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(8, 24)
        self.out = torch.nn.Linear(8, 8)
        self.offset = torch.nn.Parameter(torch.randn(4))
        self.how = how

    def forward(self, x: torch.Tensor, cp: cp_fast.ContextParallel, plan: cp_fast.Plan) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        sink = {"softmax_offset": self.offset} if plan.problem.softmax_type == "learnable" else {}
        results = cp_fast.attention(q, k, v, cp=cp, plan=plan, **sink, **self.how)
        if isinstance(results, tuple):
            return self.out(results[0]) * results[1].exp().nan_to_num(0.0, 0.0, 0.0).mean()
        return self.out(results)


def plan_for(cp: cp_fast.ContextParallel, fmt: Any, **how: Any) -> cp_fast.Plan:
    sizes: dict[str, Any] = {"batch_size": 2, "seqlen_q": 8 * cp.size}
    if fmt == "thd":
        sizes = {"cu_seqlens_q": CU, "cu_seqlens_q_padded": PADDED}
    dims = {"heads_q": 4, "heads_kv": 4, "d_qk": 8, "d_v": 8, "dtype": torch.float32}
    return cp_fast.make_plan(cp=cp, qkv_format=fmt, device="cpu", **(sizes | dims | how))


def play(member: SimMember, comm: Any, fmt: str, run: Callable[..., torch.Tensor], **how: Any) -> list[torch.Tensor]:
    """Output and gradients of one rank."""
    cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
    plan_how = {k: v for k, v in how.items() if k != "return_lse"}
    plan, layer = plan_for(cp, fmt, **plan_how), Layer(**({"return_lse": True} if "return_lse" in how else {}))
    x = torch.randn(FORMATS[fmt], generator=torch.Generator().manual_seed(member.rank)).requires_grad_()
    y = run(layer, x, cp, plan)
    y.square().sum().backward()
    grads = [p.grad for p in (x, *layer.parameters()) if p.grad is not None]
    return [y.detach(), *grads]


def plainly(layer: Layer, *arguments: Any) -> torch.Tensor:
    return layer(*arguments)


def assert_equal(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert len(mine) == len(theirs) > 3
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("comm", COMMS)
def test_activation_checkpointing_changes_nothing(comm: str, reentrant: bool) -> None:
    def again(layer: Layer, *arguments: Any) -> torch.Tensor:
        return checkpoint(layer, *arguments, use_reentrant=reentrant)  # pyright: ignore[reportReturnType]

    size = 4 if comm == "a2a+p2p" else 2
    runs = [SimGroup(size).run(lambda m, run=run: play(m, comm, "bshd", run)) for run in (plainly, again)]
    assert_equal(*runs)


class TestCompiled:
    """Over one rank: Dynamo is not made for the threads of a simulated group. tests/dist has it over processes."""

    member = SimMember(0, 1, RankScheduler(1))  # in this thread: PyTorch 2.11 may crash where a second one compiles

    @pytest.fixture(autouse=True)
    def fresh(self) -> None:
        torch._dynamo.reset()

    @pytest.mark.parametrize(("comm", "fmt"), zip(COMMS, FORMATS, strict=False))
    @pytest.mark.one_in(3)
    def test_a_layer_is_one_graph(self, comm: str, fmt: str) -> None:
        def compiled(layer: Layer, *arguments: Any) -> torch.Tensor:
            return torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments)

        for how in ({}, {"softmax_type": "learnable"}, {"return_lse": True}):
            runs = [[play(self.member, comm, fmt, run, **how)] for run in (plainly, compiled)]
            assert_equal(*runs)

    def test_a_new_plan_is_not_compiled_anew(self) -> None:
        graphs = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            graphs.append(graph)
            return graph.forward

        cp, layer = cp_fast.ContextParallel(self.member), Layer()
        fast = torch.compile(layer, fullgraph=True, backend=backend)
        x = torch.randn(1, 8, 4, 8)
        for window in (-1, 2, 3):
            plan = plan_for(cp, "bshd", window_size=(window, 0), batch_size=1, seqlen_q=8)
            torch.testing.assert_close(fast(x, cp, plan), layer(x, cp, plan))
        assert len(graphs) == 1

    def test_without_a_plan_it_says_that_there_is_none(self) -> None:
        cp, x = cp_fast.ContextParallel(self.member), torch.randn(1, 8, 4, 8)

        def call(x: torch.Tensor) -> torch.Tensor:
            return 2 * cp_fast.attention(x, x, x, cp=cp)

        with pytest.raises(Exception, match="call make_plan outside"):
            torch.compile(call, fullgraph=True, backend="aot_eager")(x)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(call, backend="aot_eager")(x), call(x))  # in two graphs

    def test_a_wrong_tensor_is_refused_when_the_graph_runs(self) -> None:
        cp = cp_fast.ContextParallel(self.member)
        plan = plan_for(cp, "thd")
        layer = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
        with pytest.raises(ValueError, match=r"q has 12 tokens"):
            layer(torch.randn(12, 4, 8), cp, plan)


def test_a_handle_keeps_what_its_object_had() -> None:
    class Thing:
        def __init__(self) -> None:
            self.value = torch.ones(2)
            self.handle = new_handle(self)

    thing = Thing()
    saved, copied, value = thing.handle.detach(), thing.handle.clone(), weakref.ref(thing.value)
    assert object_of(saved) is thing
    del thing  # without a circle: it is gone at once
    assert object_of(saved).value is value()
    more = copy_of(saved)
    del saved
    assert object_of(more).value is value()
    more.zero_()  # as a graph does with memory that it uses again
    assert object_of(copied).value is value()
    del more
    assert value() is None
    with pytest.raises(RuntimeError, match="no longer exists"):
        object_of(copied)


def test_a_compiled_layer_that_makes_its_plan_and_its_context() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, member: Any) -> None:
            super().__init__()
            self.member, self.weight = member, torch.nn.Parameter(torch.eye(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cp = cp_fast.ContextParallel(self.member)
            how: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": x.dtype, "device": "cpu"}
            plan = cp_fast.make_plan(cp=cp, batch_size=1, seqlen_q=8, **how)
            h = x @ self.weight
            return cp_fast.attention(h, h, h, cp=cp, plan=plan)

    def one(member: Any) -> None:
        layer, x = Layer(member), torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(member.rank))
        grads = []
        for call in (layer, torch.compile(layer, backend="aot_eager")):
            layer.zero_grad()
            (call(x).square().sum() + call(2 * x).sum()).backward()
            grads.append(layer.weight.grad)
        torch.testing.assert_close(*grads)

    SimGroup(2).run(one)


PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}
SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float64, "device": "cpu"}


@pytest.mark.parametrize("making", [False, True], ids=["made in training", "made in evaluation"])
def test_a_compiled_layer_takes_a_plan_of_an_evaluation(making: bool) -> None:
    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member)
        with torch.inference_mode(making):
            plan = cp_fast.make_plan(cp=cp, qkv_format="bshd", batch_size=1, seqlen_q=8, **SIZES)
        layer = torch.compile(lambda x: cp_fast.attention(x, x, x, cp=cp, plan=plan) + 1, backend="aot_eager")
        x = torch.randn(1, 8, 2, 8, dtype=torch.float64, requires_grad=True)
        with torch.inference_mode():
            layer(x)
        layer(x).sum().backward()

    SimGroup(1).run(one)
