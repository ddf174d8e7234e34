"""Where partial results go: into the sum of the next message that takes their rows along, or into a local sum.

A local sum has the rank's own rows. Its heads are those that no launch and no message of the pass cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cp_fast.compile.index_tables import RowKey, Tables
from cp_fast.compile.instructions import Accumulate, Copy, Heads, Send, View
from cp_fast.compile.lowering.buffers import Buffers, split
from cp_fast.compile.row_maps import Parts, RowMap, Spans, SpanSets, shared_out
from cp_ref.schedules.schedule import RESULTS, Message

__all__ = ["RANGES", "Parcels", "Sums", "parcels_of"]

RANGES = 128  # of heads, in one message
_TAGS = 8 * RANGES  # tensors of one message


class Parcels(NamedTuple):
    """The part of a message that has the same heads: one tensor of each kind that the message carries."""

    kind: str
    heads: Heads
    spans: Spans
    peer: int
    tag: int
    complete: bool

    def has(self, other: Parcels) -> bool:
        """Whether these have all rows and heads of others."""
        inside = self.heads[0] <= other.heads[0] and other.heads[1] <= self.heads[1]
        return inside and self.spans.buffer.covers(other.spans)


def parcels_of(message: Message, sets: SpanSets) -> list[Parcels]:
    """A message by heads; sender and receiver get the same list."""
    return [
        Parcels(message.kind, heads, sets.of(start, stop), message.peer, message.tag * _TAGS + 8 * n, message.complete)
        for n, (heads, start, stop) in enumerate(message.by_heads)
    ]


class Outgoing(NamedTuple):
    """The rows of one kind and one range of heads that leave at a step: their sum, and the buffer that is sent."""

    step: int
    sum: int
    message: int
    heads: Heads
    rows: RowMap
    complete: bool


@dataclass
class Sums:
    """All sums of one pass. `sink`: whether a sink is still to be accumulated into every out."""

    buffers: Buffers
    tables: Tables
    sets: SpanSets
    own: dict[str, RowMap]  # by kind: where the rank's own rows lie
    sink: bool
    local: dict[str, dict[Heads, int]] = field(default_factory=dict)  # by kind and heads
    outgoing: dict[str, list[Outgoing]] = field(default_factory=dict)  # by kind
    _edges: dict[str, set[int]] = field(default_factory=dict)
    _stay: set[str] = field(default_factory=set)  # kinds of which no own row is sent

    def announce(
        self, steps: Sequence[Sequence[Parcels]], edges: dict[str, set[int]]
    ) -> list[tuple[list[Copy[RowKey]], list[Send[RowKey]]]]:
        """Make the sums of all results that a pass sends. Returns, for each step, the copies from sums to messages and
        the sends. `edges`, by kind: where the heads of local sums are cut.
        """
        found: list[tuple[list[Copy[RowKey]], list[Send[RowKey]]]] = []
        self._edges = edges
        self.local = {kind: {} for kind in RESULTS}
        self.outgoing = {kind: [] for kind in RESULTS}
        for step, parcels_of_step in enumerate(steps):
            copies, sends = list[Copy[RowKey]](), list[Send[RowKey]]()
            together: dict[tuple[str, Heads, bool], list[Parcels]] = {}
            for parcels in parcels_of_step:
                if parcels.kind in RESULTS:
                    together.setdefault((parcels.kind, parcels.heads, parcels.complete), []).append(parcels)
            for (kind, heads, complete), group in together.items():
                spans = self.sets.joined([p.spans for p in group])
                name, size = f"step {step}: {'complete ' if complete else ''}{kind} {heads[0]}:{heads[1]}", spans.total
                dtype = "input" if complete else "wide"
                of_sum = "wide" if self.sink and kind == "out" else dtype
                total = self.buffers.new(f"{name} sum", kind, heads, size, "sum", dtype=of_sum)
                message = self.buffers.new(f"{name} sent", kind, heads, size, "message", dtype=dtype)
                self.outgoing[kind].append(Outgoing(step, total, message, heads, spans.buffer, complete))
                whole, row = self.buffers.whole(message), 0
                copies.append(Copy(step, self.buffers.whole(total), whole))
                for parcels in group:
                    view: View[RowKey] = replace(whole, rows=slice(row, row + parcels.spans.total))
                    sends.append(Send(step, parcels.peer, parcels.tag, view))
                    row += parcels.spans.total
            found.append((copies, sends))
        self._stay = {kind for kind, out in self.outgoing.items() if not any(self.own[kind].meets(o.rows) for o in out)}
        return found

    def accumulates(self, partial: int, kind: str, heads: Heads, parts: Parts, step: int) -> list[Accumulate[RowKey]]:
        """Where the rows of a partial result of `step` go: into the next message that takes them along, or a local sum.

        Args:
            partial: the buffer of the partial result.
            heads: its heads, of all.
            parts: its global rows, and where they lie in it.
        """
        own, edges = self.own[kind], self._edges[kind]
        later: list[Outgoing] = []
        if kind not in self._stay or not own.covers(parts.spans):
            later = [o for o in self.outgoing[kind] if o.step > step]
            edges = edges.union(*(o.heads for o in later))
        found: list[Accumulate[RowKey]] = []
        for part in split(heads, edges):
            places = [(o, o.rows) for o in later if o.heads[0] <= part[0] and part[1] <= o.heads[1]]
            shares, rest = shared_out(parts, [*places, (None, own)])
            if len(rest):
                raise ValueError(
                    f"the schedule leaves {kind} rows {rest.start[0]}:{rest.stop[0]} of step {step} on a rank "
                    "that does not own them; verify names where they should have gone"
                )
            for outgoing, rows in shares:
                total = self._local(kind, part) if outgoing is None else outgoing.sum
                first = self.buffers.specs[total].heads[0]
                here, there = (self.tables.rows(side, rows.count) for side in (rows.here, rows.there))
                source = View(partial, here, (part[0] - heads[0], part[1] - heads[0]))
                found.append(Accumulate(step, source, View(total, there, (part[0] - first, part[1] - first))))
        return found

    def _local(self, kind: str, heads: Heads) -> int:
        if heads not in self.local[kind]:
            dtype = "wide" if self.sink and kind == "out" else "input"
            name = f"local {kind} {heads[0]}:{heads[1]} sum"
            self.local[kind][heads] = self.buffers.new(name, kind, heads, None, "sum", dtype=dtype)
        return self.local[kind][heads]
