"""Encoders that classify sequences: their head reads a sequence's first token, or the mean of its tokens."""

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

pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

FIRST = "Bert Roberta DistilBert Albert ModernBert Electra Gte XLMRoberta NomicBert RoFormer JinaEmbeddingsV3 Esmc"
MEAN: dict[str, dict[str, Any]] = {
    "ModernBert": {"classifier_pooling": "mean"},
    "EuroBert": {"classifier_pooling": "late"},  # of what its layers make of each token
}
IDS = {"input_ids": batch_of("LlamaForCausalLM")["input_ids"]}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _class(name: str) -> str:
    return f"{name}ForSequenceClassification"


@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        *(
            pytest.param(name, 3, {}, marks=pytest.mark.thorough if n > 2 else ())
            for n, name in enumerate(FIRST.split())
        ),
        pytest.param("Bert", 2, {}, marks=pytest.mark.thorough),
        *((name, 3, more) for name, more in MEAN.items()),
    ],
)
def test_a_class_is_right_over_ranks(name: str, ranks: int, more: dict[str, Any]) -> None:
    found = sweep_cases.play(_class(name), "sequences", ranks=ranks, **more)
    assert (found["verdict"], found.get("refused in", {})) == ("right", {}), found


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_a_model_that_is_prepared_again_checkpointed_and_alone(name: str) -> None:
    """A call that raises before its body runs leaves nothing behind."""
    whole = tiny_model(_class(name), **NO_DROPOUT).train()

    def one(member: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        cp = cp_fast.ContextParallel(member, layout="balanced")
        model = copy.deepcopy(ours.prepare(ours.prepare(copy.deepcopy(whole), cp), cp)).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        part = ours.shard_batch(IDS, cp=cp, model=model)
        handle = model.base_model.embeddings.register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            model(**part)
        handle.remove()
        model.set_attn_implementation("eager")
        alone = model(**IDS).logits.detach()
        model.set_attn_implementation("cp_fast")
        logits = model(**part).logits
        (logits.square().sum() / cp.size).backward()
        return alone, logits.detach(), grads_of(model)

    parts = SimGroup(2).run(one)
    logits = whole(**IDS).logits
    logits.square().sum().backward()
    for alone, found, _ in parts:
        torch.testing.assert_close(alone, logits.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, logits.detach(), rtol=1e-4, atol=1e-5)
    grads = grads_of(whole)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for weight, grad in grads.items():
        found = sum(grads[weight] for *_, grads in parts)
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-5 * largest, msg=weight)


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_a_body_inside_that_pools_is_not_called_by_itself() -> None:
    """BERT's has a pooler, which would read a slice; RoBERTa's returns hidden states alone."""

    def one(member: Any) -> torch.Tensor:
        cp = cp_fast.ContextParallel(member)
        bert, roberta = (ours.prepare(tiny_model(_class(name)), cp) for name in ("Bert", "Roberta"))
        with pytest.raises(NotImplementedError, match="bert would pool a rank's slice if it is called by itself"):
            bert.bert(**ours.shard_batch(IDS, cp=cp, model=bert))
        part = ours.shard_batch(IDS, cp=cp, model=roberta)
        return part["cp_batch"].unshard(roberta.roberta(**part)[0].detach())

    wanted = tiny_model(_class("Roberta")).roberta(**IDS)[0].detach()
    torch.testing.assert_close(SimGroup(2).run(one)[0], wanted, rtol=1e-4, atol=1e-5)


class MaxOfTokens(torch.nn.Module):
    """A head of the largest number of all tokens."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.inner(x.amax(1, keepdim=True) + x[:, :1])


def test_a_head_that_pools_in_another_way_is_refused() -> None:
    model = tiny_model(_class("Roberta"))
    model.classifier = MaxOfTokens(model.classifier)
    with pytest.raises(NotImplementedError, match="pools over tokens"):
        ours.prepare(model, cp_fast.ContextParallel(dist_of_one()))


def test_a_decoder_that_classifies_is_prepared_again() -> None:
    cp = cp_fast.ContextParallel(dist_of_one())
    model = ours.prepare(ours.prepare(tiny_model(_class("Llama")), cp), cp)
    found = model(**ours.shard_batch(IDS, cp=cp, model=model)).logits
    torch.testing.assert_close(found, tiny_model(_class("Llama"))(**IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Bert", "EuroBert"])
def test_inside_torch_compile(name: str) -> None:
    more: dict[str, Any] = {} if name == "Bert" else {"classifier_pooling": "mean"}
    whole = tiny_model(_class(name), **more)

    def one(member: Any) -> torch.Tensor:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(copy.deepcopy(whole), cp)
        run: Any = torch.compile(model, backend="eager") if member.rank == 0 else model
        return run(**ours.shard_batch(IDS, cp=cp, model=model)).logits.detach()

    for found in SimGroup(2).run(one):
        torch.testing.assert_close(found, whole(**IDS).logits.detach(), rtol=1e-4, atol=1e-5)
