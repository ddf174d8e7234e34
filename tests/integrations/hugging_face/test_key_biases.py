"""Doge, which adds a bias to each key that the key's value makes."""

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

pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

NAME = "DogeForCausalLM"
IDS = {"input_ids": batch_of("LlamaForCausalLM")["input_ids"]}


@pytest.mark.parametrize(
    ("name", "task", "ranks"),
    [
        (NAME, "causal", 3),
        pytest.param(NAME, "causal", 2, marks=pytest.mark.thorough),
        pytest.param("DogeForSequenceClassification", "sequences", 3, marks=pytest.mark.thorough),
    ],
)
def test_a_class_is_right_over_ranks(name: str, task: str, ranks: int) -> None:
    found = sweep_cases.play(name, task, ranks=ranks)
    assert (found["verdict"], found.get("refused in", {})) == ("right", {}), found


def test_a_window_and_the_model_alone_again() -> None:
    whole = tiny_model(NAME, sliding_window=6)
    logits = whole(**IDS).logits.detach()

    def one(member: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(ours.prepare(copy.deepcopy(whole), cp), cp)
        part = ours.shard_batch(IDS, cp=cp, model=model)
        found = part["cp_batch"].unshard(model(**part).logits.detach())
        model.set_attn_implementation("eager")
        return found, model(**IDS).logits.detach()

    for found, alone in SimGroup(2).run(one):
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone, logits, rtol=1e-5, atol=1e-5)


def test_sequences_whose_keys_would_be_hidden_are_refused() -> None:
    """A row is longer than the window, and each of its documents is not: one process hides nothing there."""
    model = tiny_model(NAME, keep_window_size=20)

    def one(member: Any) -> torch.Tensor:
        cp = cp_fast.ContextParallel(member)
        mine = ours.prepare(copy.deepcopy(model), cp)
        with pytest.raises(NotImplementedError, match="a sequence has 24 tokens, and keep_window_size is 20"):
            mine(**ours.shard_batch(IDS, cp=cp, model=mine))
        mask = (torch.arange(24) < torch.tensor([[20], [15]])).long()
        part = ours.shard_batch(IDS | {"attention_mask": mask}, cp=cp, model=mine)
        return part["cp_batch"].unshard(mine(**part).logits.detach())[mask.bool()]

    mask = (torch.arange(24) < torch.tensor([[20], [15]])).long()
    wanted = model(**IDS, attention_mask=mask).logits.detach()[mask.bool()]
    for found in SimGroup(2).run(one):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
