"""DeepSeek-V4, whose attention reads compressed keys: over ranks as in one process, document by document."""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cp_fast
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.hugging_face import compressed_keys
from cp_ref import SimGroup
from cp_ref.schedules.words import Unsupported
from tests.dist.workers import Processes
from tests.integrations.hugging_face.compressed_model import with_compressed_keys as tiny
from tests.integrations.hugging_face.documents_apart import (
    KINDS,
    Part,
    alone,
    batches,
    check,
    grads_of,
    part_of,
    parts_of,
    step_of,
)
from tests.meta.step.step_processes import StepProcesses

pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")


@pytest.mark.parametrize(
    ("kinds", "size", "comm", "layout"),
    [
        (("packed",), 2, "all_gather", "dual_chunk"),
        *(
            pytest.param(KINDS, *case, marks=pytest.mark.thorough)
            for case in ((1, "all_gather", "dual_chunk"), (3, "all_gather", "contiguous"), (4, "a2a", "balanced"))
        ),
    ],
)
def test_a_model_is_the_same_over_ranks(kinds: tuple[str, ...], size: int, comm: Any, layout: Any) -> None:
    """Logits, losses and all gradients, document by document. Hyper-connections and hash routers take slices."""

    def one(member: Any) -> dict[str, Part]:
        return parts_of(tiny(), cp_fast.ContextParallel(member, comm, layout=layout), kinds)

    found, whole = SimGroup(size).run(one), tiny()
    for kind in kinds:
        check(whole, kind, [part[kind] for part in found])


def over_gloo() -> Part:
    """One process."""
    return part_of(tiny(), "packed", cp_fast.ContextParallel(dist.group.WORLD, "all_gather"))


@pytest.mark.thorough
def test_processes(two: Processes) -> None:
    check(tiny(), "packed", two.run(over_gloo))


def test_transformers_alone_compresses_over_the_documents_of_a_packed_row() -> None:
    """So one process is right document by document alone."""
    batch = batches()["packed"]
    whole = tiny()(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
    by_document, _, _ = alone(tiny(), batch)
    first = int((batch["position_ids"][0] == 0).nonzero()[1])
    torch.testing.assert_close(whole[:first], by_document[:first], rtol=1e-4, atol=1e-4)
    assert (whole[first:] - by_document[first:]).abs().max() > 1e-2


def build(cp: Any, leaks: bool = False) -> Any:
    """The model, for `compare_step`."""
    model = tiny()
    for layer in model.model.layers:  # the rows of an expert have no order in which a step could compare them
        del layer.mlp.experts.act_fn
        layer.mlp.experts.act_fn = torch.nn.functional.silu
    return step_of(model, cp, leaks)


@pytest.mark.thorough
def test_a_step_is_right_and_one_process_that_leaks_is_named(steps: StepProcesses) -> None:
    report = steps.compare(build, batches()["packed"], 2, cp_comm_type="all_gather")
    assert report.right, report
    report = steps.compare(partial(build, leaks=True), batches()["packed"], 2, cp_comm_type="all_gather")
    assert report.causes == ("leak",), report
    assert "by compress_keys" in report.findings[0].text, report


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    def one(member: Any) -> list[list[torch.Tensor]]:
        cp = cp_fast.ContextParallel(member, "all_gather")
        found: list[list[torch.Tensor]] = []
        for saved in (False, True):
            model = ours.prepare(tiny(), cp)
            if saved:
                how = {"use_reentrant": reentrant}
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
                model.enable_input_require_grads()
            model(**ours.shard_batch(batches()["packed"], cp=cp, model=model)).loss.backward()
            found.append([w.grad for w in model.parameters() if w.grad is not None])
        return found

    for plain, again in SimGroup(2).run(one):
        assert len(plain) > 50
        torch.testing.assert_close(again, plain)


def test_adapters_of_linear_layers() -> None:
    """LoRA on what makes queries, keys and gates; gradients of the adapters are those of one process."""
    peft = pytest.importorskip("peft", reason="needs peft")
    parts = ["q_b_proj", "kv_proj", "gate_proj"]

    def adapted() -> Any:
        model = peft.get_peft_model(tiny(), peft.LoraConfig(r=2, target_modules=parts))
        torch.manual_seed(1)
        for where, weight in model.named_parameters():
            if "lora" in where:
                torch.nn.init.normal_(weight, std=0.2)
        return model.train()

    def step(cp: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = ours.prepare(adapted(), cp)
        loss = model(**ours.shard_batch(batches()["packed"], cp=cp, model=model.get_base_model())).loss
        loss.backward()
        return loss.detach(), grads_of(model)

    of_ranks = SimGroup(2).run(lambda member: step(cp_fast.ContextParallel(member, "all_gather")))
    ((loss, grads),) = SimGroup(1).run(lambda member: step(cp_fast.ContextParallel(member, "all_gather")))
    assert any("compressor" in name for name in grads)
    torch.testing.assert_close(torch.stack([x for x, _ in of_ranks]).sum(), loss, rtol=1e-5, atol=1e-5)
    for name, grad in grads.items():
        found = torch.stack([x[name] for _, x in of_ranks]).sum(0)
        assert float((found - grad).norm()) <= 1e-4 * float(grad.norm()) + 1e-6, name


def test_autocast() -> None:
    def one(member: Any) -> torch.Tensor:
        cp = cp_fast.ContextParallel(member, "all_gather")
        model = ours.prepare(tiny(), cp)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(**ours.shard_batch(batches()["packed"], cp=cp, model=model))
        out.loss.backward()
        assert all(bool(w.grad.isfinite().all()) for w in model.parameters() if w.grad is not None)
        return out.loss.detach()

    _, loss, _ = alone(tiny(), batches()["packed"])
    torch.testing.assert_close(torch.stack(SimGroup(2).run(one)).sum(), loss, rtol=5e-2, atol=5e-2)


def test_a_ring_is_refused_by_name() -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny(), cp)
        with pytest.raises(Unsupported, match=r"by cp_comm_type 'p2p'.*\n.*cp_comm_type='all_gather'"):
            model(**ours.shard_batch(batches()["packed"], cp=cp, model=model))

    SimGroup(2).run(one)


@pytest.mark.parametrize("where", ["_projected", "_index_queries"])
def test_a_compressor_of_another_kind_is_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of transformers may change it: the trial of `prepare` compares entries and choices."""
    theirs = getattr(compressed_keys, where)

    def other(*given: Any) -> tuple[Any, ...]:
        first, *rest = theirs(*given)
        return first.flip(-1), *rest

    monkeypatch.setattr(compressed_keys, where, other)
    model = tiny()

    def one(member: Any) -> None:
        with pytest.raises(NotImplementedError, match=r"self_attn.compressor .* makes or shows its keys in a way"):
            ours.prepare(model, cp_fast.ContextParallel(member, "all_gather"))

    SimGroup(1).run(one)
    assert "forward" not in model.model.layers[1].self_attn.__dict__
    assert model.config._attn_implementation == "eager"


def test_a_model_by_itself_and_a_copy_are_as_before() -> None:
    """A prepared model whose attention is switched back runs its own compressors; a copy has states of its own."""
    batch = {"input_ids": batches()["one"]["input_ids"], "use_cache": False}
    want = tiny()(**batch).logits

    def one(member: Any, *, copied: bool) -> torch.Tensor:
        model = ours.prepare(tiny(), cp_fast.ContextParallel(member, "all_gather"))
        model = copy.deepcopy(model) if copied else model
        model.set_attn_implementation("eager")
        return model(**batch).logits

    for copied in (False, True):
        assert torch.equal(SimGroup(1).run(partial(one, copied=copied))[0], want)
