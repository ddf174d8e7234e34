"""The tensors that one rank knows, of global size, NaN where it has nothing.

A row of these tensors is a row of the packed global buffer, on every rank. So a piece of a message, a side of a tile
and a fragment of the rank's own tokens are all plain slices, and whatever a schedule forgot to send shows as NaN in the
result.

    operands   q, kv = (k, v), do = (dout, lse, delta)      in the tensors' own dtypes, NaN until they arrive
    results    out = (out, lse), dq, dkv = (dk, dv)         float32 or float64; out is merged by lse, others are added
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cp_ref.groups.group import Parcel
from cp_ref.reference.executor.merge_partials import merge
from cp_ref.reference.executor.tile_attention import visible_pairs
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import OPERANDS, RESULTS, TENSOR_TAGS, Message, Pieces, side_of

__all__ = ["RankTensors", "by_kv_head"]


class RankTensors:
    """One rank's operands and results during one pass.

    Attributes:
        tensors: by kind of operand or result.
        own: for each side ("q" or "kv") the rank's real tokens: their rows in its buffer, and in the global one.
        rows: for each side the rows of the global buffer up to the last real token.
        step: the number of the step that is played.
    """

    def __init__(self, work: Workload, rank: int, device: torch.device) -> None:
        self.work, self.rank, self.device, self.step = work, rank, device, 0
        self.tensors: dict[str, tuple[torch.Tensor, ...]] = {}
        self.own: dict[str, list[tuple[slice, slice]]] = {}
        self.rows: dict[str, int] = {}
        for side, fragments in (("q", work.ownership.q), ("kv", work.ownership.kv)):
            mine = fragments.of(rank).rows()
            self.own[side] = [(slice(row, row + stop - start), slice(start, stop)) for _, start, stop, row in mine]
            self.rows[side] = int(fragments.stop.max(initial=0))

    # ---- the rank's own rows, and the tensors of a call

    def put_own(self, kind: str, *local: torch.Tensor) -> None:
        """Start an operand: the rank's own packed rows [t, h, ...], real tokens only; NaN everywhere else."""
        rows = self.rows[side_of(kind)]
        self.tensors[kind] = tuple(x.new_full((rows, *x.shape[1:]), float("nan")) for x in local)
        for here, there in self.own[side_of(kind)]:
            for x, mine in zip(self.tensors[kind], local, strict=True):
                x[there] = mine[here]

    def start_result(self, kind: str, *like: tuple[tuple[int, ...], torch.dtype, float]) -> None:
        """Start a result: for each of its tensors (shape after the rows, dtype, value of an empty result)."""
        rows = self.rows[side_of(kind)]
        self.tensors[kind] = tuple(
            torch.full((rows, *shape), nothing, dtype=dtype, device=self.device) for shape, dtype, nothing in like
        )

    def copy_out(self, kind: str, *local: torch.Tensor) -> None:
        """Copy a result's own rows into packed local tensors [t, h, ...]; padding and tail keep their values."""
        for here, there in self.own[side_of(kind)]:
            for x, mine in zip(self.tensors[kind], local, strict=True):
                mine[here] = x[there].to(mine.dtype)

    # ---- tiles: rows (area, q_start, q_stop, k_start, k_stop, head_start, head_stop) of `Tiles`

    def of_tile(self, tile: Sequence[int], dtype: torch.dtype, *kinds: str) -> tuple[torch.Tensor, ...]:
        """A tile's operands of these kinds: q and do of its query rows and query heads; k and v of its key rows, with
        the kv head of each query head.
        """
        _, q_start, q_stop, k_start, k_stop, head_start, head_stop = tile
        queries = slice(q_start, q_stop), slice(head_start, head_stop)
        keys = slice(k_start, k_stop), self.kv_heads(tile)
        return tuple(x[keys if kind == "kv" else queries].to(dtype) for kind in kinds for x in self.tensors[kind])

    def kv_heads(self, tile: Sequence[int]) -> torch.Tensor:
        """The number of the kv head of each of a tile's query heads."""
        *_, head_start, head_stop = tile
        return torch.arange(head_start, head_stop, device=self.device) // self.work.heads_per_kv

    def visible(self, tile: Sequence[int]) -> torch.Tensor:
        """The pairs of a tile that are visible, bool [n, m]: those in the diagonal band of its area."""
        area, q_start, q_stop, k_start, k_stop, *_ = tile
        lo, hi = int(self.work.areas.lo[area]), int(self.work.areas.hi[area])
        return visible_pairs(slice(q_start, q_stop), slice(k_start, k_stop), lo, hi, self.device)

    def add_tile(self, tile: Sequence[int], kind: str, *values: torch.Tensor) -> None:
        """Add a tile's share of a result, by query head; for dkv, query heads that share a kv head are added up."""
        _, q_start, q_stop, k_start, k_stop, head_start, head_stop = tile
        if kind == "dkv":
            kv_heads = self.kv_heads(tile)
            values = tuple(by_kv_head(x, kv_heads, self.work.heads_kv) for x in values)
            self.accumulate(kind, slice(k_start, k_stop), slice(None), *values)
        else:
            self.accumulate(kind, slice(q_start, q_stop), slice(head_start, head_stop), *values)

    def accumulate(self, kind: str, rows: slice, heads: slice, *values: torch.Tensor) -> None:
        """Add to a result: merge (out, lse) by lse, add gradients."""
        mine = tuple(x[rows, heads] for x in self.tensors[kind])
        if kind == "out":
            values = merge(*mine, *values)
            for x, value in zip(mine, values, strict=True):
                x.copy_(value)
        else:
            for x, value in zip(mine, values, strict=True):
                x.add_(value)

    # ---- messages

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

    def unpack(self, message: Message, parcels: Sequence[Parcel]) -> None:
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
                self.accumulate(message.kind, rows, heads, *values)


def by_kv_head(grads: torch.Tensor, kv_heads: torch.Tensor, heads_kv: int) -> torch.Tensor:
    """Sum the query heads' gradients [m, h, d] of K or V into the kv heads they share: [m, h_kv, d].

    >>> by_kv_head(torch.tensor([[[1.0], [2.0], [4.0]]]), torch.tensor([0, 1, 1]), 2).flatten().tolist()
    [1.0, 6.0]
    """
    return grads.new_zeros(grads.shape[0], heads_kv, grads.shape[2]).index_add_(1, kv_heads, grads)


def _places(pieces: Pieces) -> Iterator[tuple[slice, slice]]:
    """Rows and heads of each piece."""
    for start, stop, head_start, head_stop in pieces.rows():
        yield slice(start, stop), slice(head_start, head_stop)


def _tag(message: Message, number: int) -> int:
    """The tag of a message's n-th tensor: each tensor travels by itself."""
    return TENSOR_TAGS * message.tag + number
