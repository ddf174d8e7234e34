"""The state of the lowering of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cp_fast.compile.executable_plan import PassPlan
from cp_fast.compile.index_tables import RowKey, Tables
from cp_fast.compile.instructions import OWN, Heads
from cp_fast.compile.lowering.buffers import Buffers, Held, Operands
from cp_fast.compile.lowering.sums import Parcels, Sums
from cp_fast.compile.row_maps import RowMap, SpanSets
from cp_fast.compile.tiles.groups import TileGroups
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import RESULTS, side_of

__all__ = ["PassState", "Shared"]


class Shared(NamedTuple):
    """The inputs of the lowering of both passes."""

    work: Workload
    rank: int
    groups: TileGroups
    tables: Tables
    sets: SpanSets
    own: dict[str, RowMap]
    sink: bool

    def side(self, kind: str) -> tuple[int, RowMap]:
        """All heads and the own rows of a kind."""
        side = side_of(kind)
        return (self.work.heads_kv if side == "kv" else self.work.heads_q), self.own[side]


@dataclass
class PassState:
    """One pass while it is lowered.

    Attributes:
        kinds: the operands of its launches.
        sent, received: in a backward pass, the complete outs of the forward pass. Both ends have these and their lse,
            so they are not sent again with the gradient.
    """

    shared: Shared
    direction: str
    kinds: Sequence[str]
    results: Sequence[str]
    sent: Sequence[Parcels] = ()
    received: Sequence[Parcels] = ()
    buffers: Buffers = field(default_factory=Buffers)

    def __post_init__(self) -> None:
        shared, made = self.shared, list[Held]()
        for kind, number in OWN.items():
            heads, rows = shared.side(kind)
            own_number = self.buffers.new(f"own {kind}", kind, (0, heads), None, "own")
            assert own_number == number
            if kind in self.kinds:
                made.append(Held(number, kind, (0, heads), rows))
        self.operands = Operands(self.buffers, shared.tables, shared.sets)
        self.operands.held = made[:2] if self.direction == "forward" else made[2:]
        own = {kind: shared.side(kind)[1] for kind in RESULTS}
        self.sums = Sums(self.buffers, shared.tables, shared.sets, own, shared.sink)
        self.stacked: dict[str, list[tuple[int, RowKey, tuple[int, ...]]]] = {kind: [] for kind in self.results}
        self.own_results: dict[str, int] = {}

    def keep(self, held: Held, plan: PassPlan[RowKey]) -> int:
        """Add a buffer of operands kept by the forward pass; returns its number in this pass."""
        number, spec = held.number, plan.buffers[held.number]
        if number >= len(OWN):
            number = self.buffers.new(f"kept {spec.name}", spec.kind, spec.heads, spec.rows, "operand")
        gradients = self.operands.held[-2:]
        self.operands.held[-2:] = [Held(number, held.kind, held.heads, held.rows), *gradients]
        return number

    def keep_out(self, heads: Heads, rows: RowMap) -> int:
        """Add the complete out and lse of others' rows that the forward pass sent; returns the buffer's number."""
        made = self.operands.new(f"kept out {heads[0]}:{heads[1]}", "res", heads, rows, rows.spans.total)
        self.operands.held.append(made)
        return made.number
