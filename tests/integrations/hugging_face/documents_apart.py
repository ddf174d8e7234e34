"""Models that have to keep documents apart: over ranks, against one process that runs the documents one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from cp_fast.integrations import token_batches
from cp_fast.integrations import transformers as ours

__all__ = ["Part", "alone", "batches", "check", "grads_of", "part_of", "parts_of", "step_of"]

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""A rank's logits with the numbers of their tokens in the batch (-100: padding), its loss, and its gradients."""


def batches() -> dict[str, dict[str, torch.Tensor]]:
    """Packed documents, one shorter than a convolution; a padded and a full row; one sequence."""
    lengths = [11, 2, 18, 1]
    generator = torch.Generator().manual_seed(1)
    ids, rows = (torch.randint(3, 50, shape, generator=generator) for shape in ((1, 32), (2, 15)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    mask = (torch.arange(15) < torch.tensor([[15], [6]])).long()
    return {
        "packed": {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions},
        "padded": {"input_ids": rows, "labels": rows.masked_fill(mask == 0, -100), "attention_mask": mask},
        "one": {"input_ids": ids, "labels": ids},
    }


def alone(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """One process with transformers' own functions: logits of real tokens [t, words], the loss and its gradients.

    It runs the documents one by one, because without kernels for a GPU those functions cannot keep them apart.
    """
    model.zero_grad()
    rows = [batch]
    if "position_ids" in batch:
        starts = [*(batch["position_ids"][0] == 0).nonzero()[:, 0].tolist(), batch["input_ids"].shape[1]]
        rows = [{n: x[:, a:b] for n, x in batch.items()} for a, b in pairwise(starts)]
    elif (mask := batch.get("attention_mask")) is not None:
        real = {n: x for n, x in batch.items() if n != "attention_mask"}
        rows = [{n: x[i : i + 1, :length] for n, x in real.items()} for i, length in enumerate(mask.sum(dim=1))]
    count = torch.tensor(sum(int((row["labels"][:, 1:] != -100).sum()) for row in rows))
    found = [model(**row, use_cache=False, num_items_in_batch=count) for row in rows]
    loss = torch.stack([out.loss for out in found]).sum()
    loss.backward()
    return torch.cat([out.logits[0] for out in found]).detach(), loss.detach(), grads_of(model)


def grads_of(model: Any) -> dict[str, torch.Tensor]:
    """What a backward pass has left."""
    return {n: w.grad for n, w in model.named_parameters() if w.grad is not None}


def part_of(model: Any, kind: str, cp: Any) -> Part:
    """A rank's part of a model's results of one of `batches`."""
    return _part(ours.prepare(model, cp), batches()[kind], cp)


def parts_of(model: Any, cp: Any) -> dict[str, Part]:
    """A rank's parts of each of `batches`, of a model that is prepared once."""
    model = ours.prepare(model, cp)
    return {kind: _part(model, batch, cp) for kind, batch in batches().items()}


def _part(model: Any, batch: dict[str, torch.Tensor], cp: Any) -> Part:
    model.zero_grad()
    out = model(**ours.shard_batch(batch, cp=cp, model=model))
    out.loss.backward()
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    numbers = (real.flatten().cumsum(0) - 1).view_as(real).masked_fill(real == 0, -100)
    numbers = token_batches.shard_tokens({**batch, "labels": numbers}, cp=cp, shift_labels=False)["labels"]
    return out.logits.detach().flatten(0, 1), numbers.flatten(), out.loss.detach(), grads_of(model)


def check(model: Any, kind: str, parts: list[Part]) -> None:
    """The ranks' logits are those of one process with this model; their losses and gradients add up to its."""
    logits, loss, grads = alone(model, batches()[kind])
    mine = {int(n): row for rows, numbers, _, _ in parts for n, row in zip(numbers, rows, strict=True) if n >= 0}
    assert sorted(mine) == list(range(len(logits)))
    torch.testing.assert_close(torch.stack([mine[n] for n in range(len(logits))]), logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.stack([part for _, _, part, _ in parts]).sum(), loss, rtol=1e-5, atol=1e-5)
    assert parts[0][3].keys() == grads.keys()
    for weight, grad in grads.items():
        found = torch.stack([part[weight] for *_, part in parts]).sum(0)
        error, size = float((found - grad).norm()), float(grad.norm())
        assert error <= 1e-4 * size + 1e-6, f"{type(model).__name__} {kind} {weight}: off by {error:.2e} of {size:.2e}"


def step_of(model: Any, cp: Any, leaks: bool = False) -> tuple[Any, Callable[..., torch.Tensor]]:
    """A loop of one's own, for `compare_step`. leaks: the one process does not keep documents apart."""
    if cp is not None:
        ours.prepare(model, cp)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if cp is None and leaks:
            part = model(**batch, use_cache=False).loss
            part.backward()
        elif cp is None:
            part = alone(model, batch)[1]
        else:
            part = model(**ours.shard_batch(batch, cp=cp, model=model)).loss
            part.backward()
            for weight in model.parameters():
                if weight.grad is not None:
                    dist.all_reduce(weight.grad)
            dist.all_reduce(part := part.detach())
        return part

    return model, step
