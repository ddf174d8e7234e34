"""Right training steps, one for each habit of trainers. Each is the same step over ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import cp_fast
from cp_fast.integrations.loss import loss_for_backward, token_mean

__all__ = ["HABITS", "batch_of", "build_of"]

WORDS, HEADS, DIM = 29, 2, 8
WIDTH = HEADS * DIM
Step = Callable[[Any], Tensor]


def batch_of() -> Tensor:
    """Two sequences."""
    return torch.randint(0, WORDS, (2, 24), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cp: Any) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, DIM)).unbind(-3)
        return x + self.out(cp_fast.attention(q, k, v, cp=cp).flatten(-2))


class Scaled(nn.Module):
    """A weight beside a module called `module`: no wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.module = nn.Parameter(torch.ones(WORDS, WIDTH)), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) + F.linear(x, self.weight)


class LoRA(nn.Module):
    """A frozen linear layer and its update of rank two."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.plain = plain.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, plain.in_features) / 4)
        self.up = nn.Parameter(torch.randn(plain.out_features, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) + x @ self.down.T @ self.up.T


class GPT(nn.Module):
    """[b, s/cp] -> logits."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=habit == "sparse embeddings")
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head: Any = Scaled() if habit == "a child called module" else nn.Linear(WIDTH, WORDS, bias=False)
        if habit == "tied weights":
            self.head.weight = self.embed.weight
        if habit == "LoRA":
            self.requires_grad_(False)
            for block in self.blocks:
                block.qkv = LoRA(cast(nn.Linear, block.qkv))
        self.register_buffer("seen", torch.zeros(()))
        self.habit = habit

    def forward(self, ids: Tensor, cp: Any) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if self.habit == "checkpointing":
                x = checkpoint(block, x, cp, use_reentrant=False)
            elif self.habit == "reentrant checkpointing":
                x = checkpoint(block, x, cp, use_reentrant=True)
            else:
                x = block(x, cp)
        return self.head(x)


HABITS = (
    "plain",
    "accumulation",
    "clipping",
    "GradScaler",
    "GradScaler that skips",
    "EMA",
    "tied weights",
    "LoRA",
    "autocast",
    "autocast and checkpointing",
    "casts by hand",
    "compile",
    "checkpointing",
    "reentrant checkpointing",
    "DDP",
    "FSDP",
    "HSDP",
    "FSDP in mixed precision",
    "LBFGS closure",
    "SGD closure",
    "skips by itself",
    "an optimizer of its own",
    "sparse embeddings",
    "pops from its batch",
    "changes its batch",
    "a child called module",
    "a counter of tokens",
    "z-loss",
    "two losses",
    "noise of the whole batch",
    "scheduler",
)


def build_of(cp: Any, habit: str) -> Any:
    """(model, step) or (model, step, optimizer) of a habit, one of `HABITS`."""
    context = cp or cp_fast.ContextParallel(dist.group.WORLD)
    torch.manual_seed(0)
    plain = GPT(habit.replace("autocast and ", ""))
    model: Any = plain
    over: Any = None
    world = dist.get_world_size()
    if habit == "compile":
        for block in plain.blocks:
            block.compile(backend="aot_eager")
    if habit == "DDP":
        model = over = DistributedDataParallel(plain)
    if "SDP" in habit:
        sizes = (world // 2 or 1, min(world, 2)) if habit == "HSDP" else (world,)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        low = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "mixed" in habit else MixedPrecisionPolicy()
        for block in plain.blocks:
            fully_shard(block, mesh=mesh, mp_policy=low)
        model = over = fully_shard(plain, mesh=mesh, mp_policy=low)
    learnt = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer: Any = torch.optim.SGD(learnt, lr=0.1)
    if habit == "LBFGS closure":
        optimizer = torch.optim.LBFGS(learnt, lr=0.1, max_iter=2)
    elif habit in ("accumulation", "clipping", "EMA", "compile", "tied weights", "autocast", "FSDP"):
        optimizer = torch.optim.AdamW(learnt, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38 if "skips" in habit else 2.0**10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (n + 1))
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if habit == "EMA" else None
    low_precision = habit.startswith("autocast")

    def backward(ids: Tensor, share: float = 1.0) -> Tensor:
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        groups = world // context.size
        ids, labels = (x.chunk(groups)[dist.get_rank() // context.size] for x in (ids, labels))
        ids, labels = cp_fast.shard(ids, cp=context), cp_fast.shard(labels, cp=context)
        with torch.autocast("cpu", torch.bfloat16, enabled=low_precision):
            if habit == "casts by hand":
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(ids, context)
            else:
                logits = model(ids, context)
        logits = logits.float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        if habit == "z-loss":
            losses = losses + 0.1 * logits.logsumexp(-1).square() * (labels != -100)
        loss = token_mean(losses, labels != -100, over=dist.group.WORLD) * share
        if habit == "two losses":
            loss = loss + 0.1 * token_mean(losses.square(), labels != -100, over=dist.group.WORLD)
        if habit == "noise of the whole batch":
            loss = loss * torch.rand(())
        whole = loss if over is None else loss_for_backward(loss, averaged_over=over)
        (scaler.scale(whole * 40) if "GradScaler" in habit else whole).backward()
        dist.all_reduce(loss := loss.detach())
        return loss

    def reduced() -> None:
        for weight in learnt:
            if over is None and weight.grad is not None:
                dist.all_reduce(weight.grad)

    def step(batch: Any) -> Tensor:
        ids = batch.pop("ids") if isinstance(batch, dict) else batch
        if habit == "changes its batch":
            ids.add_(1).remainder_(WORDS)
        if "closure" in habit:

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = backward(ids)
                reduced()
                return loss

            return optimizer.step(closure)
        if habit == "accumulation":
            loss = torch.stack([backward(part, 0.5) for part in ids.chunk(2)]).sum()
        else:
            loss = backward(ids)
        reduced()
        if habit == "a counter of tokens":
            plain.seen += ids.numel()
        if "GradScaler" in habit:
            scaler.unscale_(optimizer)
        if "clipping" in habit:
            nn.utils.clip_grad_norm_(learnt, 0.1)
        if habit == "skips by itself":
            if steps.append(0) or len(steps) == 1:
                optimizer.zero_grad()
                return loss
            optimizer.step()
            optimizer.zero_grad()
        if "GradScaler" in habit:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        elif habit in ("scheduler", "an optimizer of its own", "EMA", "clipping"):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if average is not None:
            average.update_parameters(plain)
        return loss

    steps: list[int] = []
    if habit == "pops from its batch":
        return model, lambda ids: step({"ids": ids}) if isinstance(ids, Tensor) else step(ids), optimizer
    if habit == "an optimizer of its own":
        return model, step
    return model, step, optimizer
