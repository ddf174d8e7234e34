"""BLOOM and MPT, whose attention is written out with ALiBi: their formula, recomputed layers, and their own calls."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.integrations import transformers as ours
from cp_ref import SimGroup
from tests.integrations.hugging_face.test_transformers import batches, model_of, on_one_rank

NAMES = ("BLOOM", "MPT")


@pytest.mark.parametrize("heads", [1, 3, 4, 6])
@pytest.mark.parametrize("name", NAMES)
def test_slopes_are_those_of_the_paper(name: str, heads: int) -> None:
    """Powers of 2 ** (-8 / n) for n heads; where n is no power of two, each model has its own order of the rest."""

    def one(member: Any) -> torch.Tensor:
        model = model_of(name, num_attention_heads=heads, hidden_size=8 * heads)
        ours.prepare(model, cp_fast.ContextParallel(member))
        found = [m.__dict__["_cp_fast_attention"][1] for m in model.modules() if "_cp_fast_attention" in m.__dict__]
        assert len(found) == 2
        return found[0]

    slopes = SimGroup(1).run(one)[0]
    whole = 2 ** (math.floor if name == "BLOOM" else math.ceil)(math.log2(heads))
    powers = [2.0 ** (-8 * n / whole) for n in range(1, whole + 1)]
    if name == "BLOOM":
        powers += [2.0 ** (-4 * n / whole) for n in range(1, 2 * (heads - whole) + 1, 2)]
    elif whole != heads:
        powers = (powers[1::2] + powers[::2])[:heads]
    torch.testing.assert_close(slopes, torch.tensor(powers), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_are_computed_again_have_the_sequences_of_their_own_call(name: str) -> None:
    """Two calls before their backward passes, with other sequences."""
    first, second = batches()["packed"], batches()["full"]
    expected = [on_one_rank(model_of(name), batch)[1] for batch in (first, second)]
    whole = model_of(name)

    def one(member: Any) -> dict[str, torch.Tensor]:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(copy.deepcopy(whole), cp)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        losses = [model(**ours.shard_batch(batch, cp=cp)).loss for batch in (first, second)]
        for loss in losses:
            loss.backward()
        return {n: w.grad for n, w in model.named_parameters() if w.grad is not None}

    parts = SimGroup(2).run(one)
    assert parts[0].keys() == expected[0].keys()
    for n in expected[0]:
        torch.testing.assert_close(
            sum(part[n] for part in parts), expected[0][n] + expected[1][n], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_prepared_model_still_runs_alone(name: str) -> None:
    ids = batches()["full"]["input_ids"]
    with torch.no_grad():
        expected = model_of(name)(ids).logits

    def one(member: Any) -> torch.Tensor:
        model = ours.prepare(model_of(name), cp_fast.ContextParallel(member))
        with pytest.raises(TypeError, match="call it with what shard_batch returns"):
            model(input_ids=ids)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            return model(ids).logits

    torch.testing.assert_close(SimGroup(1).run(one)[0], expected)


def test_another_formula_is_refused() -> None:
    def one(member: Any) -> None:
        model = model_of("MPT")
        original = model.transformer.build_mpt_alibi_tensor
        model.transformer.build_mpt_alibi_tensor = lambda *given, **named: original(*given, **named) ** 3
        with pytest.raises(NotImplementedError, match="position biases of MptModel are no slopes times positions"):
            ours.prepare(model, cp_fast.ContextParallel(member))

    SimGroup(1).run(one)


@pytest.mark.parametrize(("name", "where"), [("BLOOM", "attention_dropout"), ("MPT", "attn_dropout_p")])
def test_dropout_of_attention_is_refused(name: str, where: str) -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(model_of(name), cp)
        for module in model.modules():
            if hasattr(module, where):
                setattr(module, where, torch.nn.Dropout(0.1) if name == "BLOOM" else 0.1)
        with pytest.raises(NotImplementedError, match=r"dropout is 0\.1, .* dropout_p and dropout_seed"):
            model(**ours.shard_batch(batches()["full"], cp=cp))

    SimGroup(1).run(one)
