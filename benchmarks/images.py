"""A training step with many images: every rank runs the vision part on all of them, or the ranks share them out.

    python -m benchmarks.images --gpus 2 --commit "$(git rev-parse HEAD)" --out benchmarks/results/images_2x_h200.json
    python -m benchmarks.images --gpus 2 --device cpu --small

The model has the shape of Qwen3-VL's vision part (27 layers of 1,152, deepstack at three of them) and some layers of
its text model, with random weights in bf16. A row has all images and text between them, as a page of slides has. The
two ways take turns. Both give the same losses and gradients, which the record has of the first step. Time is that of a
step, forward and backward, of the slowest rank; memory is the most that PyTorch had allocated on a rank, above weights
and inputs.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer

import cp_fast
from benchmarks.parts.ranks import Commit, Device, JsonOut, connect, version, write_json
from cp_fast.integrations import transformers as cp_transformers

__all__ = ["batch_of", "model_of"]

WAYS = ("whole", "ranks")
IMAGE, VIDEO, START, END = 151_655, 151_656, 151_652, 151_653  # token ids of Qwen3-VL
TEXT = 32  # tokens between images


def model_of(small: bool, device: torch.device) -> Any:
    """Qwen3-VL's vision part and some layers of its text model, with random weights."""
    transformers: Any = importlib.import_module("transformers")
    sight: dict[str, Any] = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
    sight |= {"out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24]}
    text: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151_936}
    if small:
        sight |= {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
        sight |= {"deepstack_visual_indexes": [0]}
        text |= {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    half = int(text["head_dim"]) // 2
    angles = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
    }
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    tokens |= {"vision_start_token_id": START, "vision_end_token_id": END}
    config = transformers.Qwen3VLConfig(
        text_config=text | {"rope_parameters": angles}, vision_config=sight, **tokens, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    with device:
        model = transformers.Qwen3VLForConditionalGeneration(config)
    return model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).train()


def batch_of(model: Any, images: int, side: int) -> dict[str, torch.Tensor]:
    """A row of images of side x side patches, with text between them."""
    sight = model.config.vision_config
    device, dtype = model.device, model.dtype
    generator = torch.Generator().manual_seed(1)
    count = side * side // sight.spatial_merge_size**2
    ids: list[int] = []
    for _ in range(images):
        ids += torch.randint(10, 1000, (TEXT,), generator=generator).tolist()
        ids += [START, *[IMAGE] * count, END]
    row = torch.tensor([ids], device=device)
    width = sight.in_channels * sight.temporal_patch_size * sight.patch_size**2
    return {
        "input_ids": row,
        "attention_mask": torch.ones_like(row),
        "labels": row.masked_fill(row >= START, -100),
        "mm_token_type_ids": (row == IMAGE).int(),
        "pixel_values": torch.randn(images * side * side, width, generator=generator).to(device, dtype),
        "image_grid_thw": torch.tensor([[1, side, side]] * images, device=device),
    }


def _rank(rank: int, gpus: int, device: str, small: bool, images: int, side: int, steps: int, folder: str) -> None:
    place = connect(rank, gpus, folder, device)
    cp = cp_fast.ContextParallel(dist.group.WORLD, "all_gather")
    model = model_of(small, place)
    batch = batch_of(model, images, side)
    found: dict[str, Any] = {way: {"seconds": [], "bytes": 0} for way in WAYS}
    sums: dict[str, list[float]] = {}
    for step in range(steps + 1):  # the first one warms up, and is compared
        for way in WAYS:
            cp_transformers.prepare(model, cp, images=way)
            part = cp_transformers.shard_batch(batch, cp=cp, model=model)
            model.zero_grad()
            before = _begin(place)
            started = time.perf_counter()
            loss = model(**part).loss
            loss.backward()
            _wait(place)
            taken = torch.tensor(time.perf_counter() - started, device=place)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            most = torch.tensor(_most(place) - before, device=place, dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if step:
                found[way]["seconds"].append(float(taken))
                found[way]["bytes"] = max(found[way]["bytes"], int(most))
            else:
                sums[way] = _sums(model, loss)
    if rank == 0:
        found["compared"] = {
            way: dict(zip(("loss", "text", "vision"), some, strict=True)) for way, some in sums.items()
        }
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _sums(model: Any, loss: torch.Tensor) -> list[float]:
    """The loss, and the norms of the gradients of the text model and of the vision part, summed over the ranks."""
    total = loss.detach().double()
    dist.all_reduce(total)
    found = [float(total)]
    for inside in (False, True):
        square = torch.zeros((), device=loss.device, dtype=torch.float64)
        for name, weight in model.named_parameters():
            if weight.grad is not None and ("visual" in name) == inside:
                grad = weight.grad.float()
                dist.all_reduce(grad)
                square += grad.double().square().sum()
        found.append(float(square.sqrt()))
    return found


def _begin(place: torch.device) -> int:
    dist.barrier()
    if place.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _most(place: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if place.type == "cuda" else 0


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize()


def main(
    gpus: Annotated[int, typer.Option(help="Ranks, each with a GPU.")] = 2,
    images: Annotated[int, typer.Option(help="Images of the row.")] = 64,
    side: Annotated[int, typer.Option(help="Patches of an image's side.")] = 32,
    steps: Annotated[int, typer.Option(help="Steps of each way that are timed.")] = 5,
    small: Annotated[bool, typer.Option("--small", help="A tiny model, to try it.")] = False,
    device: Device = "cuda",
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Time a step, and print time and memory of both ways."""
    with tempfile.TemporaryDirectory() as folder:
        given = (gpus, device, small, images, side, steps, folder)
        mp.spawn(_rank, args=given, nprocs=gpus)  # pyright: ignore[reportPrivateImportUsage]
        found = json.loads((Path(folder) / "found.json").read_text())
    versions = {name: version(name) for name in ("torch", "transformers")}
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    head = {"commit": commit, **versions, "gpu": gpu, "gpus": gpus, "images": images, "side": side, "small": small}
    for way in WAYS:
        one = found[way] | {"median_s": median(found[way]["seconds"])}
        print(f"{way:6} {one['median_s'] * 1e3:8.1f} ms, {one['bytes'] / 2**30:6.2f} GiB, {found['compared'][way]}")
    print(f"whole / ranks: {median(found['whole']['seconds']) / median(found['ranks']['seconds']):.2f} of the time")
    write_json(out, head | found)


if __name__ == "__main__":
    typer.run(main)
