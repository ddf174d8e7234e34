"""Auxiliary losses of routers over ranks: the loss and all gradients are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.integrations import transformers as ours
from cp_ref import SimGroup
from tests.integrations.hugging_face.families import tiny

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

LENGTHS = [13, 3, 8]


def batches() -> dict[str, dict[str, torch.Tensor]]:
    """The same documents as rows with padding, and packed."""
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(3, 50, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 4] = labels[:, 0] = -100
    packed = {n: x[mask == 1][None] for n, x in (("input_ids", ids), ("labels", labels))}
    packed["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"padded": {"input_ids": ids, "labels": labels, "attention_mask": mask}, "packed": packed}


def model_of(name: str, **more: Any) -> Any:
    model = tiny(name, router_aux_loss_coef=0.5, output_router_logits=True, **more)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


def grads_of(model: Any) -> dict[str, torch.Tensor]:
    return {n: w.grad for n, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    [
        ("MixtralForCausalLM", 2, "balanced"),
        ("MixtralForCausalLM", 3, "dual_chunk"),
        ("Qwen3MoeForCausalLM", 3, "dual_chunk"),
        ("GptOssForCausalLM", 2, "contiguous"),
    ],
)
@pytest.mark.one_in(2)
def test_the_loss_is_that_of_one_process(name: str, size: int, layout: Any) -> None:
    whole = model_of(name)
    alone = copy.deepcopy(whole)
    expected = alone(**batches()["padded"])
    expected.loss.backward()

    def one(member: Any, kind: str) -> Any:
        context = cp_fast.ContextParallel(member, layout=layout)
        model = ours.prepare(copy.deepcopy(whole), context)
        part = ours.shard_batch(batches()[kind], cp=context, model=model)
        out = model(**part)
        out.loss.backward()
        plain = model(**part, output_router_logits=False)
        assert plain.aux_loss is None
        torch.testing.assert_close(out.loss - plain.loss, 0.5 * out.aux_loss)
        unlabelled = {n: x for n, x in part.items() if n not in ("labels", "shift_labels", "num_items_in_batch")}
        torch.testing.assert_close(model(**unlabelled).aux_loss, out.aux_loss)
        model.router_aux_loss_coef = 1.0  # which is looked up in each call
        torch.testing.assert_close(model(**part).loss - plain.loss, out.aux_loss)
        assert len(out.router_logits[0]) == part["input_ids"].numel()
        return out.loss.detach(), out.aux_loss.detach(), grads_of(model)

    for kind in batches():
        parts = SimGroup(size).run(lambda member, kind=kind: one(member, kind))
        for found, there in zip(zip(*parts, strict=True), (expected.loss, expected.aux_loss), strict=False):
            torch.testing.assert_close(sum(found), there.detach(), rtol=1e-5, atol=1e-5)
        for n, grad in grads_of(alone).items():
            torch.testing.assert_close(sum(grads[n] for *_, grads in parts), grad, rtol=1e-4, atol=1e-5)


def test_contexts_that_share_a_step_have_the_mean_of_their_losses() -> None:
    """As data parallel ranks of transformers have it; the parts of all ranks add up to it."""
    whole, rows = model_of("MixtralForCausalLM"), {"input_ids": torch.arange(3, 43).view(2, 20)}
    with torch.no_grad():
        expected = whole(**rows).aux_loss / 3

    def one(member: Any) -> torch.Tensor:
        context = cp_fast.ContextParallel(member)
        model = ours.prepare(copy.deepcopy(whole), context)
        part = ours.shard_batch(rows, cp=context, model=model, over=context)
        assert part["cp_batch"].contexts == 1
        part["cp_batch"].contexts = 3
        return model(**part).aux_loss.detach()

    torch.testing.assert_close(sum(SimGroup(2).run(one)), expected)


def test_other_losses_of_routers_are_named(monkeypatch: Any) -> None:
    switch, batch = {"output_router_logits": True}, {"input_ids": torch.ones(2, 12, dtype=torch.long)}

    def refusal(model: Any) -> tuple[str, str]:
        def one(member: Any) -> tuple[str, str]:
            context = cp_fast.ContextParallel(member)
            model.config.output_router_logits = True
            with pytest.raises(NotImplementedError, match=r"is True in model\.config, which") as at_once:
                ours.prepare(model, context)
            model.config.output_router_logits = False
            part = ours.shard_batch(batch, cp=context, model=ours.prepare(model, context))
            model(**part)
            with pytest.raises(NotImplementedError, match=r"is True in the call, .* Set it to False") as later:
                model(**part, **switch)
            return str(at_once.value), str(later.value)

        return SimGroup(1).run(one)[0]

    for said in refusal(tiny("LlamaForCausalLM")):
        assert "returns no aux_loss" in said
    for said in refusal(tiny("MixtralModel")):
        assert "it has no loss of labels" in said
    mixtral = tiny("MixtralForCausalLM")
    theirs = transformers.models.mixtral.modeling_mixtral
    real = theirs.load_balancing_loss_func
    monkeypatch.setattr(
        theirs, "load_balancing_loss_func", lambda gates, n, k, mask=None: 1.01 * real(gates, n, k, mask)
    )
    assert "another loss than transformers' load balancing loss" in refusal(mixtral)[1]
    monkeypatch.setattr(theirs, "load_balancing_loss_func", lambda gates, n, k, mask=None: real(gates, n, k))
    assert "another loss than transformers' load balancing loss" in refusal(mixtral)[1]


def test_outputs_need_names_and_the_model_inside_has_no_loss() -> None:
    def one(member: Any) -> None:
        context = cp_fast.ContextParallel(member)
        model = ours.prepare(model_of("OlmoeForCausalLM"), context)
        part = ours.shard_batch({"input_ids": torch.ones(2, 12, dtype=torch.long)}, cp=context, model=model)
        with pytest.raises(NotImplementedError, match="call it without return_dict=False"):
            model(**part, return_dict=False)
        with pytest.raises(NotImplementedError, match="it has no loss of labels"):
            model.model(**part)

    SimGroup(1).run(one)
