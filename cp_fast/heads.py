"""Heads for sequence, and back: the two exchanges around attention in the a2a schedules (Ulysses).

home     the rank's own rows, all heads           what the user has
group    the rows of the a2a group, own heads     what attention runs on; rows in sequence order, so that a whole
                                                  sequence is one tile; padding is left out
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cp_fast.rows import Frame, Rows, rows_of, take
from cp_ref.spec import Group, Parcel, Units, common, head_ranges, real_rows

__all__ = ["HeadExchange"]


@dataclass(frozen=True, slots=True)
class Side:
    """Rows and heads of one side, q or kv. `group_rows[p]` and `heads[p]` are those of rank p of the a2a group."""

    home_rows: Rows
    home_count: int
    group_rows: tuple[Rows, ...]
    group_counts: tuple[int, ...]
    heads: tuple[slice, ...]
    all_heads: int

    @property
    def group_size(self) -> int:
        """Rows of the group's tensors."""
        return sum(self.group_counts)


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """One rank's exchanges. `peers[p]` is the global rank of rank p of the group; `place` is the own p."""

    peers: tuple[int, ...]
    place: int
    q: Side
    kv: Side

    @staticmethod
    def compile(
        units: Units, rank: int, home: tuple[Frame, Frame], group: tuple[Frame, Frame], device: torch.device
    ) -> HeadExchange:
        """Look the rows up. `home` and `group` are the frames (of q, of kv) of the local and the group's tensors."""
        problem = units.problem
        first = rank - rank % problem.a2a_size
        peers = tuple(range(first, first + problem.a2a_size))
        sides = []
        for number, side in enumerate(("q", "kv")):
            active = units.active(rank // problem.a2a_size, side)
            rows = [common(real_rows(problem, peer, side), active) for peer in peers]
            home_spans = [span for piece in rows[rank - first] for span in home[number].spans(piece)]
            group_spans = [[span for piece in pieces for span in group[number].spans(piece)] for pieces in rows]
            counts = tuple(sum(p.stop - p.start for p in pieces) for pieces in rows)
            sides.append(
                Side(
                    rows_of(home_spans, device),
                    counts[rank - first],
                    tuple(rows_of(spans, device) for spans in group_spans),
                    counts,
                    tuple(slice(*head_ranges(problem, p)[number]) for p in range(len(peers))),
                    (problem.heads_q, problem.heads_kv)[number],
                )
            )
        return HeadExchange(peers, rank - first, sides[0], sides[1])

    def to_group(self, comm: Group, *tensors: tuple[Side, torch.Tensor]) -> list[torch.Tensor]:
        """Each x [t, all heads, ...] -> [group rows, own heads, ...], all in one exchange."""
        sends, recvs, boxes = [], [], []
        for number, (side, x) in enumerate(tensors):
            mine = take(x, side.home_rows)
            own = side.heads[self.place]
            for p, peer in enumerate(self.peers):
                box = x.new_empty(side.group_counts[p], own.stop - own.start, *x.shape[2:])
                boxes.append(box)
                if p == self.place:
                    box.copy_(mine[:, own])
                    continue
                if side.home_count:
                    sends.append(Parcel(peer, number, mine[:, side.heads[p]].contiguous()))
                if side.group_counts[p]:
                    recvs.append(Parcel(peer, number, box))
        comm.exchange(sends, recvs).wait()
        return [
            _assemble(side, x, boxes[n * len(self.peers) : (n + 1) * len(self.peers)])
            for n, (side, x) in enumerate(tensors)
        ]

    def to_home(self, comm: Group, *tensors: tuple[Side, torch.Tensor, torch.Tensor]) -> None:
        """Each (side, y [group rows, own heads, ...], home [t, all heads, ...]): y's rows to their owners' home, in
        place.

        A query head comes from one rank and is written; a kv head may come from several, and is added to home.
        """
        sends, recvs, arrivals = [], [], []
        for number, (side, y, home) in enumerate(tensors):
            for p, peer in enumerate(self.peers):
                heads = side.heads[p]
                if p == self.place:
                    arrivals.append((side, home, heads, take(y, side.group_rows[p])))
                    continue
                if side.group_counts[p]:
                    sends.append(Parcel(peer, number, take(y, side.group_rows[p]).contiguous()))
                if side.home_count:
                    box = y.new_empty(side.home_count, heads.stop - heads.start, *y.shape[2:])
                    recvs.append(Parcel(peer, number, box))
                    arrivals.append((side, home, heads, box))
        comm.exchange(sends, recvs).wait()
        for side, home, heads, rows in arrivals:
            if side is self.q:
                home[side.home_rows, heads] = rows
            else:
                home[side.home_rows, heads] += rows


def _assemble(side: Side, like: torch.Tensor, boxes: Sequence[torch.Tensor]) -> torch.Tensor:
    """The ranks' rows into sequence order."""
    whole = like.new_empty(side.group_size, *boxes[0].shape[1:])
    for rows, box in zip(side.group_rows, boxes, strict=True):
        whole[rows] = box
    return whole
