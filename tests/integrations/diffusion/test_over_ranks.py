"""Transformers of diffusers over ranks: outputs and gradients are those of one process."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
from cp_fast.integrations import diffusers as ours
from cp_ref import SimGroup
from tests.integrations.diffusion.families import (
    FAMILIES,
    Batch,
    Found,
    alone,
    batch_of,
    check,
    flux,
    grads_of,
    loss_of,
    outputs,
    qwen_image,
    tiny,
)
from tests.marks import examples

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[test-integrations]'")


def over_ranks(member: Any, family: str, *batches: Batch, **how: Any) -> Found:
    """Those of a rank."""
    cp = cp_fast.ContextParallel(member, **how)
    model = ours.use(tiny(family), cp)
    outs = [out for batch in batches or [batch_of(family)] for out in outputs(model, batch)]
    (loss_of(outs) / cp.size).backward()
    return [out.detach() for out in outs], grads_of(model)


QUICK = {("flux", 2), ("wan", 3), ("qwen_image", 3), ("ltx2", 2), ("helios", 3), ("cosmos3", 2), ("minimax_h3", 2)}
ALL = sorted(QUICK | {("flux", 1)} | {(family, size) for family in FAMILIES for size in (3, 4)})


@pytest.mark.parametrize(
    ("family", "size"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.thorough) for case in ALL]
)
def test_a_family_is_the_same_over_ranks(family: str, size: int) -> None:
    check(SimGroup(size).run(lambda member: over_ranks(member, family)), alone(family))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "schedule"),
    [
        *((family, "auto") for family, _ in sorted(QUICK)),
        *((n, how) for n in FAMILIES for how in ("all_gather", "a2a")),
    ],
)
def test_every_schedule(family: str, schedule: str) -> None:
    check(SimGroup(2).run(lambda member: over_ranks(member, family, cp_comm_type=schedule)), alone(family))


@settings(max_examples=examples(30, fast=4))
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 17), st.integers(1, 9))
def test_every_length_of_text_and_image(size: int, batch: int, image: int, text: int) -> None:
    """Shorter than the number of ranks, too."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        rows = flux(batch, image, text)
    check(SimGroup(size).run(lambda member: over_ranks(member, "flux", rows)), alone("flux", rows))


@settings(max_examples=examples(20, fast=4))
@given(st.integers(1, 4), st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3))
def test_every_mask_of_a_text(size: int, seen: list[list[bool]]) -> None:
    """With holes, and hiding all of it; two masks of one shape before one backward pass."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        rows = qwen_image(len(seen), 5, (5,) * len(seen))
    masks = [torch.tensor(seen), torch.tensor(seen).flip(1)]
    batches = [rows | {"encoder_hidden_states_mask": mask} for mask in masks]
    check(SimGroup(size).run(lambda member: over_ranks(member, "qwen_image", *batches)), alone("qwen_image", *batches))


def test_calls_of_other_lengths_in_equal_slices() -> None:
    """11 and 12 tokens are slices of 6: their backward passes come after both calls."""
    batches = [flux(1, 11, 5), flux(1, 12, 6)]
    check(SimGroup(2).run(lambda member: over_ranks(member, "flux", *batches)), alone("flux", *batches))


def test_the_second_call_of_a_kind_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def counting(model: Any, *args: Any) -> Any:
        counted.append(len(args))
        return learn(model, *args)

    learn = ours.learn
    monkeypatch.setattr(ours, "learn", counting)
    batches = [flux(1, 11, 5), flux(2, 4, 3), flux(1, 11, 5) | {"guidance": None}]

    def one(member: Any) -> int:
        model = ours.use(tiny("flux").requires_grad_(False), cp_fast.ContextParallel(member))
        model.time_text_embed = _WithoutGuidance(model.time_text_embed)
        for batch in batches:
            model(**batch)
        return len(counted)

    assert SimGroup(1).run(one) == [2]


class _WithoutGuidance(torch.nn.Module):
    """An embedding of time that takes no guidance."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, timestep: Any, *others: Any) -> Any:
        return self.inner(timestep, timestep if len(others) == 1 else others[0], others[-1])


def test_a_bfloat16_model() -> None:
    expected, _ = alone("flux")

    def one(member: Any) -> list[torch.Tensor]:
        model = ours.use(tiny("flux").bfloat16(), cp_fast.ContextParallel(member))
        batch = {name: x.bfloat16() for name, x in batch_of("flux").items()}
        with torch.no_grad():
            return outputs(model, batch)

    for found in SimGroup(3).run(one):
        torch.testing.assert_close(found[0].float(), expected[0], rtol=0.1, atol=0.1)


def test_gradients_of_the_inputs() -> None:
    """Each rank has its share of the gradient of a latent, as guidance by a gradient needs it."""

    def latent(model: torch.nn.Module, size: int) -> torch.Tensor:
        batch = batch_of("wan")
        batch["hidden_states"].requires_grad_()
        (loss_of(outputs(model, batch)) / size).backward()
        return batch["hidden_states"].grad

    found = SimGroup(2).run(lambda member: latent(ours.use(tiny("wan"), cp_fast.ContextParallel(member)), 2))
    torch.testing.assert_close(sum(found), latent(tiny("wan"), 1), rtol=1e-3, atol=1e-6)


def test_a_new_context() -> None:
    """`use` again takes another one, and keeps the kernels of whole keys."""

    def one(member: Any) -> list[torch.Tensor]:
        model = tiny("wan")
        model.set_attention_backend("_native_math")
        ours.use(model, cp_fast.ContextParallel(member))
        ours.use(model, cp_fast.ContextParallel(member, "all_gather"))
        state = vars(model)["_cp_fast_state"]
        assert {backend.value if hasattr(backend, "value") else backend for backend in state.attention.values()} == {
            "_native_math"
        }
        with torch.no_grad():
            return outputs(model, batch_of("wan"))

    expected, _ = alone("wan")
    for found in SimGroup(2).run(one):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
