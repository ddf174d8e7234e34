"""A transformer of video over several processes: a few training steps, then a video is denoised:

    torchrun --nproc-per-node 2 examples/video.py
    python -m conformance step examples.video:build --batch examples.video:batch --cp-size 2

`python examples/video.py` is the same on one process, with diffusers alone: losses and the video are the same but for
rounding. A small Wan with random weights and LoRA adapters; 3 x 5 x 7 = 105 tokens, which no number of ranks but 3, 5
and 7 divides. Needs diffusers and peft.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from peft import LoraConfig

import cp_fast as cp
from conformance.runner.processes import device_of_group
from cp_fast.integrations import diffusers as cp_diffusers

FRAMES, HEIGHT, WIDTH, TEXT = 3, 10, 14, 7
Batch = dict[str, torch.Tensor]


def batch() -> Batch:
    """Latents of two videos, noise, times and texts: the same on all ranks, so all of them seed alike."""
    generator = torch.Generator().manual_seed(0)
    shape = 2, 4, FRAMES, HEIGHT, WIDTH
    latents, noise = (torch.randn(shape, generator=generator) for _ in range(2))
    texts = torch.randn(2, TEXT, 16, generator=generator)
    return {"latents": latents, "noise": noise, "time": torch.tensor([0.3, 0.8]), "texts": texts}


def build(context: cp.ContextParallel | None) -> tuple[Any, Any, Any]:
    """A model, its step and its optimizer; without a context with diffusers alone."""
    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
    sizes |= {"text_dim": 16, "freq_dim": 16, "ffn_dim": 48, "num_layers": 2, "rope_max_seq_len": 32}
    torch.manual_seed(0)
    model: Any = WanTransformer3DModel(**sizes)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False))
    model.enable_gradient_checkpointing()
    device = device_of_group()
    model.to(device)
    if context is not None:
        cp_diffusers.use(model, context)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)

    def step(rows: Batch) -> torch.Tensor:
        rows = {name: x.to(device, model.dtype) for name, x in rows.items()}
        time = rows["time"][:, None, None, None, None]
        noisy = (1 - time) * rows["latents"] + time * rows["noise"]
        out = model(noisy, timestep=1000 * rows["time"], encoder_hidden_states=rows["texts"], return_dict=False)[0]
        loss = (out - (rows["noise"] - rows["latents"])).float().square().mean()
        ranks = 1 if context is None else context.size
        (loss / ranks).backward()  # every rank has the whole loss, and adds its share of each gradient
        for weight in trained if context is not None else []:
            dist.all_reduce(weight.grad)
        return loss.detach()

    return model, step, optimizer


@torch.no_grad()
def denoise(model: Any, steps: int = 4, guidance: float = 3.0) -> torch.Tensor:
    """A video from noise, with guidance: the text and an empty one are a batch."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 4, FRAMES, HEIGHT, WIDTH, generator=generator).to(model.device, model.dtype)
    text = torch.randn(1, TEXT, 16, generator=generator).to(model.device, model.dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(steps)
    for time in scheduler.timesteps:
        both = torch.cat([latents, latents]), time.expand(2).to(model.device), torch.cat([text, 0 * text])
        seen, unseen = model(*both, return_dict=False)[0].chunk(2)
        latents = scheduler.step(unseen + guidance * (seen - unseen), time, latents, return_dict=False)[0]
    return latents


def main() -> None:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    model, step, optimizer = build(cp.ContextParallel(dist.group.WORLD) if several else None)
    losses: list[torch.Tensor] = []
    for _ in range(3):
        losses.append(step(batch()))
        optimizer.step()
        optimizer.zero_grad()
    video = denoise(model)
    if not several or dist.get_rank() == 0:
        print("losses", *(f"{float(loss):.4f}" for loss in losses))
        print("video", *(f"{float(x):.4f}" for x in (video.mean(), video.std())))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
