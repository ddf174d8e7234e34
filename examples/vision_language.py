"""A model of images and text over several processes: rows with two images, one and none, and a batch of text alone:

    torchrun --nproc-per-node 2 examples/vision_language.py
    python -m conformance step examples.vision_language:build --batch examples.vision_language:batch \
        --cp-size 2 --loss sum

`python examples/vision_language.py` is the same on one process, with transformers alone: the losses are the same but
for rounding. A small Qwen2.5-VL with random weights, and patches of noise where its processor would cut images in
patches; needs transformers.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import cp_fast as cp
from conformance.runner.processes import device_of_group
from cp_fast.integrations.transformers import prepare, shard_batch

IMAGE, PATCH = 60, 3 * 2 * 4 * 4  # the token that stands for a part of an image; numbers in a patch


def rows_of(lengths: list[int], images: list[tuple[int, int, int]]) -> dict[str, torch.Tensor]:
    """Padded rows as a processor returns them. images: the row and the first token of each, and its tokens."""
    generator = torch.Generator().manual_seed(len(images))
    ids = torch.randint(1, IMAGE, (len(lengths), max(lengths)), generator=generator)
    for row, start, tokens in images:
        ids[row, start : start + tokens] = IMAGE
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE), -100)
    found = {"input_ids": ids, "attention_mask": mask, "labels": labels, "mm_token_type_ids": (ids == IMAGE).int()}
    if images:  # frames, rows and columns of patches, four of which become a token
        found["image_grid_thw"] = torch.tensor([[1, 4, tokens] for _, _, tokens in images])
        found["pixel_values"] = torch.randn(4 * sum(tokens for *_, tokens in images), PATCH, generator=generator)
    return found


def batch() -> list[dict[str, torch.Tensor]]:
    """The batches of one step."""
    return [rows_of([40, 21, 33], [(0, 6, 8), (0, 18, 14), (2, 9, 6)]), rows_of([25, 30], [])]


def build(context: cp.ContextParallel | None) -> tuple[Any, Any, Any]:
    """A model, its step over all batches and its optimizer; without a context with transformers alone."""
    text: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    sight: dict[str, Any] = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
    sight |= {"spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 64}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    tokens: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": 61}
    tokens |= {"vision_start_token_id": 62, "vision_end_token_id": 63}
    torch.manual_seed(0)
    model: Any = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=sight, **tokens))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    device = device_of_group()
    model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if context is not None:
        prepare(model, context)

    def step(batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        total = torch.zeros((), device=device)
        batches = [{name: x.to(device) for name, x in rows.items()} for rows in batches]
        count = sum((rows["labels"][:, 1:] != -100).sum() for rows in batches)
        for rows in batches:
            part: Any = rows if context is None else shard_batch(rows, cp=context, model=model)
            loss = model(**part | {"num_items_in_batch": count}).loss  # this rank's part of the mean of all batches
            loss.backward()
            total += loss.detach()
        for weight in model.parameters() if context is not None else []:
            dist.all_reduce(weight.grad)  # the vision part's too: each rank has found those of its own tokens
        return total

    return model, step, optimizer


def main() -> None:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    _, step, optimizer = build(cp.ContextParallel(dist.group.WORLD) if several else None)
    losses: list[torch.Tensor] = []
    for _ in range(3):
        losses.append(step(batch()))
        optimizer.step()
        optimizer.zero_grad()
    for loss in losses if several else []:
        dist.all_reduce(loss)
    if not several or dist.get_rank() == 0:
        print("losses", *(f"{float(loss):.4f}" for loss in losses))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
