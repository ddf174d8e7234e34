"""A pass of a lowered program with all looked up that hangs on no tensor's address: once, for all calls of a shape.

Names become numbers of slots; what is all of a buffer is marked, so that nothing is sliced; sizes and dtypes of what
will be allocated are there, and so are the messages of each step, as an exchange that is prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cp_fast.exchanges import Exchange
from cp_fast.merge import Place, TotalShape
from cp_fast.program import Heads, Sums
from cp_fast.rows import Rows

__all__ = ["Arrival", "Complete", "Give", "Given", "Handed", "Held", "Moved", "Pass", "Ready", "Room", "Step", "Sum"]
__all__ += ["Take"]


class Held(NamedTuple):
    """Tensors of one kind: by row [n, h, d], and by column [h, n] (lse and its gradient)."""

    rows: Sequence[torch.Tensor]
    columns: Sequence[torch.Tensor]


class Room(NamedTuple):
    """The shapes of tensors by row, and of tensors by column."""

    rows: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    wide: torch.dtype
    device: torch.device

    def new(self) -> Held:
        """Tensors with any values."""
        dtype, wide, device = self[2:]
        return Held(
            [torch.empty(shape, dtype=dtype, device=device) for shape in self.rows],
            [torch.empty(shape, dtype=wide, device=device) for shape in self.columns],
        )


class Take(NamedTuple):
    """Rows and heads of a buffer. `whole`: all of it; `own`: of the rank's own rows."""

    slot: int
    rows: Rows
    heads: Heads
    whole: bool
    own: bool


class Moved(NamedTuple):
    """A copy into rows and heads of a buffer, which it makes where it is the first. `heads`: None for all."""

    source: Take
    slot: int
    room: Room
    rows: Rows
    heads: slice | None


class Given(NamedTuple):
    """Operands that are sent: the same rows to each peer, of as many heads from its first one on. `taken`: to one peer,
    and all heads.
    """

    slot: int
    taken: Take | None
    rows: Rows
    first_heads: tuple[int, ...]
    heads: int


class Handed(NamedTuple):
    """Results that are handed over. `rows`: of sums; None for all."""

    sums: int
    rows: slice | None


class Arrival(NamedTuple):
    """A buffer that arrives, from one peer or several: the rows of each message, in pieces; None where they are all of
    the buffer's.
    """

    slot: int
    room: Room
    rows: tuple[tuple[slice, ...] | None, ...]


class Give(NamedTuple):
    """Rows and heads of a partial result, and where in which sums they go. `whole`: all of it."""

    sums: int
    rows: Rows
    heads: Heads
    whole: bool
    place: Place


class Complete(NamedTuple):
    """Complete results for the same own rows, of each peer for as many heads. The room is [peers, n, heads, d]."""

    kind: str
    into: Rows
    first_heads: tuple[int, ...]
    room: Room

    @property
    def heads(self) -> int:
        """How many there are, of all peers together."""
        return self.room.rows[0][0] * self.room.rows[0][2]


class Ready(NamedTuple):
    """A launch. `settled`: the sums of its results, of which what waits is added up before it, and from how many parts
    on; `last_use`: of a backward pass, buffers that nothing needs after it.
    """

    operands: tuple[Take, ...]  # q, kv; in the backward pass do and res
    segments: Any
    first_head: int
    results: tuple[Give, ...]
    results_kv: tuple[Give, ...]
    settled: tuple[tuple[int, int], ...]
    last_use: tuple[int, ...]


class Step(NamedTuple):
    """A step. `settled`: sums of dK and dV, and from how many waiting parts on these are added up at its end."""

    packed: tuple[Moved, ...]
    given: tuple[Given, ...]
    handed: tuple[Handed, ...]
    gone: tuple[int, ...]  # sums that nobody needs after they were handed over
    arrivals: tuple[Arrival, ...]
    partial: tuple[tuple[Room, tuple[Give, ...]], ...]
    complete: tuple[Complete, ...]
    exchange: Exchange | None
    copies: tuple[Moved, ...]
    launches: tuple[Ready, ...]
    settled: tuple[tuple[int, int], ...]
    last_use: tuple[int, ...]
    finished: tuple[str, ...]  # results of which this rank has computed all that it will, after its launches


class Sum(NamedTuple):
    """Sums, and their totals' shape."""

    sums: Sums
    shape: TotalShape


class Pass(NamedTuple):
    """A bound pass. `slots`: those of the buffers by name; `home`: by kind, the sums of the rank's own rows; `dims`: by
    kind, the head dimensions of the tensors by row.
    """

    steps: tuple[Step, ...]
    slots: dict[str, int]
    sums: tuple[Sum, ...]
    home: dict[str, tuple[int, ...]]
    dims: dict[str, tuple[int, ...]]
