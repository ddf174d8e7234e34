"""Which buffer has the rows that a step needs. What no single buffer has is put together in a new one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cp_fast.planning.rows import Located, RowMap, Spans, SpanSets, subtract
from cp_fast.planning.tables import RowKey, Tables
from cp_fast.program import Buffer, Copy, Heads, Operand
from cp_ref.spec import Column
from cp_ref.spec.units import merged

__all__ = ["Held", "Operands"]


@dataclass(eq=False)
class Held:
    """A buffer of a rank, and where global rows lie in it."""

    name: str
    kind: str
    heads: Heads
    rows: RowMap
    size: int
    last_use: int = -1  # the last step that reads it

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
    _known: dict[tuple[RowMap, Located], Column] = field(default_factory=dict)

    def new(self, name: str, kind: str, heads: Heads, rows: RowMap, size: int) -> Held:
        """A new buffer, which is not yet held."""
        if name in self.buffers:
            name = f"{name}, {len(self.buffers)}"
        made = Held(name, kind, heads, rows, size)
        self.buffers[made.name] = Buffer(kind, heads, size)
        return made

    def find(self, kind: str, heads: Heads, spans: Spans, step: int) -> Operand[RowKey] | None:
        """The rows of these spans, span after span, in the newest buffer that has all of them; None if none has."""
        held = self.holder(kind, heads, spans)
        if held is None:
            return None
        located = held.rows.locate(spans)
        return self._operand(held, located.row, located.count, heads, step)

    def holder(self, kind: str, heads: Heads, spans: Spans) -> Held | None:
        """The buffer in which `find` finds these rows."""
        for held in reversed(self.held):
            if held.has(kind, heads) and held.rows.covers(spans):
                return held
        return None

    def gather(self, kind: str, heads: Heads, parts: Sequence[Spans], step: int) -> list[Copy[RowKey]]:
        """Put all of these rows together in a new buffer, in the order of the global rows: the copies that fill it."""
        together = self.sets.joined(list(parts))
        rows = self.sets.of(*merged(together.start, together.stop)).packed
        sources = [held for held in self.held if held.kind == kind]
        name = f"{self.direction} {step}: {kind} {heads[0]}:{heads[1]} joined"
        made = self.new(name, kind, heads, rows, rows.spans.total)
        copies: list[Copy[RowKey]] = []
        for part in _cut(heads, (held.heads for held in sources)):
            missing = rows.spans
            for held in sources:
                if held.has(kind, part) and len(missing):
                    located = held.rows.locate(missing)
                    if len(located.count):
                        row, size = located.rows_in_order  # as they lie there: scattered, not gathered too
                        source = self._operand(held, row, size, part, step)
                        into = self._into(rows, missing, located)
                        copies.append(Copy(source, self._operand(made, into, size, part, step)))
                        missing = _NOTHING if located.whole else self._rest(missing, located.spans)
            if len(missing):
                raise ValueError(
                    f"the schedule needs {kind} rows {missing.start[0]}:{missing.stop[0]} at step {step}, which"
                    " are not there; verify names the step that should have brought them"
                )
        self.held.append(made)
        return copies

    def _rest(self, spans: Spans, found: Spans) -> Spans:
        rest = subtract(spans, found)
        return self.sets.of(rest.start, rest.stop)

    def _into(self, rows: RowMap, spans: Spans, located: Located) -> Column:
        """The first rows of what was located of some spans in a buffer with all of them, in the order in which they lie
        in the other one.
        """
        if (rows, located) not in self._known:
            first = rows.locate(spans).row - spans.start  # a span lies in one piece there
            self._known[rows, located] = (first[located.number] + located.start)[located.by_row]
        return self._known[rows, located]

    def _operand(self, held: Held, row: Column, size: Column, heads: Heads, step: int) -> Operand[RowKey]:
        held.last_use = max(held.last_use, step)
        key = self.tables.rows(row, size)
        return Operand(held.name, key, (heads[0] - held.heads[0], heads[1] - held.heads[0]))


_NOTHING = Spans(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _cut(heads: Heads, others: Iterable[Heads]) -> list[Heads]:
    """Heads as ranges that the others' edges do not cut.

    >>> _cut((0, 8), [(0, 2), (2, 12)])
    [(0, 2), (2, 8)]
    """
    edges = {edge for other in others for edge in other if heads[0] < edge < heads[1]}
    return list(pairwise(sorted({*heads, *edges})))
