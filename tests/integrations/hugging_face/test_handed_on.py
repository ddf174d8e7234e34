"""Models whose forward hands no keywords on to a part of them: hooks hand `cp_batch` on, in each call."""

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
from tests.integrations.hugging_face.test_prepare import check, dist_of_one, grads_of

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

NAME = "StableLmForCausalLM"


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_computed_again_have_the_sequences_of_their_call(reentrant: bool) -> None:
    """Two calls, and then their backward passes."""

    def one(member: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        cp = cp_fast.ContextParallel(member)
        model = copy.deepcopy(ours.prepare(ours.prepare(tiny(NAME), cp), cp)).train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        part = ours.shard_batch(batch_of(NAME), cp=cp, model=model)
        other = ours.shard_batch({"input_ids": torch.arange(3, 40)[None]}, cp=cp, model=model)
        if reentrant:
            model.enable_input_require_grads()
        loss = model(**part).loss
        model(**other)
        loss.backward()
        return loss.detach(), grads_of(model)

    check(NAME, SimGroup(2).run(one))


def test_hooks_are_put_once_and_a_model_runs_alone_again() -> None:
    cp = cp_fast.ContextParallel(dist_of_one())
    model = ours.prepare(ours.prepare(tiny(NAME), cp), cp)
    layer = model.model.layers[1].self_attn
    assert len(layer._forward_pre_hooks) == 1
    model.set_attn_implementation("eager")
    batch = {"input_ids": batch_of(NAME)["input_ids"]}
    torch.testing.assert_close(model(**batch).logits, tiny(NAME)(**batch).logits)


class Deaf(torch.nn.Module):
    """A layer that takes no keywords, and calls one that needs some."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None) -> Any:
        return self.inner(hidden_states, position_embeddings=position_embeddings)


def test_a_layer_without_keywords_is_refused() -> None:
    model = tiny(NAME)
    for layer in model.model.layers:
        made, deaf = layer.self_attn, Deaf(layer.self_attn)
        layer.self_attn = deaf
        assert made is deaf.inner
        layer.self_attn.forward = lambda *given, m=deaf, **named: Deaf.forward(
            m, named["hidden_states"], named["position_embeddings"]
        )
    with pytest.raises(NotImplementedError, match="is not given cp_batch: its model does not hand its keywords on"):
        ours.prepare(model, cp_fast.ContextParallel(dist_of_one()))
