"""Rotary embeddings whose frequencies depend on the longest position of a batch, which a rank's slice may lack."""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.integrations import transformers as ours
from cp_ref import SimGroup
from tests.integrations.hugging_face.families import tiny

pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

ORIGINAL = 16  # positions that the frequencies are made for
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": ORIGINAL}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("LlamaForCausalLM", {"rope_type": "dynamic", "factor": 2.0}),
    "longrope": ("Phi3ForCausalLM", {"rope_type": "longrope", **LONG}),
    "longrope of Phi-3.5-MoE": (
        "PhimoeForCausalLM",
        {"rope_type": "longrope", **LONG, "short_mscale": 1.1, "long_mscale": 1.3},
    ),
}


def model_of(name: str) -> Any:
    family, parameters = MODELS[name]
    sizes = {"max_position_embeddings": ORIGINAL, "original_max_position_embeddings": ORIGINAL}
    return tiny(family, rope_parameters={"rope_theta": 100.0, **parameters}, **sizes)


def batches() -> list[dict[str, torch.Tensor]]:
    """Rows one token longer than the original length, shorter ones, and packed documents of both kinds."""
    ids = torch.randint(3, 50, (2, ORIGINAL + 1), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(n) for n in (ORIGINAL + 4, 3, 11)])[None]
    documents = ids.flatten().repeat(2)[: positions.shape[1]][None]
    learnt = documents.masked_fill(positions == 0, -100)
    packed = {"input_ids": documents, "labels": learnt, "position_ids": positions}
    return [{"input_ids": ids, "labels": ids}, {"input_ids": ids[:, 1:], "labels": ids[:, 1:]}, packed]


def step(model: Any, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the gradient of the first weight that the frequencies reach."""
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    found = next(weight for name, weight in model.named_parameters() if "attn" in name)
    return loss.detach(), found.grad


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous", "balanced"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(2)
def test_frequencies_are_those_of_the_longest_sequence(name: str, layout: Any) -> None:
    def one(member: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        cp = cp_fast.ContextParallel(member, layout=layout)
        model = ours.prepare(model_of(name), cp)
        return [step(model, ours.shard_batch(batch, cp=cp, model=model)) for batch in batches()]

    alone = model_of(name)
    alone.set_attn_implementation("sdpa")  # which sees documents by their positions
    parts = SimGroup(2).run(one)
    for batch, mine, other in zip(batches(), *parts, strict=True):
        expected = step(alone, batch | {"use_cache": False})
        for x, y, want in zip(mine, other, expected, strict=True):
            torch.testing.assert_close(x + y, want, rtol=1e-3, atol=1e-5)


def test_whole_sequences_have_their_own_longest_position() -> None:
    """After slices, and in a copy of the model."""

    def one(member: Any) -> None:
        model = ours.prepare(model_of("longrope"), cp_fast.ContextParallel(member))
        long, short, _ = batches()
        model(**ours.shard_batch(long, cp=cp_fast.ContextParallel(member)))
        expected = model_of("longrope")(**short).logits
        for kept in (model, copy.deepcopy(model)):
            kept.set_attn_implementation("sdpa")
            torch.testing.assert_close(kept(**short).logits, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(kept.lm_head(kept.model(short["input_ids"])[0]), expected, rtol=1e-4, atol=1e-4)

    SimGroup(1).run(one)
