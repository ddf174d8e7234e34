"""Hybrid models of transformers, with linear layers and convolutions: over ranks as in one process."""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cp_fast
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.loss import loss_for_backward
from cp_ref import SimGroup
from cp_ref.schedules.words import LAYOUTS
from tests.dist.workers import Processes
from tests.integrations.hugging_face import hybrid_processes
from tests.integrations.hugging_face.documents_apart import (
    Part,
    alone,
    batches,
    check,
    grads_of,
    part_of,
    parts_of,
    step_of,
)
from tests.integrations.hugging_face.hybrids import HYBRIDS, REFUSED_HYBRIDS, tiny_hybrid
from tests.meta.step.step_processes import StepProcesses

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

NEXT = "Qwen3NextForCausalLM"
QUICK = (NEXT, "KimiLinearForCausalLM", "BambaForCausalLM", "Lfm2ForCausalLM")


def test_transformers_alone_lets_packed_documents_leak() -> None:
    """As docs/how_to/hybrid.md says: a state goes on into the next document, so `alone` plays each one by itself."""
    batch, model = batches()["packed"], tiny_hybrid(NEXT)
    _, expected, _ = alone(model, batch)
    with torch.no_grad():
        leaked = model(**batch, use_cache=False).loss
    assert abs(leaked - expected) > 1e-4

    def one(member: Any) -> torch.Tensor:
        cp = cp_fast.ContextParallel(member)
        return ours.prepare(tiny_hybrid(NEXT), cp)(**ours.shard_batch(batch, cp=cp)).loss.detach()

    torch.testing.assert_close(torch.stack(SimGroup(2).run(one)).sum(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.thorough) for n in HYBRIDS])
def test_a_hybrid_is_the_same_over_ranks(name: str) -> None:
    check_all(name, SimGroup(2).run(lambda member: parts_of(tiny_hybrid(name), cp_fast.ContextParallel(member))))


def check_all(name: str, parts: list[dict[str, Part]]) -> None:
    """The ranks' parts of each batch."""
    whole = tiny_hybrid(name)
    for kind in batches():
        check(whole, kind, [part[kind] for part in parts])


@pytest.mark.parametrize(
    ("comm", "layout", "size"),
    [
        ("p2p", "dual_chunk", 4),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("all_gather", "contiguous", 4),
                ("p2p", "balanced", 2),
                ("a2a", "balanced", 4),
                ("a2a+p2p", "dual_chunk", 4),
            )
        ),
    ],
)
def test_layouts_and_schedules(comm: Any, layout: Any, size: int) -> None:
    def one(member: Any) -> dict[str, Part]:
        group = member.split(2) if comm == "a2a+p2p" else member
        return parts_of(tiny_hybrid(NEXT), cp_fast.ContextParallel(group, comm, layout=layout))

    check_all(NEXT, SimGroup(size).run(one))


def over_gloo(names: list[str], kind: str) -> dict[str, Part]:
    """A rank's parts of several models."""
    return {name: part_of(tiny_hybrid(name), kind, cp_fast.ContextParallel(dist.group.WORLD)) for name in names}


@pytest.mark.thorough
def test_hybrids_over_gloo(four: Processes) -> None:
    """One of each kind of layer."""
    names = [*QUICK, "MambaForCausalLM", "MiniMaxForCausalLM"]
    found = four.run(over_gloo, names, "packed")
    for name in names:
        check(tiny_hybrid(name), "packed", [part[name] for part in found])


@pytest.mark.thorough
def test_errors_in_bfloat16_are_those_of_one_process() -> None:
    found = hybrid_processes.play(2, "cpu")
    assert {layout: one["wrong"] for layout, one in found.items()} == {layout: [] for layout in LAYOUTS}


def wrapped(name: str, kind: str) -> Part:
    """This rank's part in a wrapper."""
    cp = cp_fast.ContextParallel(dist.group.WORLD)
    model: Any = ours.prepare(tiny_hybrid(name), cp)
    outer: Any = model
    if kind == "DDP":
        outer = DistributedDataParallel(model)
    elif kind.startswith("FSDP"):  # with a policy it looks into a module's arguments, to cast them
        cast = MixedPrecisionPolicy(param_dtype=torch.float32)
        policy: dict[str, Any] = {"mp_policy": cast} if kind == "FSDP, cast" else {}
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)), **policy)
    elif kind == "checkpointing":
        model.gradient_checkpointing_enable()
    else:
        outer = torch.compile(model, backend="aot_eager")
    out = outer(**ours.shard_batch(batches()["packed"], cp=cp, model=outer))
    loss_for_backward(out.loss, averaged_over=outer if kind.startswith(("DDP", "FSDP")) else None).backward()
    size = 2 if kind.startswith(("DDP", "FSDP")) else 1
    grads = {n: (g.full_tensor() if isinstance(g, DTensor) else g) / size for n, g in grads_of(model).items()}
    numbers = part_of(tiny_hybrid(name), "packed", cp)[1]
    return out.logits.detach().flatten(0, 1), numbers, out.loss.detach(), grads


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((NEXT, kind) for kind in ("DDP", "FSDP", "FSDP, cast", "checkpointing", "compile")),
        ("BambaForCausalLM", "checkpointing"),
    ],
)
def test_wrappers(two: Processes, name: str, kind: str) -> None:
    check(tiny_hybrid(name), "packed", two.run(wrapped, name, kind))


def of_one() -> Any:
    """A context of one rank."""
    return SimGroup(1).run(cp_fast.ContextParallel)[0]


@pytest.mark.parametrize("name", REFUSED_HYBRIDS)
@pytest.mark.one_in(3)
def test_other_hybrids_are_refused_by_name(name: str) -> None:
    model = tiny_hybrid(name)
    with pytest.raises(NotImplementedError, match=REFUSED_HYBRIDS[name][1]):
        ours.prepare(model, of_one())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_no_hybrid_of_transformers_is_left_out() -> None:
    """Each file of the installed version that convolves or scans is of a class in one of the two tables."""
    folder = Path(transformers.__file__).parent / "models"
    words = re.compile(
        r"\bdef (causal_conv1d_fn|\w*selective_scan|\w*delta_rule|mamba2_chunk_scan)\b|LightningAttention"
    )
    files = {path.parent.name for path in folder.glob("*/modeling_*.py") if words.search(path.read_text())}
    looked_at = {getattr(transformers, name).__module__.split(".")[-2] for name in (*HYBRIDS, *REFUSED_HYBRIDS)}
    assert files <= looked_at


def test_nothing_else_in_the_process_changes() -> None:
    """The class, its file and another model keep their functions; without a batch of slices so does the model."""
    kind = type(tiny_hybrid(NEXT).model.layers[0].linear_attn)
    module = __import__(kind.__module__, fromlist=["x"])
    before = kind.forward, module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule
    model = tiny_hybrid(NEXT).eval()
    ids = batches()["one"]["input_ids"]
    expected = model(input_ids=ids).logits
    cp = of_one()
    ours.prepare(ours.prepare(model, cp), cp)  # twice is once
    part = ours.shard_batch({"input_ids": ids}, cp=cp)
    torch.testing.assert_close(model(**part).logits, expected, rtol=1e-4, atol=1e-4)
    assert before == (kind.forward, module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule)
    with pytest.raises(TypeError, match="is given cp_batch=None"):
        model(input_ids=ids)
    model.set_attn_implementation("eager")
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert torch.equal(model.generate(ids, max_new_tokens=2, do_sample=False)[:, :32], ids)
    model.set_attn_implementation(ours.NAME)
    copied = copy.deepcopy(model)
    for weight in copied.parameters():
        torch.nn.init.zeros_(weight)
    torch.testing.assert_close(model(**part).logits, expected, rtol=1e-4, atol=1e-4)


def test_arguments_that_cannot_be_honoured() -> None:
    cp = of_one()
    model = ours.prepare(tiny_hybrid(NEXT), cp)
    part = ours.shard_batch(batches()["one"], cp=cp)
    with pytest.raises(NotImplementedError, match=r"cache(_params)? is given to Qwen3NextGatedDeltaNet; .*use_cache"):
        model(**part, use_cache=True)
    with pytest.raises(NotImplementedError, match="seq_idx is a tensor"):
        model(**part, seq_idx=torch.zeros(1, 32, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="attention_mask"):
        model(**part, attention_mask=torch.ones(1, 32).tril())
    model = tiny_hybrid(NEXT)
    mixer: Any = model.model.layers[0].linear_attn
    mixer.forward = mixer.forward
    with pytest.raises(NotImplementedError, match=r"linear_attn \(Qwen3NextGatedDeltaNet\) has a forward of its own"):
        ours.prepare(model, cp)
    model = tiny_hybrid(NEXT)
    model.model.layers[0].linear_attn.activation = "gelu"
    with pytest.raises(NotImplementedError, match="activation is 'gelu'"):
        ours.prepare(model, cp)


def build(cp: Any, leaks: bool = False) -> Any:
    """Qwen3-Next, for `compare_step`."""
    return step_of(tiny_hybrid(NEXT), cp, leaks)


def test_a_convolution_that_adapters_copy() -> None:
    """PEFT's modules_to_save: right after `prepare`; before it the error says so."""
    peft: Any = pytest.importorskip("peft", reason="needs peft: pip install '.[test-integrations]'")
    how = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["conv1d"])
    batch = batches()["packed"]

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        model = peft.get_peft_model(model, how)
        for name, weight in model.named_parameters():
            if "modules_to_save" in name:
                torch.nn.init.normal_(weight, std=0.3)
        return model

    _, expected, grads = alone(adapted(tiny_hybrid(NEXT)), batch)
    with pytest.raises(NotImplementedError, match=r"modules_to_save copies it: call prepare before"):
        ours.prepare(adapted(tiny_hybrid(NEXT)), SimGroup(1).run(cp_fast.ContextParallel)[0])

    def one(member: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        context = cp_fast.ContextParallel(member)
        model = adapted(ours.prepare(tiny_hybrid(NEXT), context))
        loss = model(**ours.shard_batch(batch, cp=context, model=model)).loss
        loss.backward()
        return loss.detach(), grads_of(model)

    found = SimGroup(2).run(one)
    torch.testing.assert_close(sum(loss for loss, _ in found), expected, rtol=1e-4, atol=1e-5)
    assert any("conv1d" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(sum(mine[name] for _, mine in found), grad, rtol=1e-3, atol=1e-5)


@pytest.mark.thorough
def test_a_hybrid_s_step_is_right(steps: StepProcesses) -> None:
    report = steps.compare(build, batches()["packed"], 4, layout="balanced")
    assert report.right, report


@pytest.mark.thorough
def test_a_hybrid_s_one_process_that_leaks_is_named(steps: StepProcesses) -> None:
    report = steps.compare(partial(build, leaks=True), batches()["packed"], 2)
    assert report.causes == ("leak",), report
    assert "model.layers.0.linear_attn" in report.first, report
    assert "by causal_conv1d" in report.findings[0].text, report
