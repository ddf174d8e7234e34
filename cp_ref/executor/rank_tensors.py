"""The tensors that one rank knows, of global size, NaN where it has nothing.

A row of these tensors is a row of the packed global buffer, on every rank. So a piece of a message, a side of a tile
and a fragment of the rank's own tokens are all plain slices, and whatever a schedule forgot to send shows as NaN in the
result.

    operands   q, kv = (k, v), do = (dout, lse, delta)      in the tensors' own dtypes, NaN until they arrive
    results    out = (out, lse), dq, dkv = (dk, dv)         float32 or float64; out is merged by lse, others are added
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cp_ref.contract.group import Parcel
from cp_ref.executor.merge_partials import merge
from cp_ref.schedules.ownership import Fragments
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import OPERANDS, RESULTS, Message, Pieces, side_of

__all__ = ["World", "own_fragments"]


def own_fragments(work: Workload, rank: int, kind: str) -> Fragments:
    """The real tokens that a rank owns on the side of this kind of operand or result."""
    return work.ownership.side(side_of(kind)).of(rank)


class World:
    """One rank's operands and results during one pass."""

    def __init__(self, work: Workload, rank: int, device: torch.device) -> None:
        self.work, self.rank, self.device = work, rank, device
        self.tensors: dict[str, tuple[torch.Tensor, ...]] = {}

    def put_own(self, kind: str, *local: torch.Tensor) -> None:
        """Start an operand: the rank's own packed rows [t, h, ...], real tokens only; NaN everywhere else."""
        rows = self._global_rows(kind)
        self.tensors[kind] = tuple(x.new_full((rows, *x.shape[1:]), float("nan")) for x in local)
        for here, there in self.own_rows(kind):
            for x, mine in zip(self.tensors[kind], local, strict=True):
                x[there] = mine[here]

    def start_result(self, kind: str, *like: tuple[tuple[int, ...], torch.dtype, float]) -> None:
        """Start a result: for each of its tensors (shape after the rows, dtype, value of an empty result)."""
        rows = self._global_rows(kind)
        self.tensors[kind] = tuple(
            torch.full((rows, *shape), nothing, dtype=dtype, device=self.device) for shape, dtype, nothing in like
        )

    def own(self, kind: str, *local: torch.Tensor) -> None:
        """Copy a result's own rows into packed local tensors [t, h, ...]; padding and tail keep their values."""
        for here, there in self.own_rows(kind):
            for x, mine in zip(self.tensors[kind], local, strict=True):
                mine[here] = x[there].to(mine.dtype)

    def add(self, kind: str, rows: slice, heads: slice, *values: torch.Tensor) -> None:
        """Add to a result: merge (out, lse) by lse, add gradients."""
        mine = tuple(x[rows, heads] for x in self.tensors[kind])
        if kind == "out":
            values = merge(*mine, *values)
            for x, value in zip(mine, values, strict=True):
                x.copy_(value)
        else:
            for x, value in zip(mine, values, strict=True):
                x.add_(value)

    def pack(self, message: Message) -> list[Parcel]:
        """A message's tensors, flat, one parcel each. A result that is sent is no longer here."""
        parcels: list[Parcel] = []
        for number, x in enumerate(self.tensors[message.kind]):
            parts = [x[where] for where in _places(message.pieces)]
            flat = torch.cat([x.new_empty(0), *(part.reshape(-1) for part in parts)])
            parcels.append(Parcel(message.peer, _tag(message, number), flat))
            if message.kind in RESULTS:
                for part in parts:
                    part.fill_(float("-inf") if (message.kind, number) == ("out", 1) else 0.0)
        return parcels

    def boxes(self, message: Message) -> list[Parcel]:
        """Empty buffers for a message that is to come."""
        return [
            Parcel(
                message.peer,
                _tag(message, number),
                x.new_empty(sum(x[where].numel() for where in _places(message.pieces))),
            )
            for number, x in enumerate(self.tensors[message.kind])
        ]

    def unpack(self, message: Message, parcels: list[Parcel]) -> None:
        """Take a message in: operands are written where they belong, results are added."""
        offset = [0] * len(parcels)
        for rows, heads in _places(message.pieces):
            values: list[torch.Tensor] = []
            for number, (x, parcel) in enumerate(zip(self.tensors[message.kind], parcels, strict=True)):
                target = x[rows, heads]
                values.append(parcel.tensor[offset[number] : offset[number] + target.numel()].view(target.shape))
                offset[number] += target.numel()
            if message.kind in OPERANDS:
                for x, value in zip(self.tensors[message.kind], values, strict=True):
                    x[rows, heads] = value
            else:
                self.add(message.kind, rows, heads, *values)

    def own_rows(self, kind: str) -> Iterator[tuple[slice, slice]]:
        """The rank's real tokens: their rows in its buffer and in the global one."""
        for _, start, stop, row in own_fragments(self.work, self.rank, kind).rows():
            yield slice(row, row + stop - start), slice(start, stop)

    def _global_rows(self, kind: str) -> int:
        """The rows of the global buffer up to the last real token."""
        return int(self.work.ownership.side(side_of(kind)).stop.max(initial=0))


def _places(pieces: Pieces) -> Iterator[tuple[slice, slice]]:
    """Rows and heads of each piece."""
    for start, stop, head_start, head_stop in pieces.rows():
        yield slice(start, stop), slice(head_start, head_stop)


def _tag(message: Message, number: int) -> int:
    """Each tensor of a message has its tag."""
    return 4 * message.tag + number
