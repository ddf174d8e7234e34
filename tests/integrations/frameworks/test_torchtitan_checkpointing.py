"""torchtitan's activation checkpointing: its own policies, and one that names attention, which then runs once."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.api import attention as api
from cp_fast.checkpoint import attention_forward, save_attention
from cp_fast.integrations import torchtitan as ours
from cp_ref import SimGroup

titan = pytest.importorskip(
    "torchtitan.distributed.activation_checkpoint", reason="needs torchtitan: pip install '.[test-integrations]'"
)
from tests.integrations.frameworks.test_torchtitan import attention, attentions, documents, losses_of, model_of  # noqa: E402

LAYERS, RANKS = 2, 2


class Saving(titan.SelectiveAC):
    """torchtitan's policy, which saves attention's results too."""

    def get_save_ops(self) -> set[Any]:
        return {*super().get_save_ops(), attention_forward}


def wrapped(model: Any) -> None:
    """PyTorch's `checkpoint_wrapper` with `save_attention`, for which no policy of torchtitan is needed."""
    for name, layer in model.layers.named_children():
        model.layers.register_module(name, titan.ptd_checkpoint_wrapper(layer, context_fn=save_attention()))


WAYS: dict[str, tuple[Any, int]] = {  # and how often attention runs forward in a layer
    "none": (lambda model: None, 1),
    "full": (titan.FullAC(titan.FullAC.Config()).apply, 2),
    "selective": (titan.SelectiveAC(titan.SelectiveAC.Config()).apply, 2),
    "named": (Saving(titan.SelectiveAC.Config()).apply, 1),
    "wrapped": (wrapped, 1),
}


def step(way: str, monkeypatch: pytest.MonkeyPatch) -> tuple[float, list[list[torch.Tensor]]]:
    """Forward passes of attention in a layer and rank, and the gradients of each rank."""
    forwards: list[int] = []
    inner = api.forward_pass

    def counted(*given: Any, **how: Any) -> Any:
        forwards.append(1)
        return inner(*given, **how)

    batch = documents(5, 19, 11, 13)
    masks = attention.create_varlen_metadata_for_document(batch["positions"])
    extra = {"positions": batch["positions"], "attention_masks": masks}

    def one(member: Any) -> list[torch.Tensor]:
        cp, model = cp_fast.ContextParallel(member, layout="balanced"), model_of(LAYERS)
        ours.apply_cp_to_forward(attentions(model), cp)
        WAYS[way][0](model)
        losses_of(
            model, *ours.prepare_context_parallel_input(batch["inputs"], batch["labels"], extra, cp)
        ).sum().backward()
        return [weight.grad for weight in model.parameters()]

    with monkeypatch.context() as patch:
        patch.setattr(api, "forward_pass", counted)
        grads = SimGroup(RANKS).run(one)
    return len(forwards) / LAYERS / RANKS, grads


def test_policies_have_the_same_bits_and_one_that_names_attention_runs_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = step("none", monkeypatch)
    for way, (_, times) in WAYS.items():
        found, grads = step(way, monkeypatch)
        assert found == times, way
        for mine, theirs in zip(grads, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), way
