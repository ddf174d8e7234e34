"""Which buffer has the rows that a step needs. What no single buffer has is put together in a new one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cp_fast.planning.rows import RowMap, Spans, SpanSets, by_start, shared_out
from cp_fast.planning.tables import RowKey, Tables
from cp_fast.program import Buffer, Copy, Heads, Operand
from cp_ref.spec import Column
from cp_ref.spec.units import merged

__all__ = ["Held", "Operands", "split"]


@dataclass(eq=False)
class Held:
    """A buffer of a rank, and where global rows lie in it."""

    name: str
    kind: str
    heads: Heads
    rows: RowMap

    def has(self, kind: str, heads: Heads) -> bool:
        """Whether its rows are of this kind and have all of these heads."""
        return self.kind == kind and self.heads[0] <= heads[0] and heads[1] <= self.heads[1]


@dataclass
class Operands:
    """The buffers that a rank has, newest last."""

    tables: Tables
    sets: SpanSets
    direction: str = "forward"
    buffers: dict[str, Buffer] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)

    def new(self, name: str, kind: str, heads: Heads, rows: RowMap, size: int) -> Held:
        """A new buffer, which is not yet held."""
        if name in self.buffers:
            name = f"{name}, {len(self.buffers)}"
        made = Held(name, kind, heads, rows)
        self.buffers[made.name] = Buffer(kind, heads, size)
        return made

    def holder(self, kind: str, heads: Heads, spans: Spans) -> Held | None:
        """The newest buffer that has all of these rows and heads; None if none has."""
        for held in reversed(self.held):
            if held.has(kind, heads) and held.rows.covers(spans):
                return held
        return None

    def of(self, held: Held, spans: Spans, heads: Heads) -> Operand[RowKey]:
        """The rows of these spans, span after span, in the buffer that holds them."""
        located = held.rows.locate(spans)
        return self._operand(held, located.row, located.count, heads)

    def gather(self, kind: str, heads: Heads, parts: Sequence[Spans], step: int) -> tuple[Held, list[Copy[RowKey]]]:
        """Put all of these rows together in a new buffer, in the order of the global rows; with the copies that fill
        it.
        """
        together = self.sets.joined(list(parts))
        rows = self.sets.of(*merged(together.start, together.stop))
        name = f"{self.direction} {step}: {kind} {heads[0]}:{heads[1]} joined"
        made = self.new(name, kind, heads, rows.buffer, rows.total)
        copies: list[Copy[RowKey]] = []
        for part in split(heads, (edge for held in self.held if held.kind == kind for edge in held.heads)):
            shares, rest = shared_out(
                self.sets.packed(rows), ((held, held.rows) for held in self.held if held.has(kind, part))
            )
            for held, found in shares:
                order = by_start(found.there)  # as they lie in the source: what arrived is then read in one piece
                there, here, count = found.there[order], found.here[order], found.count[order]
                source, target = self._operand(held, there, count, part), self._operand(made, here, count, part)
                copies.append(Copy(source, target))
            if len(rest):
                raise ValueError(
                    f"the schedule needs {kind} rows {rest.start[0]}:{rest.stop[0]} at step {step}, which"
                    " are not there; verify names the step that should have brought them"
                )
        self.held.append(made)
        return made, copies

    def _operand(self, held: Held, row: Column, size: Column, heads: Heads) -> Operand[RowKey]:
        return Operand(held.name, self.tables.rows(row, size), (heads[0] - held.heads[0], heads[1] - held.heads[0]))


def split(heads: Heads, edges: Iterable[int]) -> list[Heads]:
    """Heads as ranges that no edge cuts.

    >>> split((0, 8), [0, 2, 12])
    [(0, 2), (2, 8)]
    """
    return list(pairwise(sorted({*heads, *(edge for edge in edges if heads[0] < edge < heads[1])})))
