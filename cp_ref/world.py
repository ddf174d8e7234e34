"""What one rank knows: global-size tensors, NaN where it has nothing.

A row of these tensors is a global slot: position p of sequence s is row starts[s] + p on every rank. So a piece of a
message, a tile and a rank's own tokens are all plain slices, and whatever a schedule forgot to send shows as NaN in the
result.

    operands   q, kv = (k, v), do = (dout, lse, delta)      in the tensors' own dtypes, NaN until they arrive
    results    out = (out, lse), dq, dkv = (dk, dv)         float32 or float64; out is merged by lse, others are added
"""

from __future__ import annotations

import torch

from cp_ref.merge import merge
from cp_ref.spec import Message, Parcel, Piece, Problem, kv_fragments, q_fragments

__all__ = ["World", "accumulator_dtype"]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: what partial results are computed and added up in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class World:
    """One rank's operands and results during one pass."""

    def __init__(self, problem: Problem, rank: int, device: torch.device) -> None:
        self.problem, self.rank, self.device = problem, rank, device
        self.tensors: dict[str, tuple[torch.Tensor, ...]] = {}

    def put_own(self, what: str, *local: torch.Tensor) -> None:
        """Start an operand: the rank's own packed rows [t_local, h, ...], real tokens only; NaN everywhere else."""
        rows = self._starts(what)[-1]
        self.tensors[what] = tuple(x.new_full((rows, *x.shape[1:]), float("nan")) for x in local)
        for here, there in self._own_rows(what):
            for x, mine in zip(self.tensors[what], local, strict=True):
                x[there] = mine[here]

    def start_result(self, what: str, *like: tuple[tuple[int, ...], torch.dtype, float]) -> None:
        """Start a result: for each of its tensors (shape behind the rows, dtype, value of nothing)."""
        rows = self._starts(what)[-1]
        self.tensors[what] = tuple(
            torch.full((rows, *shape), nothing, dtype=dtype, device=self.device) for shape, dtype, nothing in like
        )

    def own(self, what: str, *local: torch.Tensor) -> None:
        """Copy a result's own rows into packed local tensors [t_local, h, ...]; rows of padding and tail keep what
        they have.
        """
        for here, there in self._own_rows(what):
            for x, mine in zip(self.tensors[what], local, strict=True):
                mine[here] = x[there].to(mine.dtype)

    def rows(self, what: str, seq: int, start: int, stop: int) -> slice:
        """Positions [start, stop) of a sequence as rows of the global tensors of `what`."""
        offset = self._starts(what)[seq]
        return slice(offset + start, offset + stop)

    def add(self, what: str, rows: slice, heads: slice, *values: torch.Tensor) -> None:
        """Add to a result: merge (out, lse) by lse, add gradients."""
        mine = tuple(x[rows, heads] for x in self.tensors[what])
        if what == "out":
            values = merge(*mine, *values)
            for x, value in zip(mine, values, strict=True):
                x.copy_(value)
        else:
            for x, value in zip(mine, values, strict=True):
                x.add_(value)

    def pack(self, message: Message) -> list[Parcel]:
        """A message's tensors, flat, one parcel each. A result that is sent is no longer here."""
        parcels: list[Parcel] = []
        for number, x in enumerate(self.tensors[message.what]):
            parts = [x[self._where(message.what, piece)] for piece in message.pieces]
            parcels.append(Parcel(message.peer, _tag(message, number), torch.cat([part.reshape(-1) for part in parts])))
            if message.what in ("out", "dq", "dkv"):
                for part in parts:
                    part.fill_(float("-inf") if (message.what, number) == ("out", 1) else 0.0)
        return parcels

    def boxes(self, message: Message) -> list[Parcel]:
        """Empty buffers for a message that is to come."""
        return [
            Parcel(
                message.peer,
                _tag(message, number),
                x.new_empty(sum(x[self._where(message.what, piece)].numel() for piece in message.pieces)),
            )
            for number, x in enumerate(self.tensors[message.what])
        ]

    def unpack(self, message: Message, parcels: list[Parcel]) -> None:
        """Take a message in: operands are written where they belong, results are added."""
        offset = [0] * len(parcels)
        for piece in message.pieces:
            rows, heads = self._where(message.what, piece)
            values: list[torch.Tensor] = []
            for number, (x, parcel) in enumerate(zip(self.tensors[message.what], parcels, strict=True)):
                target = x[rows, heads]
                values.append(parcel.tensor[offset[number] : offset[number] + target.numel()].view(target.shape))
                offset[number] += target.numel()
            if message.what in ("q", "kv", "do"):
                for x, value in zip(self.tensors[message.what], values, strict=True):
                    x[rows, heads] = value
            else:
                self.add(message.what, rows, heads, *values)

    def _where(self, what: str, piece: Piece) -> tuple[slice, slice]:
        return self.rows(what, piece.seq, piece.start, piece.stop), slice(*(piece.heads or (None,)))

    def _starts(self, what: str) -> tuple[int, ...]:
        return self.problem.starts_kv if what in ("kv", "dkv") else self.problem.starts_q

    def _own_rows(self, what: str) -> list[tuple[slice, slice]]:
        """The rank's real tokens: local rows, global rows."""
        on_kv = what in ("kv", "dkv")
        found: list[tuple[slice, slice]] = []
        for f in (kv_fragments if on_kv else q_fragments)(self.problem, self.rank):
            sequence = self.problem.sequences[f.seq]
            count = min(f.stop, sequence.len_kv if on_kv else sequence.len_q) - f.start
            if count > 0:
                found.append((slice(f.row, f.row + count), self.rows(what, f.seq, f.start, f.start + count)))
        return found


def _tag(message: Message, number: int) -> int:
    """Tensors of one message have tags of their own."""
    return 4 * message.tag + number
