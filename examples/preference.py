"""DPO, KTO, GRPO and distillation on packed documents that are spread over all processes:

    torchrun --nproc-per-node 2 examples/preference.py --loss dpo
    python -m conformance step examples.preference:dpo --batch examples.preference:batch --cp-size 2 --loss sum

Each loss is a few lines over `token_log_probs` (one number a token of this rank) and `sequence_sum` (one number a
document, the same on all ranks). `python examples/preference.py --loss dpo` is the same on one process, with
transformers alone: the losses are the same but for rounding. A small Llama with random weights; needs transformers.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

import cp_fast as cp
from cp_fast.integrations.sequences import sequence_sum, token_log_probs
from cp_fast.integrations.transformers import prepare, shard_batch

VOCABULARY, PROMPT = 64, 3
LENGTHS = (17, 12, 9, 21, 6, 15)  # of documents: answers to three prompts, a better and a worse one each
BETA = 0.5
FILL = {
    "reference": 0.0,
    "old": 0.0,
    "advantages": 0.0,
    "teacher": 0.0,
}  # further tensors of the batch, one row a token


def batch() -> dict[str, torch.Tensor]:
    """One packed row: prompts are not learnt. The log-probabilities of other models come with it, one a token."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (1, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    labels = ids.masked_fill(positions < PROMPT, -100)
    learnt = F.pad(labels[:, 1:] != -100, (0, 1))
    noise = torch.randn(4, *ids.shape, generator=generator)
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": labels,
        "reference": (noise[0] - 4) * learnt,
        "old": (noise[1] * 0.2 - 4) * learnt,
        "advantages": noise[2] * learnt,
        "teacher": torch.randn(*ids.shape, VOCABULARY, generator=generator),
    }


class Ranks:
    """What the losses read of a batch, over ranks."""

    def __init__(self, context: cp.ContextParallel, model: Any, whole: dict[str, torch.Tensor]) -> None:
        part = shard_batch(whole, cp=context, model=model, fill=FILL)
        self.others = {name: part.pop(name) for name in FILL}
        self.model, self.part, self.share = model, part, 1 / context.size
        self.learnt = part["shift_labels"] != -100

    def log_probs(self) -> torch.Tensor:
        return token_log_probs(self.model, self.part)

    def logits(self) -> torch.Tensor:
        return self.model(**{n: x for n, x in self.part.items() if "labels" not in n}).logits

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        return sequence_sum(values, self.part)


class Alone:
    """The same on one process, with transformers alone: document by document."""

    def __init__(self, model: Any, whole: dict[str, torch.Tensor]) -> None:
        starts = [*(whole["position_ids"][0] == 0).nonzero()[:, 0].tolist(), whole["input_ids"].shape[1]]
        self.model, self.ids, self.spans, self.share = model, whole["input_ids"], list(pairwise(starts)), 1.0
        self.others = {name: whole[name] for name in FILL}
        self.targets = F.pad(whole["labels"][:, 1:], (0, 1), value=-100)
        self.learnt = self.targets != -100

    def log_probs(self) -> torch.Tensor:
        logits = self.logits().flatten(0, 1).float()
        return -F.cross_entropy(logits, self.targets.flatten(), reduction="none").view_as(self.targets)

    def logits(self) -> torch.Tensor:
        return torch.cat([self.model(input_ids=self.ids[:, a:b]).logits for a, b in self.spans], dim=1)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values[:, a:b].sum() for a, b in self.spans])


def dpo_loss(of: Any) -> torch.Tensor:
    """The better answers of the pairs come first. Of all pairs, on every rank: its share is a part of the step's."""
    better, worse = of.sums(of.log_probs() - of.others["reference"]).view(-1, 2).T
    return -F.logsigmoid(BETA * (better - worse)).mean() * of.share


def kto_loss(of: Any) -> torch.Tensor:
    """Each answer alone is good or bad, beside the mean of all of them. (The paper takes the mean of answers to other
    prompts, which would be further documents of the batch.)
    """
    rewards = of.sums(of.log_probs() - of.others["reference"])
    base = rewards.mean().clamp(min=0).detach()
    good = torch.tensor([1.0, -1.0], device=rewards.device).repeat(len(rewards) // 2)
    return (1 - torch.sigmoid(BETA * good * (rewards - base))).mean() * of.share


def grpo_loss(of: Any) -> torch.Tensor:
    """The clipped objective of each token, its mean over each answer, and the mean of the answers."""
    ratio = torch.exp(of.log_probs() - of.others["old"])
    advantages = of.others["advantages"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * of.learnt
    return -(of.sums(gain) / of.sums(of.learnt.float()).clamp(min=1)).mean() * of.share


def distillation_loss(of: Any) -> torch.Tensor:
    """The divergence from the teacher's distribution: a sum over tokens, of which a rank has a part already."""
    mine, theirs = (F.log_softmax(x.float(), dim=-1) for x in (of.logits(), of.others["teacher"]))
    tokens = (theirs.exp() * (theirs - mine)).sum(dim=-1) * of.learnt
    return tokens.sum() / of.sums(of.learnt.float()).sum().detach()


LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "dpo": dpo_loss,
    "kto": kto_loss,
    "grpo": grpo_loss,
    "distillation": distillation_loss,
}


def build(name: str, context: cp.ContextParallel | None) -> tuple[Any, Any, Any]:
    """A model, its step and its optimizer; without a context with transformers alone."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, num_attention_heads=4, num_key_value_heads=2)
    model: Any = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    if context is not None:
        prepare(model, context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(whole: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = LOSSES[name](Alone(model, whole) if context is None else Ranks(context, model, whole))
        loss.backward()
        if context is not None and dist.is_initialized():
            for weight in model.parameters():  # the gradients of all ranks add up to those of the step
                dist.all_reduce(weight.grad)
        optimizer.step()
        return loss.detach()

    return model, step, optimizer


def dpo(context: cp.ContextParallel | None) -> tuple[Any, Any, Any]:
    """For `python -m conformance step`."""
    return build("dpo", context)


def kto(context: cp.ContextParallel | None) -> tuple[Any, Any, Any]:
    """For `python -m conformance step`."""
    return build("kto", context)


def grpo(context: cp.ContextParallel | None) -> tuple[Any, Any, Any]:
    """For `python -m conformance step`."""
    return build("grpo", context)


def distillation(context: cp.ContextParallel | None) -> tuple[Any, Any, Any]:
    """For `python -m conformance step`."""
    return build("distillation", context)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--loss", choices=LOSSES, default="dpo")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    _, step, _ = build(given.loss, cp.ContextParallel(dist.group.WORLD, layout="balanced") if several else None)
    losses = [step(batch()) for _ in range(given.steps)]
    for loss in losses if several else []:
        dist.all_reduce(loss)
    if not several or dist.get_rank() == 0:
        print("losses", *(f"{float(loss):.4f}" for loss in losses))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
