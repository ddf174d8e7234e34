"""Small collectives, spelled out as exchanges: everyone to everyone, combined in rank order, so equal on every rank."""

from __future__ import annotations

from functools import reduce

import torch

from cp_ref.spec import Group, PairGroup, Parcel

__all__ = ["all_gather", "all_reduce_max", "all_reduce_sum"]


def all_gather(group: Group, x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's x (of one shape and dtype), by rank."""
    if isinstance(group, PairGroup):  # the rows gather, then the columns gather the rows
        rows = all_gather(group.p2p, torch.stack(all_gather(group.a2a, x)))
        return [of_rank for row in rows for of_rank in row]
    peers = [r for r in range(group.size) if r != group.rank]
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size)]
    found[group.rank] = x
    sends = [Parcel(r, 0, x.contiguous()) for r in peers]
    group.exchange(sends, [Parcel(r, 0, found[r]) for r in peers]).wait()
    return found


def all_reduce_sum(group: Group, x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    return reduce(torch.add, all_gather(group, x))


def all_reduce_max(group: Group, x: torch.Tensor) -> torch.Tensor:
    """The elementwise maximum over all ranks."""
    return reduce(torch.maximum, all_gather(group, x))
