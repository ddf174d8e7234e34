"""Models of images that have no function as `get_image_features`: they run over ranks with text alone."""

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

# First: without it the next module is there in part, and skipped.
pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

from tests.integrations.hugging_face.test_prepare import dist_of_one

CLASSES = {
    "GitForCausalLM": "causal",
    "Phi4MultimodalForCausalLM": "causal",
    "MllamaForConditionalGeneration": "images",
}
IDS = {"input_ids": batch_of("LlamaForCausalLM")["input_ids"]}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_right_over_ranks(name: str, ranks: int) -> None:
    found = sweep_cases.play(name, CLASSES[name], ranks=ranks)
    assert found["verdict"] == "right", found
    assert found.get("refused in", {}) == {}


@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        ("GitForCausalLM", "pixel_values"),
        ("Phi4MultimodalForCausalLM", "image_pixel_values"),
        ("Phi4MultimodalForCausalLM", "audio_input_features"),
        ("MllamaForConditionalGeneration", "pixel_values"),
        ("MllamaForConditionalGeneration", "cross_attention_states"),
    ],
)
def test_a_call_with_images_is_refused(name: str, pixels: str) -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny_model(name), cp)
        part = ours.shard_batch(IDS, cp=cp, model=model)
        with pytest.raises(NotImplementedError, match=f"{pixels} is a tensor .* does not know in calls of {name}"):
            model(**part, **{pixels: torch.zeros(2, 3, 8, 8)})

    SimGroup(2).run(one)


def test_images_of_a_batch_and_ranks_for_them_are_refused() -> None:
    cp = cp_fast.ContextParallel(dist_of_one())
    model = ours.prepare(tiny_model("GitForCausalLM"), cp)
    with pytest.raises(ValueError, match=r"batch has pixel_values, .* its model takes text alone"):
        ours.shard_batch(IDS | {"pixel_values": torch.zeros(2, 3, 8, 8)}, cp=cp, model=model)
    with pytest.raises(ValueError, match="images is 'ranks', and GitForCausalLM takes text alone"):
        ours.prepare(model, cp, images="ranks")


def test_a_model_alone_reads_images_as_before() -> None:
    whole = tiny_model("GitForCausalLM")
    side = whole.config.vision_config.image_size
    pixels = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(4))
    model = ours.prepare(copy.deepcopy(whole), cp_fast.ContextParallel(dist_of_one()))
    model.set_attn_implementation("eager")
    whole.set_attn_implementation("eager")
    torch.testing.assert_close(model(**IDS, pixel_values=pixels).logits, whole(**IDS, pixel_values=pixels).logits)
