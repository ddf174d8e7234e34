"""Where partial results go: into rows of the next message that takes them along, or home, to the rank's own rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cp_fast.planning.rows import Located, RowMap, Spans, SpanSets, subtract
from cp_fast.planning.tables import RowKey, Tables, one_range
from cp_fast.program import Contribution, Heads, ResultSend, Sums
from cp_ref.spec import RESULTS, Column, Message
from cp_ref.spec import Program as Steps

__all__ = ["Parcels", "Results", "parcels_of"]

_TAGS = 1024  # tensors of one message


class Parcels(NamedTuple):
    """The part of a message that has the same heads: one tensor of each kind that the message carries."""

    kind: str
    heads: Heads
    spans: Spans
    peer: int
    tag: int
    complete: bool


def parcels_of(message: Message, sets: SpanSets) -> list[Parcels]:
    """A message by heads; sender and receiver get the same list."""
    return [
        Parcels(message.kind, heads, sets.of(start, stop), message.peer, message.tag * _TAGS + 8 * n, message.complete)
        for n, (heads, start, stop) in enumerate(message.by_heads)
    ]


@dataclass
class _Outgoing:
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
    _splits: dict[tuple[Located, int], _Split] = field(default_factory=dict)  # by the offsets' id

    def announce(self, steps: Steps, edges: dict[str, set[int]]) -> list[tuple[ResultSend, ...]]:
        """Make the sums of all result messages of a pass; the sends of each step. `edges`, by kind: where heads are cut
        at home.
        """
        found: list[tuple[ResultSend, ...]] = []
        self._edges = edges
        self._outgoing = {kind: [] for kind in RESULTS}
        for number, step in enumerate(steps):
            sends: list[ResultSend] = []
            together: dict[tuple[str, Heads, bool], list[Parcels]] = {}
            for message in step.sends:
                for parcels in parcels_of(message, self.sets) if message.kind in RESULTS else ():
                    together.setdefault((parcels.kind, parcels.heads, parcels.complete), []).append(parcels)
            for (kind, heads, complete), group in together.items():
                spans = self.sets.joined([p.spans for p in group])
                what = f"complete {kind}" if complete else kind
                sums = f"{self.direction} {number}: {what} {heads[0]}:{heads[1]} sent"
                self.sums[sums] = Sums(kind, heads, spans.total, False, complete)
                self._outgoing[kind].append(_Outgoing(number, sums, heads, spans.packed))
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

    def goes_to(
        self, kind: str, heads: Heads, spans: Spans, step: int, begin: Column | None = None
    ) -> tuple[Contribution[RowKey], ...]:
        """Where the rows of these spans go, which are the rows of a partial result of `step`, span after span; or each
        begins at a row of its own.
        """
        later = [o for o in self._outgoing[kind] if o.step > step]
        if kind in self._stay and self.own[kind].covers(spans):
            later = []
        edges = self._edges[kind] | {e for o in later for e in o.heads}
        cuts = sorted({*heads, *(e for e in edges if heads[0] < e < heads[1])})
        found: list[Contribution[RowKey]] = []
        for part in pairwise(cuts):
            rest, offset = spans, spans.begin if begin is None else begin  # rows of the partial result
            for out in later:
                if out.heads[0] <= part[0] and part[1] <= out.heads[1] and len(rest):
                    rest, offset = self._into(found, out.sums, out.rows, rest, offset, part, heads)
            if len(rest):
                home = f"{kind} {part[0]}:{part[1]} at home"
                if home not in self.sums:
                    self.sums[home] = Sums(kind, part, 0, True)
                rest, _ = self._into(found, home, self.own[kind], rest, offset, part, heads)
                if len(rest):
                    raise ValueError(
                        f"the schedule leaves {kind} rows {rest.start[0]}:{rest.stop[0]} of step {step} on a rank "
                        "that does not own them; verify names where they should have gone"
                    )
        return tuple(found)

    def _into(
        self,
        found: list[Contribution[RowKey]],
        sums: str,
        rows: RowMap,
        spans: Spans,
        offset: np.ndarray,
        part: Heads,
        heads: Heads,
    ) -> tuple[Spans, np.ndarray]:
        """Add what goes into these sums to `found`; return what is left, with its rows in the partial result."""
        located = rows.locate(spans)
        if not len(located.count):
            return spans, offset
        if (located, id(offset)) not in self._splits:
            self._splits[located, id(offset)] = _split(located, spans, offset, self.tables)
        split = self._splits[located, id(offset)]
        first_head = self.sums[sums].heads[0]
        assert self.sums[sums].heads == part or not self.sums[sums].home
        head_cut = part[0] - heads[0], part[1] - heads[0]
        into_heads = part[0] - first_head, part[1] - first_head
        found.append(Contribution(sums, split.here, head_cut, split.into, into_heads))
        return split.rest, split.rest_offset


class _Split(NamedTuple):
    """Rows of a partial result (`here`) that go to rows of sums (`into`), and the spans that do not, with their rows in
    the partial result. `offset`: the rows of all spans in it.
    """

    offset: Column
    here: RowKey
    into: RowKey
    rest: Spans
    rest_offset: Column


def _split(located: Located, spans: Spans, offset: Column, tables: Tables) -> _Split:
    """Spans that were located, at these rows of a partial result."""
    first = offset[located.number] + located.start - spans.start[located.number]
    there, size = located.row, located.count
    if not (one_range(first, size) or one_range(there, size)):  # gathered rather than gathered and scattered
        first, (there, size) = first[located.by_row], located.rows_in_order
    found = offset, tables.rows(first, size), tables.rows(there, size)
    if located.whole:
        return _Split(*found, Spans(spans.start[:0], spans.stop[:0]), offset[:0])
    order, taken = _by_start(spans.start), _by_start(located.start)
    of_buffer = Spans(located.start[taken], located.spans.stop[taken])
    rest = subtract(Spans(spans.start[order], spans.stop[order]), of_buffer)
    span = np.arange(len(offset))[order][np.searchsorted(spans.start[order], rest.start, side="right") - 1]
    return _Split(*found, rest, offset[span] + rest.start - spans.start[span])


def _by_start(start: Column) -> Column | slice:
    return slice(None) if bool((start[1:] >= start[:-1]).all()) else np.argsort(start, kind="stable")
