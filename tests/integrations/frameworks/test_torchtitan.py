"""torchtitan's Llama 3 with varlen attention: over ranks as on one with the oracle, forward and backward."""

from __future__ import annotations

import copy
import gc
import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import cp_fast
from cp_fast.api import attention as api
from cp_fast.api.fast_context import Agreements
from cp_fast.checkpoint import attention_forward, save_attention
from cp_fast.integrations import torchtitan as ours
from cp_fast.integrations.loss import token_mean
from cp_ref import SimGroup, dense_attention
from cp_ref.calls import plan_arguments
from cp_ref.schedules.planners.choose_schedule import choose_schedule
from cp_ref.schedules.problem import Problem
from tests.dist.workers import Processes

attention = pytest.importorskip(
    "torchtitan.models.common.attention", reason="needs torchtitan: pip install '.[test-integrations]'"
)
titan: Any = importlib.import_module("torchtitan.distributed.activation_checkpoint")


def model_of(layers: int = 2) -> Any:
    from torchtitan.models.llama3 import _debugmodel

    torch.manual_seed(0)
    config = _debugmodel("varlen")
    config.layers = config.layers[:layers]
    model = config.build()
    model.init_states()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    return model


def attentions(model: Any) -> list[Any]:
    return [block.attention.inner_attention for block in model.layers.values()]


def oracle(window_size: tuple[int, int]) -> Callable[..., torch.Tensor]:
    def forward(q: Any, k: Any, v: Any, *, attention_masks: Any, scale: Any, **_: Any) -> torch.Tensor:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        how: dict[str, Any] = {"qkv_format": "thd", "window_size": window_size, "softmax_scale": scale}
        out = dense_attention(*rows, cu_seqlens_q=attention_masks.cu_seq_q, **how)[0]
        return out.to(q.dtype).view(*q.shape[:2], *out.shape[1:])

    return forward


def documents(*lengths: int) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(n) for n in lengths]).view(2, -1)
    ids = torch.randint(0, 2048, positions.shape, generator=torch.Generator().manual_seed(1))
    return {"inputs": ids, "labels": ids.roll(-1, dims=1), "positions": positions}


def losses_of(model: Any, ids: Any, labels: Any, extra: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(model(ids, **extra).flatten(0, 1), labels.flatten(), reduction="none")


@pytest.mark.parametrize(
    ("comm", "layout", "lengths", "window_size"),
    [
        ("all_gather", "contiguous", (5, 19, 11, 13), (-1, 0)),
        ("p2p", "contiguous", (5, 19, 11, 13), (4, 0)),
        ("a2a", "dual_chunk", (8, 16, 24), (-1, 0)),
        ("p2p", "dual_chunk", (5, 19, 11, 13), (4, 0)),
        ("p2p", "balanced", (5, 19, 11, 13), (-1, 0)),
        ("all_gather", "balanced", (5, 19, 21, 3), (4, 0)),
    ],
)
def test_a_model_is_the_same_over_ranks(
    comm: Any, layout: Any, lengths: tuple[int, ...], window_size: tuple[int, int]
) -> None:
    whole, batch = model_of(), documents(*lengths)
    for module in attentions(whole):
        module.window_size = window_size
    masks = attention.create_varlen_metadata_for_document(batch["positions"])
    alone = copy.deepcopy(whole)
    for module in attentions(alone):
        module.forward = oracle(window_size)
    extra = {"positions": batch["positions"], "attention_masks": masks}
    expected = losses_of(alone, batch["inputs"], batch["labels"], extra).mean()
    expected.backward()

    def one(member: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        cp, model = cp_fast.ContextParallel(member, comm, layout=layout), copy.deepcopy(whole)
        ours.apply_cp_to_forward(attentions(model), cp)
        local = ours.prepare_context_parallel_input(batch["inputs"], batch["labels"], extra, cp)
        losses = losses_of(model, *local)
        loss = token_mean(losses, torch.ones_like(losses, dtype=torch.bool), over=cp)
        loss.backward()
        return loss.detach(), [weight.grad for weight in model.parameters()]

    parts = SimGroup(2).run(one)
    torch.testing.assert_close(sum(loss for loss, _ in parts), expected.detach(), rtol=1e-6, atol=1e-6)
    for n, weight in enumerate(alone.parameters()):
        torch.testing.assert_close(sum(grads[n] for _, grads in parts), weight.grad, rtol=1e-4, atol=1e-6)


def over_gloo(comm: str) -> list[int]:
    """Which gradients of a model over ranks are not those of one process; its layers have different windows."""
    whole, batch = model_of(), documents(5, 19, 11, 13)
    attentions(whole)[1].window_size = (4, 0)
    masks = attention.create_varlen_metadata_for_document(batch["positions"])
    extra, model = {"positions": batch["positions"], "attention_masks": masks}, copy.deepcopy(whole)
    for module in attentions(whole):
        module.forward = oracle(module.window_size)
    losses_of(whole, batch["inputs"], batch["labels"], extra).mean().backward()
    cp: Any = cp_fast.ContextParallel(dist.group.WORLD, comm, layout="balanced")  # type: ignore[arg-type]
    ours.apply_cp_to_forward(attentions(model), cp)
    losses = losses_of(model, *ours.prepare_context_parallel_input(batch["inputs"], batch["labels"], extra, cp))
    token_mean(losses, torch.ones_like(losses, dtype=torch.bool), over=cp).backward()
    wrong = []
    for n, (mine, want) in enumerate(zip(model.parameters(), whole.parameters(), strict=True)):
        dist.all_reduce(mine.grad)
        if not torch.allclose(mine.grad, want.grad, rtol=1e-4, atol=1e-6):
            wrong.append(n)
    return wrong


@pytest.mark.parametrize("comm", ["p2p", "all_gather"])
def test_balanced_documents_over_processes(four: Processes, comm: str) -> None:
    assert four.run(over_gloo, comm) == [[]] * 4


WRONG: dict[str, tuple[Callable[[Any, dict[str, Any]], tuple[Any, ...]], str]] = {
    "labels one short": (lambda x, extra: (x, x[:, 1:], extra), "labels has shape"),
    "no positions": (lambda x, extra: (x, x, {"attention_masks": extra["attention_masks"]}), "has no 'positions'"),
    "masks of other attention": (lambda x, extra: (x, x, extra | {"attention_masks": None}), "attention_masks is None"),
    "rows that do not divide": (
        lambda x, extra: (x[:, :7], x[:, :7], extra | {"positions": extra["positions"][:, :7]}),
        "attention_masks has documents of 16 tokens, and inputs has 7",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_batch_on_one_rank_raises_on_all(which: str) -> None:
    spoiled, says = WRONG[which]
    cu, x = torch.tensor([0, 5, 16], dtype=torch.int32), torch.zeros(1, 16, dtype=torch.int64)
    extra = {"positions": x, "attention_masks": attention.VarlenMetadata(cu, cu, 11, 11)}

    def one(member: Any) -> str:
        cp = cp_fast.ContextParallel(member)
        given: Any = spoiled(x, extra) if member.rank else (x, x, extra)
        with pytest.raises((ValueError, TypeError), match=says) as caught:
            ours.prepare_context_parallel_input(given[0], given[1], given[2], cp)
        return str(caught.value)

    assert SimGroup(2).run(one)[0].startswith("rank 1 refused its arguments")


def test_what_one_rank_of_a_layer_refuses_raises_on_all() -> None:
    q, cu = torch.zeros(1, 8, 2, 8), torch.tensor([0, 16], dtype=torch.int32)
    masks = attention.VarlenMetadata(cu, cu, 16, 16)

    def one(member: Any) -> str:
        odd = {"score_mod": len} if member.rank else {}
        call: Any = ours.attention_forward
        with pytest.raises((ValueError, NotImplementedError), match="score_mod is") as caught:
            call(q, q, q, attention_masks=masks, cp=cp_fast.ContextParallel(member), window_size=(-1, 0), **odd)
        return str(caught.value)

    assert SimGroup(2).run(one)[0].startswith("rank 1 refused its arguments")


def test_lse_goes_to_the_transform() -> None:
    q = torch.randn(1, 16, 2, 8, dtype=torch.float64)
    masks = attention.VarlenMetadata(*[torch.tensor([0, 6, 16], dtype=torch.int32)] * 2, 10, 10)
    how: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": masks.cu_seq_q}
    out, lse, _ = dense_attention(q[0], q[0], q[0], **how)

    def one(member: Any) -> torch.Tensor:
        cp = cp_fast.ContextParallel(member, layout="contiguous")
        x = q[:, 8 * member.rank : 8 * member.rank + 8]
        given: dict[str, Any] = {"attention_masks": masks, "out_transform": lambda o, s: o * s[..., None].sigmoid()}
        return ours.attention_forward(x, x, x, cp=cp, window_size=(-1, 0), **given)

    torch.testing.assert_close(torch.cat(SimGroup(2).run(one), dim=1)[0], out * lse.t()[..., None].sigmoid())


def test_what_cannot_be_honoured_is_named() -> None:
    q = torch.zeros(1, 16, 2, 8)
    cu = torch.tensor([0, 16], dtype=torch.int32)
    masks = attention.VarlenMetadata(cu, cu, 16, 16)

    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member, layout="contiguous")
        how: dict[str, Any] = {"cp": cp, "window_size": (-1, 0)}
        with pytest.raises(ValueError, match="q has 2 rows"):
            ours.attention_forward(*[q.view(2, 8, 2, 8)] * 3, attention_masks=masks, **how)  # type: ignore[misc]
        with pytest.raises(ValueError, match="enable_gqa"):
            ours.attention_forward(q, q[:, :, :1], q[:, :, :1], attention_masks=masks, **how)
        with pytest.raises(ValueError, match="max_q is 8, but a sequence has 16 tokens"):
            ours.attention_forward(q, q, q, attention_masks=masks._replace(max_q=8), **how)
        other = torch.tensor([0, 8], dtype=torch.int32)
        with pytest.raises(ValueError, match="other lengths for keys"):
            ours.attention_forward(q, q, q, attention_masks=masks._replace(cu_seq_k=other), **how)
        with pytest.raises(NotImplementedError, match="score_mod is"):
            ours.attention_forward(q, q, q, attention_masks=masks, score_mod=len, **how)
        with pytest.raises(TypeError, match="attention_masks is of type dict; it must be torchtitan's VarlenMetadata"):
            ours.attention_forward(q, q, q, attention_masks={}, **how)
        with pytest.raises(TypeError, match="has a Linear"):
            ours.apply_cp_to_forward([torch.nn.Linear(1, 1)], cp)

    SimGroup(1).run(one)


def switched_on() -> tuple[int, bool]:
    """The lines of docs/how_to/megatron.md, and what torchtitan calls with a degree of 2 (without its Trainer)."""
    import re
    from pathlib import Path
    from textwrap import dedent
    from types import SimpleNamespace

    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.config import ParallelismConfig
    from torchtitan.models.llama3 import _debugmodel, parallelize

    page = (Path(__file__).parents[3] / "docs" / "how_to" / "megatron.md").read_text()
    [lines] = re.findall(r"^    import copy, dataclasses.*?(?=^\S)", page, re.DOTALL | re.MULTILINE)
    trainer = importlib.import_module("torchtitan.trainer")
    exec(dedent(lines), {"cp_fast": cp_fast, "cp_torchtitan": ours})
    config = _debugmodel("varlen")
    for backend in ("spmd_types", "full_dtensor"):  # the first is the default
        parallelism = ParallelismConfig(context_parallel_degree=2, spmd_backend=backend)
        with pytest.raises(ValueError, match=f"spmd_backend is '{backend}'.* needs spmd_backend='partial_dtensor'"):
            config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    parallelism = ParallelismConfig(context_parallel_degree=2, spmd_backend="partial_dtensor")
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    model, mesh, batch = model_of(), init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)), documents(5, 19, 11, 13)
    parallelize.apply_cp_to_forward(attentions(model), mesh)
    masks = attention.create_varlen_metadata_for_document(batch["positions"])
    extra = {"positions": batch["positions"], "attention_masks": masks}
    given = batch["inputs"], batch["labels"], extra, mesh, torch.device("cpu"), "headtail", None
    losses = losses_of(model, *trainer.prepare_context_parallel_input(*given))
    return len(losses), bool(losses.isfinite().all())


def test_the_degree_of_its_configuration_can_switch_it_on(four: Processes) -> None:
    assert four.run(switched_on) == [(12, True)] * 4


def compiled(comm: str, layout: str, backend: str) -> list[str]:
    """What differs between blocks that are one graph each, as torchtitan compiles them, and the same blocks eager."""
    cp: Any = cp_fast.ContextParallel(dist.group.WORLD, comm, layout=layout)  # type: ignore[arg-type]
    eager, wrong, graphs = model_of(1), [], []
    attentions(eager)[0].window_size = (9, 0)
    model = copy.deepcopy(eager)
    for one in (eager, model):
        ours.apply_cp_to_forward(attentions(one), cp)

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    for block in model.layers.values():
        block.compile(backend=counted, fullgraph=True)
    for lengths in ((5, 19, 11, 13), (1, 23, 3, 3, 18)):
        batch = documents(*lengths)
        masks = attention.create_varlen_metadata_for_document(batch["positions"])
        extra = {"positions": batch["positions"], "attention_masks": masks}
        given = batch["inputs"], batch["labels"], extra, cp
        losses = [losses_of(one, *ours.prepare_context_parallel_input(*given)) for one in (eager, model)]
        for each in losses:
            each.mean().backward()
        if not torch.allclose(*losses, rtol=1e-5, atol=1e-5):
            wrong.append(f"losses of {lengths}")
        wrong += [
            f"{name} of {lengths}"
            for (name, x), y in zip(eager.named_parameters(), model.parameters(), strict=True)
            if not torch.allclose(x.grad, y.grad, rtol=1e-4, atol=1e-6)
        ]
        made = len(cp.agreements.fingerprints)
        with torch.no_grad():
            losses_of(model, *ours.prepare_context_parallel_input(*given))
        wrong += [f"plans of {lengths}"] if len(cp.agreements.fingerprints) > made + 2 else []
    before, batch = len(graphs), documents(7, 17, 10, 14)
    masks = attention.create_varlen_metadata_for_document(batch["positions"])
    extra = {"positions": batch["positions"], "attention_masks": masks}
    with torch.no_grad():
        losses_of(model, *ours.prepare_context_parallel_input(batch["inputs"], batch["labels"], extra, cp))
    return wrong + [f"{before} graphs, then {len(graphs)}"] * (len(graphs) > before)


@pytest.mark.thorough
def test_a_compiled_block_is_one_graph(two: Processes) -> None:
    assert two.run(compiled, "p2p", "balanced", "aot_eager") == [[], []]


def compiled_by_choice(layout: str, backend: str) -> list[str]:
    """The same where eager blocks choose a2a, which a graph cannot."""

    def heads(problem: Problem, names: Any) -> Problem:
        return choose_schedule(problem, names if problem.heads_q % 2 else ("a2a",))

    with patch.object(plan_arguments, "choose_schedule", heads):
        return compiled("auto", layout, backend)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["dual_chunk", "balanced"])
def test_a_compiled_block_chooses_what_fits_in_a_graph(two: Processes, layout: str) -> None:
    assert two.run(compiled_by_choice, layout, "eager") == [[], []]


def microbatches(backend: str) -> list[bool]:
    """Whether each gradient of 20 batches that go forward, and then backward, is the eager one's."""
    cp = cp_fast.ContextParallel(dist.group.WORLD)
    weight = torch.ones(8, requires_grad=True)

    def call(x: torch.Tensor, masks: Any) -> torch.Tensor:
        h = x * weight
        return ours.attention_forward(h, h, h, attention_masks=masks, cp=cp, window_size=(-1, 0))

    grads: list[list[torch.Tensor]] = []
    torch._dynamo.reset()
    for one in (call, torch.compile(call, fullgraph=True, backend=backend)):
        losses = []
        for n in range(1, MICROBATCHES + 1):
            cu = torch.tensor([0, n, 24], dtype=torch.int32)
            generator = torch.Generator().manual_seed(dist.get_rank() + 2 * n)
            x = torch.randn(1, 12, 2, 8, generator=generator)
            losses.append(one(x, attention.VarlenMetadata(cu, cu, 24, 24)).square().sum())
        gc.collect()
        grads.append([torch.autograd.grad(loss, weight)[0] for loss in losses])
    return [torch.allclose(*both) for both in zip(*grads, strict=True)]


MICROBATCHES = 20  # More than `Agreements` keeps.


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_forward_pass_may_come_before_the_first_backward_pass(two: Processes, backend: str) -> None:
    assert MICROBATCHES > Agreements.SIZE
    assert two.run(microbatches, backend) == [[True] * MICROBATCHES] * 2


def compiled_wrongly() -> list[str]:
    """What is said of an a2a in one graph, and of a call that one rank alone has wrong."""
    q = torch.zeros(1, 8, 2, 8)
    cu = torch.tensor([0, 16], dtype=torch.int32)
    masks, said = attention.VarlenMetadata(cu, cu, 16, 16), []
    a2a, p2p = (cp_fast.ContextParallel(dist.group.WORLD, comm) for comm in ("a2a", "p2p"))  # type: ignore[arg-type]

    def call(x: torch.Tensor, k: torch.Tensor, cp: Any) -> torch.Tensor:
        return 2 * ours.attention_forward(x, k, k, attention_masks=masks, cp=cp, window_size=(-1, 0))

    for cp, k in ((a2a, q), (p2p, q[:, :, :1] if dist.get_rank() else q)):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r".") as caught:
            torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, cp)
        said.append(str(caught.value))
    torch._dynamo.reset()
    in_two = torch.compile(call, backend="aot_eager")(q, q, a2a)
    assert torch.equal(in_two, call(q, q, a2a))
    return said


def test_what_no_graph_has_is_named(two: Processes) -> None:
    for of_a2a, of_heads in two.run(compiled_wrongly):
        assert "Take one of the two, or leave compile off" in of_a2a
        assert "q has 2 heads and k 1; that needs enable_gqa=True" in of_heads


# ---- activation checkpointing: torchtitan's own policies, and one that names attention, which then runs once


LAYERS, RANKS = 2, 2


class Saving(titan.SelectiveAC):
    """torchtitan's policy, which saves attention's results too."""

    def get_save_ops(self) -> set[Any]:
        return {*super().get_save_ops(), attention_forward}


def wrapped(model: Any) -> None:
    """PyTorch's `checkpoint_wrapper` with `save_attention`, for which no policy of torchtitan is needed."""
    for name, layer in model.layers.named_children():
        model.layers.register_module(name, titan.ptd_checkpoint_wrapper(layer, context_fn=save_attention()))


WAYS: dict[str, tuple[Any, int]] = {  # and how often attention runs forward in a layer
    "none": (lambda model: None, 1),
    "full": (titan.FullAC(titan.FullAC.Config()).apply, 2),
    "selective": (titan.SelectiveAC(titan.SelectiveAC.Config()).apply, 2),
    "named": (Saving(titan.SelectiveAC.Config()).apply, 1),
    "wrapped": (wrapped, 1),
}


def step(way: str, monkeypatch: pytest.MonkeyPatch) -> tuple[float, list[list[torch.Tensor]]]:
    """Forward passes of attention in a layer and rank, and the gradients of each rank."""
    forwards: list[int] = []
    inner = api.forward_pass

    def counted(*given: Any, **how: Any) -> Any:
        forwards.append(1)
        return inner(*given, **how)

    batch = documents(5, 19, 11, 13)
    masks = attention.create_varlen_metadata_for_document(batch["positions"])
    extra = {"positions": batch["positions"], "attention_masks": masks}

    def one(member: Any) -> list[torch.Tensor]:
        cp, model = cp_fast.ContextParallel(member, layout="balanced"), model_of(LAYERS)
        ours.apply_cp_to_forward(attentions(model), cp)
        WAYS[way][0](model)
        losses_of(
            model, *ours.prepare_context_parallel_input(batch["inputs"], batch["labels"], extra, cp)
        ).sum().backward()
        return [weight.grad for weight in model.parameters()]

    with monkeypatch.context() as patch:
        patch.setattr(api, "forward_pass", counted)
        grads = SimGroup(RANKS).run(one)
    return len(forwards) / LAYERS / RANKS, grads


def test_policies_have_the_same_bits_and_one_that_names_attention_runs_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = step("none", monkeypatch)
    for way, (_, times) in WAYS.items():
        found, grads = step(way, monkeypatch)
        assert found == times, way
        for mine, theirs in zip(grads, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), way
