"""Heads for sequence, and back: the two exchanges around attention in the a2a schedules (Ulysses).

home     the rank's own rows, all heads           what the user has
group    the rows of the a2a group, own heads     what attention runs on; rows in sequence order, so that a whole
                                                  sequence is one tile; padding is left out
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_fast.kernels.base import Kernels
from cp_fast.rows import Rows
from cp_ref.common.processes import during
from cp_ref.spec import Group, Parcel

__all__ = ["HeadExchange"]


@dataclass(frozen=True, slots=True)
class Side:
    """Rows and heads of one side, q or kv. Every rank of the a2a group has equally many heads."""

    home_rows: Rows
    into_home: Rows  # the same, to be written to (see `RankProgram.spare_rows`)
    home_count: int
    group_rows: Rows  # of the group's tensors: those of rank 0 of the a2a group, then of rank 1, ...
    into_group: Rows  # the same, to be written to
    group_counts: tuple[int, ...]  # how many of them are each rank's
    first_heads: tuple[int, ...]  # each rank's heads begin here; ranges of kv heads may overlap
    heads: int  # of one rank
    all_heads: int
    spare_rows: int = 0

    @property
    def group_size(self) -> int:
        """Rows of the group's tensors."""
        return sum(self.group_counts)

    @property
    def replicated(self) -> bool:
        """Whether several ranks have the same head, so that its gradients are summed."""
        return len(self.first_heads) * self.heads > self.all_heads

    def own_heads(self, place: int) -> slice:
        """The heads of one rank of the a2a group."""
        return slice(self.first_heads[place], self.first_heads[place] + self.heads)


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """One rank's exchanges. `peers[p]` is the global rank of rank p of the group; `place` is the own p."""

    peers: tuple[int, ...]
    place: int
    q: Side
    kv: Side

    def to_group(self, comm: Group, kernels: Kernels, *tensors: tuple[Side, torch.Tensor]) -> list[torch.Tensor]:
        """Each x [t, all heads, ...] -> [group rows, own heads, ...], all in one exchange.

        Packed by one kernel (rows gathered, heads of one peer made contiguous), unpacked by another (into sequence
        order).
        """
        sends, recvs, arrivals = [], [], []
        for number, (side, x) in enumerate(tensors):
            packed = kernels.heads_to_front(x, side.home_rows, side.first_heads, side.heads)  # [p, n, heads, ...]
            arrived = x.new_empty(side.group_size, side.heads, *x.shape[2:])
            boxes = arrived.split(side.group_counts)
            boxes[self.place].copy_(packed[self.place])
            for p, peer in enumerate(self.peers):
                if p != self.place:
                    sends += [Parcel(peer, number, packed[p])] if side.home_count else []
                    recvs += [Parcel(peer, number, boxes[p])] if side.group_counts[p] else []
            arrivals.append(arrived)
        with during("heads to their ranks, for sequence"):
            comm.exchange(sends, recvs).wait()
        return [_put(kernels, x, side) for (side, _), x in zip(tensors, arrivals, strict=True)]

    def to_home(self, comm: Group, kernels: Kernels, *tensors: tuple[Side, torch.Tensor, torch.Tensor]) -> None:
        """Each (side, y [group rows, own heads, ...], home [t + spare rows, all heads, ...]): y's rows to their owners'
        home, in place.

        A head comes from one rank and is written; replicated kv heads come from several, and their sum is added to
        home.
        """
        sends, recvs, arrivals = [], [], []
        for number, (side, y, _) in enumerate(tensors):
            (packed,) = kernels.take_rows([y], side.group_rows)
            boxes = packed.split(side.group_counts)
            arrived = y.new_empty(len(self.peers), side.home_count, *y.shape[1:])
            arrived[self.place].copy_(boxes[self.place])
            for p, peer in enumerate(self.peers):
                if p != self.place:
                    sends += [Parcel(peer, number, boxes[p].contiguous())] if side.group_counts[p] else []
                    recvs += [Parcel(peer, number, arrived[p])] if side.home_count else []
            arrivals.append(arrived)
        with during("heads back home"):
            comm.exchange(sends, recvs).wait()
        for (side, _, home), arrived in zip(tensors, arrivals, strict=True):
            kernels.heads_to_back_(home, arrived, side.into_home, side.first_heads, side.replicated)


def _put(kernels: Kernels, x: torch.Tensor, side: Side) -> torch.Tensor:
    """The rows of x, which are all rows of the result, at their places; x itself where they are in order."""
    if isinstance(side.into_group, slice):
        return x
    whole = x.new_empty(x.shape[0] + side.spare_rows, *x.shape[1:])
    kernels.put_rows_([whole], [x], side.into_group)
    return whole[: x.shape[0]]
