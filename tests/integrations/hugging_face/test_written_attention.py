"""Models whose attention is written out, beside those with ALiBi (test_transformers.py)."""

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
from tests.integrations.hugging_face.families import batch_of, tiny

# First: without it the next module is there in part, and skipped.
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

from tests.integrations.hugging_face.test_prepare import check, dist_of_one, grads_of  # noqa: E402

NO_DROPOUT = dict.fromkeys(
    ("dropout", "attention_dropout", "activation_dropout", "resid_dropout", "embed_dropout"), 0.0
)
NAMES = ("GPTNeoForCausalLM", "XGLMForCausalLM")


OTHERS = {
    "OpenAIGPTLMHeadModel": "causal",
    "OpenAIGPTForSequenceClassification": "sequences",
    "RoFormerForCausalLM": "causal",
    "RoFormerForMaskedLM": "masked",
    "RoFormerForTokenClassification": "tokens",
    "RoFormerForQuestionAnswering": "questions",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if task == "causal" else pytest.mark.thorough) for n, task in OTHERS.items()]
)
def test_a_class_is_right_over_ranks(name: str) -> None:
    found = sweep_cases.play(name, OTHERS[name], ranks=3)
    assert found["verdict"] == "right", found
    assert found.get("refused in", {}) == {}


COUNT_PADDING = {
    "XLMWithLMHeadModel": "causal",
    "FlaubertWithLMHeadModel": "masked",
    "XLMForTokenClassification": "tokens",
    "FlaubertForTokenClassification": "tokens",
    "XLMForQuestionAnsweringSimple": "questions",
    "FlaubertForQuestionAnsweringSimple": "questions",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if "LMHead" in n else pytest.mark.thorough) for n in COUNT_PADDING]
)
def test_a_class_that_counts_ids_of_padding_is_right_or_says_so(name: str) -> None:
    found = sweep_cases.play(name, COUNT_PADDING[name], ranks=3)
    assert found["verdict"] == "right", found
    assert all("the id of padding, among tokens" in said for said in found["refused in"].values())
    assert not any(case.startswith("padded") for case in found["refused in"])


@pytest.mark.parametrize(("name", "causal"), [("XLMWithLMHeadModel", False), ("FlaubertWithLMHeadModel", True)])
def test_packed_documents_without_such_ids(name: str, causal: bool) -> None:
    """Their mask is of both sides, or causal by the configuration."""
    whole, lengths = tiny_model(name, causal=causal), (21, 1, 17)
    ids = torch.randint(5, 60, (1, sum(lengths)), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]

    def one(member: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        cp = cp_fast.ContextParallel(member, layout="balanced")
        model = ours.prepare(ours.prepare(copy.deepcopy(whole), cp), cp)
        part = ours.shard_batch({"input_ids": ids, "position_ids": positions}, cp=cp, model=model)
        logits = model(**part).logits
        (logits.square().sum(-1) * (part["cp_batch"].documents >= 0).view(logits.shape[:2])).sum().backward()
        return part["cp_batch"].unshard(logits.detach()), grads_of(model)

    parts = SimGroup(3).run(one)
    logits = torch.cat([whole(x).logits for x in ids.split(lengths, 1)], 1)
    logits.square().sum().backward()
    torch.testing.assert_close(parts[0][0], logits.detach(), rtol=1e-4, atol=1e-4)
    grads = grads_of(whole)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for weight, grad in grads.items():
        found = sum(part[weight] for _, part in parts)
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-5 * largest, msg=weight)


@pytest.mark.parametrize(
    ("name", "more"), [("OpenAIGPTLMHeadModel", {}), ("RoFormerForMaskedLM", {"rotary_value": True})]
)
def test_a_model_is_the_same_over_ranks_and_alone_again(name: str, more: dict[str, Any]) -> None:
    whole, batch = tiny_model(name, **more), {"input_ids": batch_of("LlamaForCausalLM")["input_ids"]}
    logits = whole(**batch).logits.detach()

    def one(member: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cp = cp_fast.ContextParallel(member, layout="balanced")
        model = ours.prepare(ours.prepare(copy.deepcopy(whole), cp), cp)
        part = ours.shard_batch(batch, cp=cp, model=model)
        found = part["cp_batch"].unshard(model(**part).logits.detach())
        model.set_attn_implementation("eager")
        return found, model(**batch).logits.detach()

    for found, alone in SimGroup(2).run(one):
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone, logits)


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_are_computed_again(name: str) -> None:
    def one(member: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        cp = cp_fast.ContextParallel(member, layout="balanced")
        model = copy.deepcopy(ours.prepare(ours.prepare(whole, cp), cp)).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(**ours.shard_batch(batch_of(name), cp=cp, model=model)).loss
        loss.backward()
        return loss.detach(), grads_of(model)

    whole = tiny(name, **NO_DROPOUT)
    check(name, SimGroup(2).run(one))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_runs_alone_again(name: str) -> None:
    model = ours.prepare(tiny(name, **NO_DROPOUT), cp_fast.ContextParallel(dist_of_one()))
    model.set_attn_implementation("eager")
    batch = {"input_ids": batch_of(name)["input_ids"]}
    torch.testing.assert_close(model.eval()(**batch).logits, tiny(name)(**batch).logits)


@pytest.mark.parametrize("more", [{}, {"multi_query": False}, {"new_decoder_architecture": True, "num_kv_heads": 2}])
def test_heads_of_falcon(more: dict[str, Any]) -> None:
    """One head of keys, as many as of queries, or some; its ALiBi is refused."""
    name = "FalconForCausalLM"
    whole, batch = tiny_model(name, **more), {"input_ids": batch_of(name)["input_ids"]}

    def one(member: Any) -> torch.Tensor:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(copy.deepcopy(whole), cp)
        part = ours.shard_batch(batch, cp=cp, model=model)
        return part["cp_batch"].unshard(model(**part).logits.detach())

    torch.testing.assert_close(SimGroup(2).run(one)[0], whole(**batch).logits.detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="alibi is True in the configuration of FalconForCausalLM"):
        ours.prepare(tiny_model(name, alibi=True), cp_fast.ContextParallel(dist_of_one()))


FALCON = {"TokenClassification": "tokens", "SequenceClassification": "sequences", "QuestionAnswering": "questions"}


@pytest.mark.parametrize("head", [h if h[0] == "T" else pytest.param(h, marks=pytest.mark.thorough) for h in FALCON])
def test_a_head_that_hands_no_positions_on(head: str) -> None:
    found = sweep_cases.play(f"FalconFor{head}", FALCON[head], ranks=3)
    assert (found["verdict"], found.get("refused in", {})) == ("right", {}), found


@pytest.mark.parametrize("name", ["BloomForQuestionAnswering", "GPTNeoForQuestionAnswering"])
def test_a_head_that_hands_no_use_cache_on_makes_no_cache(name: str) -> None:
    whole, batch = tiny_model(name), {"input_ids": batch_of("LlamaForCausalLM")["input_ids"]}

    def one(member: Any) -> torch.Tensor:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(copy.deepcopy(whole), cp)
        part = ours.shard_batch(batch, cp=cp, model=model)
        return part["cp_batch"].unshard(model(**part).start_logits.detach())

    torch.testing.assert_close(SimGroup(2).run(one)[0], whole(**batch).start_logits.detach(), rtol=1e-4, atol=1e-5)
