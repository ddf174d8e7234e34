"""Tiny models of images and text, with random weights in float32, and batches for them."""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.integrations.hugging_face.families import EXPERTS, SIZES
from tests.integrations.hugging_face.hybrids import GATED, SHARED

__all__ = ["IMAGES", "Batch", "batch_of", "images_batch", "tiny_images"]

Batch = dict[str, torch.Tensor]

IMAGE, VIDEO = 40, 41  # token ids; those of text are below
_TEXT = SIZES | {"max_position_embeddings": 128}
_QWEN_TEXT = _TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_QWEN_SIGHT = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
_QWEN_SIGHT |= {"temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 32}
_OLDER = {"depth": 2, "hidden_size": 32, "embed_dim": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
_OLDER |= {"temporal_patch_size": 2, "spatial_merge_size": 2}
_WINDOWS = _QWEN_SIGHT | {"window_size": 16, "fullatt_block_indexes": [1]}
_NEWER = _QWEN_SIGHT | {"num_position_embeddings": 16}
_DEEP = _QWEN_SIGHT | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_SIGHT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Family:
    """A class of transformers.

    Attributes:
        text, sight: the sizes of its language model and of its vision part.
        more: further entries of its configuration.
        tokens: of one image; 0 where it depends on the image.
        side: of an image, in pixels.
        types: the entry that says which tokens are images.
    """

    text: dict[str, Any]
    sight: dict[str, Any]
    more: dict[str, Any]
    tokens: int = 0
    side: int = 0
    types: str = "mm_token_type_ids"


_QWEN_MORE = {"video_token_id": VIDEO, "vision_start_token_id": 42, "vision_end_token_id": 43}
_CLIP = {"model_type": "clip_vision_model", "image_size": 12, "patch_size": 4, "projection_dim": 16, **_SIGHT}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
IMAGES: dict[str, Family] = {
    "Qwen2_5_VLForConditionalGeneration": Family(_QWEN_TEXT, _WINDOWS, _QWEN_MORE),
    "Gemma3ForConditionalGeneration": Family(
        _TEXT | _LAYERS,
        _SIGHT | {"image_size": 16, "patch_size": 4},
        {"mm_tokens_per_image": 4},
        4,
        16,
        "token_type_ids",
    ),
    "LlavaForConditionalGeneration": Family(_TEXT | {"model_type": "llama"}, _CLIP, {}, 9, 12, ""),
    "InternVLForConditionalGeneration": Family(
        _TEXT | {"model_type": "qwen2"}, _SIGHT | {"image_size": [16, 16], "patch_size": [4, 4]}, {}, 4, 16, ""
    ),
    "Qwen3VLForConditionalGeneration": Family(_QWEN_TEXT, _DEEP, _QWEN_MORE),
    "Qwen2VLForConditionalGeneration": Family(_QWEN_TEXT, _OLDER, _QWEN_MORE),
    "Qwen3VLMoeForConditionalGeneration": Family(_QWEN_TEXT | EXPERTS, _DEEP, _QWEN_MORE),
    "Qwen3_5ForConditionalGeneration": Family(_QWEN_TEXT | GATED, _NEWER, _QWEN_MORE),
    "Qwen3_5MoeForConditionalGeneration": Family(_QWEN_TEXT | GATED | SHARED, _NEWER, _QWEN_MORE),
}


def tiny_images(name: str, **more: Any) -> Any:
    """A small model, in evaluation mode, whose images change its results: some families begin with weights of 0."""
    kind, family = getattr(importlib.import_module("transformers"), name), IMAGES[name]
    given = {"text_config": dict(family.text), "vision_config": dict(family.sight), "image_token_id": IMAGE}
    torch.manual_seed(0)
    model = kind(kind.config_class(**(given | family.more | more))).eval()
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.15, generator=generator)
    return model


def images_batch(name: str, places: Sequence[Sequence[int]], lengths: Sequence[int], seed: int = 3) -> Batch:
    """Rows of text with images at these places of each row, padded. Image n of Qwen-VL has another size than n + 1."""
    family, generator = IMAGES[name], torch.Generator().manual_seed(seed)
    ids = torch.randint(3, IMAGE, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    grids: list[list[int]] = []
    for row, starts in enumerate(places):
        for start in starts:
            wide = 4 + 8 * (len(grids) % 2)
            grids += [[1, 4, wide]]
            ids[row, start : start + (family.tokens or wide)] = IMAGE
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE), -100)
    batch = {"input_ids": ids.masked_fill(mask == 0, 0), "labels": labels, "attention_mask": mask}
    if grids and family.tokens:
        batch["pixel_values"] = torch.randn(len(grids), 3, family.side, family.side, generator=generator)
    elif grids:
        batch["image_grid_thw"] = torch.tensor(grids)
        patches = int(batch["image_grid_thw"].prod(1).sum())
        batch["pixel_values"] = torch.randn(patches, 3 * 2 * 4 * 4, generator=generator)
    if family.types:
        batch[family.types] = (ids == IMAGE).int()
    return batch


def batch_of(name: str, kind: str) -> tuple[Batch, Batch]:
    """A batch for ranks, and the same one for a process alone. Images straddle every cut of it."""
    if kind == "text":
        batch = images_batch(name, [[], []], [30, 17])
    else:
        batch = images_batch(name, [[7, 16], [], [8]], [34, 17, 25])
    if kind != "packed":
        return batch, batch
    tokens = batch["attention_mask"].bool()
    rows = (*(n for n in ("input_ids", "labels", IMAGES[name].types) if n in batch),)
    packed = batch | {n: batch[n][tokens][None] for n in rows}
    del packed["attention_mask"]
    positions = torch.cat([torch.arange(int(n)) for n in tokens.sum(1)])[None]
    return packed | {"position_ids": positions}, batch
