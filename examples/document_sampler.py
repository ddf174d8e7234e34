"""Documents of mixed lengths: each on as many processes as it needs, and all in one step:

    torchrun --nproc-per-node 4 examples/document_sampler.py
    python -m conformance step examples.document_sampler:build --batch examples.document_sampler:batch \
        --cp-size 2 --loss sum

`python examples/document_sampler.py` is the same on one process, with transformers alone: the losses are the same but
for rounding. A small Llama with random weights; needs transformers.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import cp_fast as cp
from cp_fast.integrations.loss import count_tokens
from cp_fast.integrations.sampler import DocumentSampler, GroupsOfAllSizes, pack
from cp_fast.integrations.transformers import prepare, shard_batch

VOCABULARY, TOKENS, DOCUMENTS = 64, 48, 10  # TOKENS a rank and round


def batch() -> list[list[int]]:
    """Documents of 6 to 90 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = [90, 7, 31, 12, 64, 6, 22, 41, 9, 18, 6, 75, 15, 28, 11, 6, 50, 8, 33, 20]
    return [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def build(context: cp.ContextParallel | None) -> tuple[Any, Any, Any]:
    """A model, its step over all documents and its optimizer; without a context with transformers alone."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, num_attention_heads=4, num_key_value_heads=2)
    model: Any = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    contexts = None if context is None else GroupsOfAllSizes(context.group, layout="balanced")
    if context is not None:
        prepare(model, context)

    def step(documents: list[list[int]]) -> torch.Tensor:
        total = torch.zeros(())
        if contexts is None:
            count = sum(len(ids) - 1 for ids in documents)
            for ids in documents:
                x = torch.tensor([ids])
                loss = model(input_ids=x, labels=x, num_items_in_batch=count).loss
                loss.backward()
                total += loss.detach()
            return total
        lengths, ranks = [len(ids) for ids in documents], len(dist.get_process_group_ranks(dist.group.WORLD))
        how: dict[str, Any] = {"rank": dist.get_rank(), "ranks": ranks, "tokens": TOKENS, "documents": len(documents)}
        [rounds] = DocumentSampler(lengths, **how)
        parts: list[dict[str, Any]] = []
        for size, chosen in rounds:
            row = pack([{"input_ids": documents[number]} for number in chosen])
            parts.append(shard_batch(row, cp=contexts[size], model=model))
        counted = torch.cat([(part["labels"] != -100).flatten() for part in parts])
        count = count_tokens(counted, over=dist.group.WORLD)
        for part in parts:
            loss = model(**part | {"num_items_in_batch": count}).loss
            loss.backward()
            total += loss.detach()
        for weight in model.parameters():  # the gradients of all ranks add up to those of the step
            dist.all_reduce(weight.grad)
        return total

    return model, step, optimizer


def main() -> None:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    _, step, optimizer = build(cp.ContextParallel(dist.group.WORLD) if several else None)
    losses: list[torch.Tensor] = []
    for _ in range(2):
        for start in range(0, len(batch()), DOCUMENTS):
            losses.append(step(batch()[start : start + DOCUMENTS]))
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
