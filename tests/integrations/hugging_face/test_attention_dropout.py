"""Dropout of attention in training: over ranks the same pairs as in one process of the same code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.shared import cp_batch
from cp_ref import SimGroup
from tests.integrations.hugging_face.families import tiny

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

OTHER = {"hidden_dropout_prob": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # of slices
MODELS = {
    "LlamaForCausalLM": {"attention_dropout": 0.4},
    "BertForMaskedLM": {"attention_probs_dropout_prob": 0.4},
    "BloomForCausalLM": {"attention_dropout": 0.4},
    "GPTNeoForCausalLM": {"attention_dropout": 0.4, "resid_dropout": 0.0, "embed_dropout": 0.0},
    "XGLMForCausalLM": {"attention_dropout": 0.4, "dropout": 0.0, "activation_dropout": 0.0},
}


def batch() -> dict[str, torch.Tensor]:
    """Rows with padding."""
    mask = (torch.arange(14) < torch.tensor([[14], [9]])).long()
    ids = torch.randint(3, 50, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(whole: Any, size: int, layout: Any, given: dict[str, torch.Tensor], recomputed: bool = False) -> Any:
    """The loss and the gradients of a training step, summed over ranks."""

    def one(member: Any) -> Any:
        context = cp_fast.ContextParallel(member, layout=layout)
        model = ours.prepare(copy.deepcopy(whole), context).train()
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        part = ours.shard_batch(given, cp=context, model=model)
        torch.manual_seed(3 + member.rank)  # the seed is the first rank's
        loss = model(**part).loss
        loss.backward()
        return loss.detach(), {n: w.grad for n, w in model.named_parameters() if w.grad is not None}

    parts = SimGroup(size).run(one)
    return sum(loss for loss, _ in parts), {n: sum(grads[n] for _, grads in parts) for n in parts[0][1]}


@pytest.mark.parametrize("layout", ["dual_chunk", "balanced", "contiguous"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(4)
def test_the_same_pairs_are_dropped_over_any_number_of_ranks(name: str, layout: Any) -> None:
    whole = tiny(name, **OTHER, **MODELS[name])
    for weight in whole.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    expected, grads = step(whole, 1, layout, batch())
    for size, recomputed in ((2, False), (3, name == "LlamaForCausalLM")):
        loss, found = step(whole, size, layout, batch(), recomputed)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found, grads, rtol=1e-4, atol=1e-5)
    assert abs(whole.train(False)(**batch()).loss - expected) > 1e-3


def test_every_layer_and_call_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[tuple[int, float]] = []

    def attention(*given: Any, plan: cp_fast.Plan, dropout_seed: Any = None, **named: Any) -> torch.Tensor:
        if dropout_seed is not None:
            seeds.append((int(dropout_seed), plan.problem.dropout_p))
        return cp_fast.attention(*given, plan=plan, dropout_seed=dropout_seed, **named)

    monkeypatch.setattr(cp_batch, "attention", attention)

    def one(member: Any) -> None:
        context = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny("LlamaForCausalLM", attention_dropout=0.25), context).train()
        part = ours.shard_batch(batch(), cp=context, model=model)
        torch.manual_seed(member.rank)  # ranks draw other numbers, and take the first one's
        for _ in range(2):
            model(**part)
        drawn = torch.get_rng_state()
        model.eval()(**part)
        assert torch.equal(drawn, torch.get_rng_state())

    SimGroup(2).run(one)
    assert len(seeds) == 8
    assert len({seed for seed, _ in seeds}) == 4
    assert {p for _, p in seeds} == {0.25}
