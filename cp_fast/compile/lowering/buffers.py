"""The buffers of one pass while it is lowered, and which of them hold which rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from cp_fast.compile.index_tables import RowKey, Tables
from cp_fast.compile.instructions import BufferSpec, Copy, Heads, Role, View
from cp_fast.compile.row_maps import RowMap, Spans, SpanSets, by_start, shared_out
from cp_ref.schedules.planners.ring_members import merged
from cp_ref.schedules.table import Column

__all__ = ["Buffers", "Held", "Operands", "split"]


@dataclass
class Buffers:
    """The numbered buffers of a pass."""

    specs: list[BufferSpec] = field(default_factory=list)
    _names: Counter[str] = field(default_factory=Counter)

    def new(
        self,
        name: str,
        kind: str,
        heads: Heads,
        rows: int | None,
        role: Role,
        *,
        dtype: Literal["input", "wide"] = "input",
        parts: int = 0,
    ) -> int:
        """The number of a new buffer; a name that was there before gains a number."""
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name} #{self._names[name]}"
        self.specs.append(BufferSpec(name, kind, heads, rows, role, dtype, parts))
        return len(self.specs) - 1

    def whole(self, number: int) -> View[RowKey]:
        """All of a buffer."""
        return View(number, None, self.specs[number].all_heads)


@dataclass(eq=False)
class Held:
    """A buffer of operands that the rank has, and where global rows lie in it."""

    number: int
    kind: str
    heads: Heads
    rows: RowMap

    def has(self, kind: str, heads: Heads) -> bool:
        """Whether its rows are of this kind and have all of these heads."""
        return self.kind == kind and self.heads[0] <= heads[0] and heads[1] <= self.heads[1]


@dataclass
class Operands:
    """The buffers of operands that a rank has in a pass, the newest last."""

    buffers: Buffers
    tables: Tables
    sets: SpanSets
    held: list[Held] = field(default_factory=list)

    def new(self, name: str, kind: str, heads: Heads, rows: RowMap, size: int) -> Held:
        """A new buffer. The rank does not have it yet."""
        return Held(self.buffers.new(name, kind, heads, size, "operand"), kind, heads, rows)

    def holder(self, kind: str, heads: Heads, spans: Spans) -> Held | None:
        """The newest buffer that has all of these rows and heads; None if none has."""
        for held in reversed(self.held):
            if held.has(kind, heads) and held.rows.covers(spans):
                return held
        return None

    def view(self, held: Held, spans: Spans, heads: Heads) -> View[RowKey]:
        """The rows of these spans, span after span, in the buffer that holds them."""
        located = held.rows.locate(spans)
        return self._view(held, located.row, located.count, heads)

    def gather(self, kind: str, heads: Heads, parts: Sequence[Spans], step: int) -> tuple[Held, list[Copy[RowKey]]]:
        """A new buffer with all of these rows in the order of the global rows, and the copies that fill it."""
        together = self.sets.joined(list(parts))
        rows = self.sets.of(*merged(together.start, together.stop))
        made = self.new(f"step {step}: {kind} {heads[0]}:{heads[1]} gathered", kind, heads, rows.buffer, rows.total)
        copies: list[Copy[RowKey]] = []
        for part in split(heads, (edge for held in self.held if held.kind == kind for edge in held.heads)):
            shares, rest = shared_out(
                self.sets.packed(rows), ((held, held.rows) for held in self.held if held.has(kind, part))
            )
            for held, found in shares:
                order = by_start(found.there)  # in the source's order: a received buffer is then read in one piece
                there, here, count = found.there[order], found.here[order], found.count[order]
                copies.append(Copy(step, self._view(held, there, count, part), self._view(made, here, count, part)))
            if len(rest):
                raise ValueError(
                    f"the schedule needs {kind} rows {rest.start[0]}:{rest.stop[0]} at step {step}, which"
                    " are not there; verify names the step that should have brought them"
                )
        self.held.append(made)
        return made, copies

    def _view(self, held: Held, row: Column, size: Column, heads: Heads) -> View[RowKey]:
        return View(held.number, self.tables.rows(row, size), (heads[0] - held.heads[0], heads[1] - held.heads[0]))


def split(heads: Heads, edges: Iterable[int]) -> list[Heads]:
    """Heads as ranges that no edge cuts.

    >>> split((0, 8), [0, 2, 12])
    [(0, 2), (2, 8)]
    """
    return list(pairwise(sorted({*heads, *(edge for edge in edges if heads[0] < edge < heads[1])})))
