"""A small GPT, trained on packed documents over several processes. One file, in a few minutes on a laptop's CPU:

    python examples/train_gpt.py --processes 4 --check

Documents are the source files of your Python's own library, as bytes; every batch packs as many as fit, of whatever
lengths, without padding. The batch is spread over all processes (context parallelism), equal rows and work for each.
Where there are GPUs, processes run on them in bfloat16; with fewer GPUs than processes they share one.
`--check` trains the same on one process and compares the losses. `python -m conformance step` compares one step of it,
gradient by gradient (docs/how_to/training.md). The lines with a number are what context parallelism
adds to a training script: nine of them.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import cp_fast as cp
from conformance.runner.processes import device_of_group, own_gpu
from cp_fast.integrations.loss import token_mean

HEADS, HEAD_DIM, LAYERS = 4, 16, 2
WIDTH = HEADS * HEAD_DIM


def batches(tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Packed ids and cumulative lengths of documents. The same in all processes."""
    chance = random.Random(0)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    while True:
        texts, room = [], tokens
        while room >= 16:
            text = chance.choice(files).read_bytes()
            start, length = chance.randrange(len(text) + 1), min(room, int(math.exp(chance.uniform(2, 7))))
            if piece := text[start : start + length]:
                texts.append(torch.frombuffer(bytearray(piece), dtype=torch.uint8).long())
                room -= len(piece)
        yield torch.cat(texts), torch.tensor([0, *(len(text) for text in texts)]).cumsum(0).int()


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [t, h, d] by the positions [t] inside each document."""
    frequency = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angle = (positions[:, None] * frequency)[:, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, context: cp.ContextParallel, plan: cp.Plan) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(1)
        q, k = rope(q, plan.position_ids), rope(k, plan.position_ids)
        x = x + self.out(cp.attention(q, k, v, cp=context, plan=plan).flatten(-2))  # 1
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids: Tensor, context: cp.ContextParallel, plan: cp.Plan) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, context, plan)
        return self.head(x)


def build(context: cp.ContextParallel | None) -> tuple[GPT, Callable[[tuple[Tensor, Tensor]], Tensor], Any]:
    """Model, training step and optimizer of one process. Without a context it is made of all processes."""
    over = context or cp.ContextParallel(dist.group.WORLD, layout="balanced")  # 2
    device = device_of_group()
    torch.manual_seed(0)  # the same weights everywhere
    model = GPT().to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        """Leave the whole batch's gradients on the weights, and return its loss."""
        ids, cu = batch
        sizes: dict[str, Any] = {"heads_q": HEADS, "heads_kv": HEADS, "d_qk": HEAD_DIM, "d_v": HEAD_DIM}
        sizes |= {"dtype": model.head.weight.dtype, "device": device}
        plan = cp.make_plan(cp=over, qkv_format="thd", cu_seqlens_q=cu, **sizes)  # 3
        ids = cp.shard(ids.to(device), cp=over, plan=plan)  # 4
        labels = cp.roll(ids, -1, cp=over, plan=plan, fill_value=-100)  # 5: the next byte, on whichever rank
        logits = model(ids, over, plan).float()
        token_losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        loss = token_mean(token_losses, labels != -100, over=over)  # 6
        loss.backward()
        for grad in [weight.grad for weight in model.parameters() if weight.grad is not None]:  # 7
            dist.all_reduce(grad)  # 8
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        dist.all_reduce(loss := loss.detach())  # 9
        return loss

    return model, step, torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch() -> tuple[Tensor, Tensor]:
    """A small batch, for `python -m conformance step examples.train_gpt:build --batch examples.train_gpt:batch`."""
    return next(batches(256))


def train(rank: int, processes: int, store: str, steps: int, tokens: int) -> None:
    """One process's part of the training; rank 0 writes the losses beside the store."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        own_gpu(rank, processes)
    group: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": processes}
    dist.init_process_group("nccl" if on_gpu else "gloo", **group)
    _, step, optimizer = build(None)
    losses = []
    for _, (ids, cu) in zip(range(steps), batches(tokens), strict=False):
        optimizer.zero_grad()
        losses.append(step((ids, cu)).item())
        optimizer.step()
        if rank == 0 and len(losses) % 20 == 1:
            print(f"{processes} processes, step {len(losses):4}: loss {losses[-1]:.4f}, {len(cu) - 1} documents")
    if rank == 0:
        torch.save(losses, f"{store}.losses")
    dist.destroy_process_group()


def curve(losses: list[float], rows: int = 10, columns: int = 72) -> str:
    """The losses as a picture of text."""
    found = [losses[i * len(losses) // columns] for i in range(columns)]
    low, high = min(found), max(found)
    level = [round((loss - low) / (high - low or 1) * (rows - 1)) for loss in found]
    lines = ["".join("*" if n == row else " " for n in level) for row in reversed(range(rows))]
    return f"{high:.2f}\n" + "\n".join(line.rstrip() for line in lines) + f"\n{low:.2f}  after {len(losses)} steps"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, value in {"processes": 4, "steps": 200, "tokens": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--check", action="store_true", help="train on one process too, and compare the losses")
    given = parser.parse_args()
    curves = {}
    for processes in (given.processes, *([1] if given.check else [])):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (processes, f"{folder}/store", given.steps, given.tokens)
            spawn(train, arguments, nprocs=processes)
            curves[processes] = torch.load(f"{folder}/store.losses")
    print(curve(curves[given.processes]))
    if given.check:
        apart = max(abs(a - b) for a, b in zip(curves[given.processes], curves[1], strict=True))
        print(f"{given.processes} processes and one: losses at most {apart:.1e} apart")
        most = 0.2 if torch.cuda.is_available() else 0.01  # training amplifies the roundings of bfloat16
        assert apart < most, "the losses differ by more than rounding"


if __name__ == "__main__":
    main()
