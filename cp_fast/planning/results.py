"""Where partial results go: into rows of the next message that takes them along, or home, to the rank's own rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cp_fast.planning.operands import split
from cp_fast.planning.rows import Parts, RowMap, Spans, SpanSets, shared_out
from cp_fast.planning.tables import RowKey, Tables
from cp_fast.program import Contribution, Heads, ResultSend, Sums
from cp_ref.spec import RESULTS, Message

__all__ = ["RANGES", "Parcels", "Results", "parcels_of"]

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


class _Outgoing(NamedTuple):
    """The rows of one kind and one range of heads that leave at a step, and their sums."""

    step: int
    sums: str
    heads: Heads
    rows: RowMap


@dataclass
class Results:
    """All sums of a rank: those of its own rows, and those of messages to come."""

    tables: Tables
    sets: SpanSets
    own: dict[str, RowMap]  # by kind: where the rank's own rows lie
    direction: str = "forward"
    sums: dict[str, Sums] = field(default_factory=dict)
    _edges: dict[str, set[int]] = field(default_factory=dict)
    _stay: set[str] = field(default_factory=set)  # kinds of which no own row is handed over
    _outgoing: dict[str, list[_Outgoing]] = field(default_factory=dict)

    def announce(self, steps: Sequence[Sequence[Parcels]], edges: dict[str, set[int]]) -> list[tuple[ResultSend, ...]]:
        """Make the sums of all results that a pass sends, step by step; the sends of each step. `edges`, by kind: where
        heads are cut at home.
        """
        found: list[tuple[ResultSend, ...]] = []
        self._edges = edges
        self._outgoing = {kind: [] for kind in RESULTS}
        for number, step in enumerate(steps):
            sends: list[ResultSend] = []
            together: dict[tuple[str, Heads, bool], list[Parcels]] = {}
            for parcels in step:
                if parcels.kind in RESULTS:
                    together.setdefault((parcels.kind, parcels.heads, parcels.complete), []).append(parcels)
            for (kind, heads, complete), group in together.items():
                spans = self.sets.joined([p.spans for p in group])
                what = f"complete {kind}" if complete else kind
                sums = f"{self.direction} {number}: {what} {heads[0]}:{heads[1]} sent"
                self.sums[sums] = Sums(kind, heads, spans.total, False, complete)
                self._outgoing[kind].append(_Outgoing(number, sums, heads, spans.buffer))
                row = 0
                for parcels in group:
                    sends.append(ResultSend(parcels.peer, parcels.tag, sums, row, parcels.spans.total))
                    row += parcels.spans.total
            found.append(tuple(sends))
        self._stay = {
            kind for kind, out in self._outgoing.items() if not any(self.own[kind].meets(o.rows) for o in out)
        }
        return found

    def sent_complete(self) -> list[tuple[str, Heads, RowMap]]:
        """(sums, heads, rows) of the outs that leave this rank complete; after `announce` of the forward pass."""
        return [(o.sums, o.heads, o.rows) for o in self._outgoing["out"] if self.sums[o.sums].complete]

    def goes_to(self, kind: str, heads: Heads, parts: Parts, step: int) -> tuple[Contribution[RowKey], ...]:
        """Where the rows of a partial result of `step` go: into the next message that takes them along, or home."""
        own, edges = self.own[kind], self._edges[kind]
        later: list[_Outgoing] = []
        if kind not in self._stay or not own.covers(parts.spans):
            later = [o for o in self._outgoing[kind] if o.step > step]
            edges = edges.union(*(o.heads for o in later))
        found: list[Contribution[RowKey]] = []
        for part in split(heads, edges):
            places = [(o.sums, o.rows) for o in later if o.heads[0] <= part[0] and part[1] <= o.heads[1]]
            shares, rest = shared_out(parts, [*places, (f"{kind} {part[0]}:{part[1]} at home", own)])
            if len(rest):
                raise ValueError(
                    f"the schedule leaves {kind} rows {rest.start[0]}:{rest.stop[0]} of step {step} on a rank "
                    "that does not own them; verify names where they should have gone"
                )
            for name, rows in shares:
                if name not in self.sums:
                    self.sums[name] = Sums(kind, part, 0, True)
                sums, tables = self.sums[name], self.tables
                assert sums.heads == part or not sums.home
                here, into = tables.rows(rows.here, rows.count), tables.rows(rows.there, rows.count)
                heads_here = part[0] - heads[0], part[1] - heads[0]
                heads_into = part[0] - sums.heads[0], part[1] - sums.heads[0]
                found.append(Contribution(name, here, heads_here, into, heads_into))
        return tuple(found)
