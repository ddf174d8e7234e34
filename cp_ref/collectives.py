"""Small collectives, spelled out as exchanges: everyone to everyone, combined in rank order, so equal on every rank."""

from __future__ import annotations

from functools import reduce

import torch

from cp_ref.spec import Group, Parcel

__all__ = ["all_gather", "all_reduce_max", "all_reduce_sum", "all_to_all"]


def all_to_all(group: Group, parts: list[torch.Tensor], like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give `parts[r]` to rank r and return what each rank gave; `like[r]` has the shape and dtype of rank r's part."""
    peers = [r for r in range(group.size) if r != group.rank]
    boxes = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]
    sends = [Parcel(r, 0, parts[r].contiguous()) for r in peers]
    group.exchange(sends, [Parcel(r, 0, boxes[r]) for r in peers]).wait()
    boxes[group.rank] = parts[group.rank]
    return boxes


def all_gather(group: Group, x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's x (of one shape), by rank."""
    return all_to_all(group, [x] * group.size, [x] * group.size)


def all_reduce_sum(group: Group, x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    return reduce(torch.add, all_gather(group, x))


def all_reduce_max(group: Group, x: torch.Tensor) -> torch.Tensor:
    """The elementwise maximum over all ranks."""
    return reduce(torch.maximum, all_gather(group, x))
