"""Llama 4 over ranks: chunks are documents of their own, and the scales of queries follow position_ids."""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.integrations import transformers as ours
from cp_ref import SimGroup
from tests.integrations.hugging_face.families import batch_of, tiny
from tests.integrations.hugging_face.test_prepare import check, grads_of, part_of
from tests.integrations.hugging_face.test_probe import refused

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

NAME = "Llama4ForCausalLM"
PACKED = (17, 1, 23)


def packed() -> dict[str, torch.Tensor]:
    """Documents that are longer than a chunk, and one of one token."""
    ids = torch.randint(3, 50, (1, sum(PACKED)), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(n) for n in PACKED])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def alone() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One process, document by document, because transformers counts the whole row for the scales."""
    model, batch = tiny(NAME), packed()
    model.set_attn_implementation("eager")
    count = torch.tensor(sum(n - 1 for n in PACKED))
    rows = [x.split(PACKED, 1) for x in (batch["input_ids"], batch["labels"])]
    losses = [model(input_ids=i, labels=y, num_items_in_batch=count).loss for i, y in zip(*rows, strict=True)]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach(), grads_of(model)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (3, "dual_chunk"),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in ((2, "contiguous"), (3, "balanced"))),
    ],
)
def test_packed_documents(size: int, layout: Any) -> None:
    loss, grads = alone()
    parts = SimGroup(size).run(lambda member: part_of(NAME, member, packed(), layout=layout))
    torch.testing.assert_close(torch.stack([part for part, _ in parts]).sum(), loss, rtol=1e-5, atol=1e-5)
    for weight, grad in grads.items():
        torch.testing.assert_close(sum(part[weight] for _, part in parts), grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "layout", ["dual_chunk", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("contiguous", "balanced"))]
)
def test_rows_with_padding_over_three_ranks(layout: Any) -> None:
    check(NAME, SimGroup(3).run(lambda member: part_of(NAME, member, layout=layout)))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["checkpointing", "reentrant", "compile"])
def test_recomputed_and_compiled_layers_know_their_positions(kind: str) -> None:
    def one(member: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        cp = cp_fast.ContextParallel(member)
        model = copy.deepcopy(ours.prepare(ours.prepare(tiny(NAME), cp), cp)).train()
        outer: Any = model
        if kind == "compile":
            outer = torch.compile(model, backend="aot_eager")
        else:
            model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
            model.enable_input_require_grads()
        loss = outer(**ours.shard_batch(batch_of(NAME), cp=cp, model=model)).loss
        loss.backward()
        return loss.detach(), grads_of(model)

    check(NAME, SimGroup(2).run(one))


def test_short_documents_are_one_chunk_and_a_model_runs_alone_again() -> None:
    def one(member: Any) -> tuple[Any, Any]:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny(NAME, attention_chunk_size=64), cp)
        part = ours.shard_batch(batch_of(NAME), cp=cp, model=model)
        logits = part["cp_batch"].unshard(model(**part).logits)
        assert part["cp_batch"].areas(*part["input_ids"].shape)._areas == {}
        model.set_attn_implementation("sdpa")
        return logits.detach(), model(batch_of(NAME)["input_ids"][:1]).logits.detach()

    over, after = SimGroup(2).run(one)[0]
    wanted = tiny(NAME, attention_chunk_size=64)(batch_of(NAME)["input_ids"][:1]).logits.detach()
    torch.testing.assert_close(after, wanted)
    torch.testing.assert_close(over[:1], wanted, rtol=1e-4, atol=1e-5)


def test_another_mask_than_the_layer_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = transformers.models.llama4.modeling_llama4
    monkeypatch.setattr(theirs, "create_chunked_causal_mask", theirs.create_causal_mask)
    said = refused(tiny(NAME))
    assert "says is_causal=True in chunks of 7, and its model builds a mask that is causal." in said
