"""Decoders that take no position_ids, as BART's: their tables of positions are given those of a slice."""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import cp_fast
from benchmarks.parts import sweep_cases
from benchmarks.parts.tiny_models import tiny_model
from cp_fast.integrations import transformers as ours
from cp_ref import SimGroup
from tests.integrations.hugging_face.families import batch_of
from tests.integrations.hugging_face.test_prepare import dist_of_one, grads_of

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

NAMES = "Bart Mvp Whisper TrOCR Blenderbot BlenderbotSmall MBart Marian PLBart Pegasus"
CLASSES = [f"{name}ForCausalLM" for name in NAMES.split()]
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "decoder_layerdrop": 0.0}
IDS = {"input_ids": batch_of("LlamaForCausalLM")["input_ids"]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if n > 2 else ()) for n, name in enumerate(CLASSES)]
)
def test_a_class_is_right_over_ranks(name: str) -> None:
    found = sweep_cases.play(name, "causal", ranks=3)
    assert found["verdict"] == "right", found
    assert found.get("refused in", {}) == {}


@pytest.mark.parametrize("name", ["BartForCausalLM", "MvpForCausalLM"])
def test_layers_that_are_computed_again(name: str) -> None:
    """Another call comes between a call and its backward pass."""
    whole = tiny_model(name, **NO_DROPOUT).train()

    def one(member: Any) -> dict[str, torch.Tensor]:
        cp = cp_fast.ContextParallel(member)
        model = copy.deepcopy(ours.prepare(ours.prepare(copy.deepcopy(whole), cp), cp)).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        logits = model(**ours.shard_batch(IDS, cp=cp, model=model)).logits
        model(**ours.shard_batch({"input_ids": torch.arange(3, 40)[None]}, cp=cp, model=model))
        logits.square().sum().backward()
        return grads_of(model)

    parts = SimGroup(2).run(one)
    whole(**IDS, use_cache=False).logits.square().sum().backward()
    grads = grads_of(whole)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for weight, grad in grads.items():  # that of a bias of keys is 0
        found = sum(part[weight] for part in parts)
        torch.testing.assert_close(
            found, grad, rtol=1e-3, atol=1e-5 * largest, msg=lambda said, w=weight: f"{w}: {said}"
        )


@pytest.mark.parametrize("name", ["BartForCausalLM", "WhisperForCausalLM", "TrOCRForCausalLM"])
def test_the_decoder_inside_and_the_model_alone(name: str) -> None:
    whole = tiny_model(name)

    def one(member: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cp = cp_fast.ContextParallel(member, layout="balanced")
        model = ours.prepare(copy.deepcopy(whole), cp)
        part = ours.shard_batch(IDS, cp=cp, model=model)
        inside = part["cp_batch"].unshard(model.model.decoder(**part)[0].detach())
        with pytest.raises(TypeError, match="is given no position_ids, and would number a slice's tokens"):
            model(input_ids=part["input_ids"], cp_batch=part["cp_batch"])
        model.set_attn_implementation("eager")
        return inside, model(**IDS).logits.detach()

    for inside, alone in SimGroup(2).run(one):
        torch.testing.assert_close(inside, whole.model.decoder(**IDS)[0].detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone, whole(**IDS).logits.detach())


def test_tables_without_positions_and_prompts_are_refused() -> None:
    cp = cp_fast.ContextParallel(dist_of_one())
    with pytest.raises(NotImplementedError, match="TrOCRForCausalLM takes no position_ids"):
        ours.prepare(tiny_model("TrOCRForCausalLM", use_learned_position_embeddings=False), cp)
    model = tiny_model("MvpForCausalLM")
    model.model.decoder = type(model.model.decoder)(model.config, use_prompt=True)
    with pytest.raises(NotImplementedError, match="attn_prompt is a tensor"):
        ours.prepare(model, cp)
