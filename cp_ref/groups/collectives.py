"""Small collectives, spelled out as exchanges: everyone to everyone, combined in rank order, so equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from cp_ref.groups.context import ContextParallel
from cp_ref.groups.group import Group, PairGroup, Parcel
from cp_ref.groups.process_groups import error_context

__all__ = [
    "all_gather",
    "all_reduce_max",
    "all_reduce_sum",
    "all_to_all",
    "offset_grad",
]


def all_to_all(group: Group, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send `parts[r]` to rank r, all of one shape and dtype; return the part received from each rank."""
    if isinstance(group, PairGroup):
        return _pair_all_to_all(group, parts)
    peers = [r for r in range(group.size) if r != group.rank]
    buffers = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in parts]
    buffers[group.rank] = parts[group.rank]
    sends = [Parcel(r, 0, parts[r].contiguous()) for r in peers]
    group.exchange(sends, [Parcel(r, 0, buffers[r]) for r in peers]).wait()
    return buffers


def _pair_all_to_all(group: PairGroup, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """In two hops: along the row to the column that a part goes to, then along that column."""
    across, along = group.a2a.size, group.p2p.size
    to_columns = [torch.stack([parts[p * across + a] for p in range(along)]) for a in range(across)]
    from_row = all_to_all(group.a2a, to_columns)  # [a]: the parts of rank a of this row for this column, by its rows
    to_rows = [torch.stack([from_row[a][p] for a in range(across)]) for p in range(along)]
    return [part for row in all_to_all(group.p2p, to_rows) for part in row]


def all_gather(group: Group, x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's x (of one shape and dtype), by rank."""
    return all_to_all(group, [x] * group.size)


def all_reduce_sum(group: Group, x: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's x (small: h_q values), added in rank order."""
    with error_context("a sum over all ranks"):
        return reduce(torch.add, all_gather(group, x))


def all_reduce_max(group: Group, x: torch.Tensor) -> torch.Tensor:
    """The elementwise maximum of every rank's x."""
    with error_context("a maximum over all ranks"):
        return reduce(torch.maximum, all_gather(group, x))


def offset_grad(cp: ContextParallel, share: torch.Tensor) -> torch.Tensor:
    """The gradient of softmax_offset [h_q], of the part that comes from this rank's queries: see `ContextParallel`."""
    return all_reduce_sum(cp.comm, share) if cp.softmax_offset_grad == "total" else share
