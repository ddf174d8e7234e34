"""The positions of rows of the global packed buffers in a local buffer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from cp_fast.compile.index_tables import one_range
from cp_ref.schedules.ownership import Fragments
from cp_ref.schedules.table import Column, joined

__all__ = [
    "Found",
    "Located",
    "Parts",
    "RowMap",
    "SpanSets",
    "Spans",
    "by_start",
    "shared_out",
    "subtract",
]

Place = TypeVar("Place")


@dataclass(frozen=True, eq=False)
class Spans:
    """Global rows [start, stop), span after span, none of them empty: those of a message, a launch or a buffer.

    Repeated queries, for several tensors and both passes, are cached by object: see `SpanSets`.
    """

    start: Column
    stop: Column

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def size(self) -> Column:
        """The number of rows of each."""
        return self.stop - self.start

    @cached_property
    def total(self) -> int:
        """The number of rows of all."""
        return int(self.size.sum())

    @cached_property
    def begin(self) -> Column:
        """The first row of each if they are packed one after the other."""
        return np.cumsum(self.size) - self.size

    @property
    def packed(self) -> Parts:
        """A tensor that packs them one after the other. It is a new object: a cached one would keep these spans
        alive.
        """
        return Parts(self, self.begin)

    @cached_property
    def buffer(self) -> RowMap:
        """A buffer that packs them one after the other."""
        return RowMap.at(self, self.begin)


class SpanSets:
    """The spans of a plan: equal ones are one object, as q, kv, do and their results often have the same rows.

    >>> sets = SpanSets()
    >>> sets.of(np.array([0]), np.array([4])) is sets.of(np.array([0]), np.array([4]))
    True
    """

    def __init__(self) -> None:
        self._by_columns: dict[tuple[int, int], tuple[Column, Column, Spans]] = {}  # By the columns' ids.
        self._by_edges: dict[tuple[int, ...], list[Spans]] = {}  # By values that compare quickly.
        self._packed: dict[Spans, Parts] = {}

    def of(self, start: Column, stop: Column) -> Spans:
        """The spans with these edges."""
        key = id(start), id(stop)
        if key not in self._by_columns:
            self._by_columns[key] = start, stop, self._equal(start, stop)
        return self._by_columns[key][2]

    def _equal(self, start: Column, stop: Column) -> Spans:
        size = len(start)
        known = self._by_edges.setdefault((size, start.item(0), start.item(-1), stop.item(-1)) if size else (), [])
        for spans in known:
            if not size or bool((start == spans.start).all() and (stop == spans.stop).all()):
                return spans
        known.append(Spans(start, stop))
        return known[-1]

    def packed(self, spans: Spans) -> Parts:
        """A tensor that packs these spans one after the other; the same object for the same spans."""
        if spans not in self._packed:
            self._packed[spans] = spans.packed
        return self._packed[spans]

    def joined(self, parts: list[Spans]) -> Spans:
        """Several spans, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return self.of(np.concatenate([p.start for p in parts]), np.concatenate([p.stop for p in parts]))


@dataclass(frozen=True, eq=False)
class Located:
    """Global spans in a buffer: the requested span `number[n]` has rows [row[n], row[n] + count[n]), in order."""

    number: Column
    start: Column  # The global row of row[n].
    row: Column
    count: Column
    whole: bool  # All requested rows.


class RowMap:
    """A buffer's contents: global rows [start, stop) lie at rows [row, row + stop - start). Sorted by start, disjoint.

    >>> buffer = Spans(np.array([8, 0]), np.array([12, 4])).buffer  # rows 8 to 11, then rows 0 to 3
    >>> located = buffer.locate(Spans(np.array([2]), np.array([10])))
    >>> located.row.tolist(), located.count.tolist()
    ([6, 0], [2, 2])
    """

    def __init__(self, spans: Spans, row: Column) -> None:
        self.spans, self.row = spans, row  # `spans`: all rows that it holds.
        self.start, self.stop = spans.start, spans.stop
        self._located: dict[Spans, Located] = {}

    def __len__(self) -> int:
        return len(self.start)

    @staticmethod
    def at(spans: Spans, row: Column) -> RowMap:
        """A buffer that stores each span from the given row on."""
        order = by_start(spans.start)
        return RowMap(spans if isinstance(order, slice) else Spans(spans.start[order], spans.stop[order]), row[order])

    @staticmethod
    def of(fragments: Fragments) -> RowMap:
        """A rank's own buffer."""
        return RowMap.at(Spans(fragments.start, fragments.stop), fragments.row)

    def locate(self, spans: Spans) -> Located:
        """The rows of these spans that the buffer has, by span, in the order of the global rows."""
        if spans not in self._located:
            self._located[spans] = self._locate(spans)
        return self._located[spans]

    def covers(self, spans: Spans) -> bool:
        """Whether the buffer has all of these rows, which may repeat. Most buffers that lack a row lack the first
        one.
        """
        if spans not in self._located and len(spans):
            first = spans.start[0]
            here = int(self.stop.searchsorted(first, side="right"))
            if here == len(self) or self.start[here] > first:
                return False
        return self.locate(spans).whole

    def _locate(self, spans: Spans) -> Located:
        start, stop = spans.start, spans.stop
        if len(start) == len(self) and bool((start == self.start).all()) and bool((stop <= self.stop).all()):
            return Located(np.arange(len(start)), start, self.row, spans.size, True)  # The first part of each stretch.
        if len(self):
            here = self.stop.searchsorted(start, side="right")  # Usually each span lies in one stretch.
            np.minimum(here, len(self) - 1, out=here)
            first = self.start[here]
            if bool((first <= start).all()) and bool((self.stop[here] >= stop).all()):
                return Located(np.arange(len(start)), start, start - first + self.row[here], spans.size, True)
        number, here = joined(start, stop, self.start, self.stop)
        first, last = np.maximum(start[number], self.start[here]), np.minimum(stop[number], self.stop[here])
        size, row = last - first, first + (self.row - self.start)[here]
        return Located(number, first, row, size, int(size.sum()) == spans.total)

    def meets(self, other: RowMap) -> bool:
        """Whether the buffers have a row in common; none of the spans is empty."""
        few, many = sorted((self, other), key=len)
        here = np.searchsorted(many.stop, few.start, side="right")
        there = here < len(many)
        return bool((many.start[here[there]] < few.stop[there]).any())


@dataclass(frozen=True, eq=False)
class Parts:
    """Global spans at rows of a tensor, in any order: span n at rows [row[n], row[n] + its size)."""

    spans: Spans
    row: Column
    _known: dict[RowMap, Found] = field(default_factory=dict)

    def found_in(self, buffer: RowMap) -> Found:
        """Which of these rows a buffer has."""
        if buffer not in self._known:
            self._known[buffer] = self._found_in(buffer)
        return self._known[buffer]

    def _found_in(self, buffer: RowMap) -> Found:
        located, start = buffer.locate(self.spans), self.spans.start
        there, count = located.row, located.count
        here = self.row
        if located.start is not start:
            here = here[located.number] + located.start - start[located.number]
        rest = _NOTHING if located.whole else self._without(located)
        if not (one_range(here, count) or one_range(there, count)):  # One gather, no scatter.
            order = np.argsort(there, kind="stable")
            here, there, count = here[order], there[order], count[order]
        return Found(here, there, count, rest)

    def _without(self, located: Located) -> Parts:
        order, taken = by_start(self.spans.start), by_start(located.start)
        start, row = self.spans.start[order], self.row[order]
        found = located.start[taken]
        rest = subtract(Spans(start, self.spans.stop[order]), Spans(found, found + located.count[taken]))
        span = np.searchsorted(start, rest.start, side="right") - 1
        return Parts(rest, row[span] + rest.start - start[span])


class Found(NamedTuple):
    """Rows [here, here + count) of a tensor are rows [there, there + count) of a buffer; and the tensor's other
    rows.
    """

    here: Column
    there: Column
    count: Column
    rest: Parts


_NOTHING = Parts(Spans(*np.zeros((2, 0), dtype=np.int64)), np.zeros(0, dtype=np.int64))


def by_start(start: Column) -> Column | slice:
    """The order of spans, or of rows, from the first one on."""
    return slice(None) if bool((start[1:] >= start[:-1]).all()) else np.argsort(start, kind="stable")


def shared_out(parts: Parts, places: Iterable[tuple[Place, RowMap]]) -> tuple[list[tuple[Place, Found]], Spans]:
    """For each buffer in turn, the rows of a tensor that it has and no earlier one; and the rows that none has.

    >>> spans, first, second = (Spans(*np.array(x)) for x in ([[0], [9]], [[2], [4]], [[3], [9]]))
    >>> found, rest = shared_out(spans.packed, [("a", first.buffer), ("b", second.buffer)])
    >>> [(name, x.here.tolist(), x.there.tolist(), x.count.tolist()) for name, x in found], rest.total
    ([('a', [2], [0], [2]), ('b', [4], [1], [5])], 2)
    """
    shares: list[tuple[Place, Found]] = []
    for place, buffer in places:
        if len(parts.spans):
            found = parts.found_in(buffer)
            if len(found.count):
                shares.append((place, found))
            parts = found.rest
    return shares, parts.spans


def subtract(spans: Spans, others: Spans) -> Spans:
    """The rows of `spans` that are not in `others`; both are sorted and disjoint.

    >>> rest = subtract(Spans(np.array([0, 6]), np.array([4, 9])), Spans(np.array([2]), np.array([7])))
    >>> rest.start.tolist(), rest.stop.tolist()
    ([0, 7], [2, 9])
    >>> rest = subtract(Spans(np.array([0]), np.array([4])), Spans(np.array([0, 2]), np.array([2, 3])))
    >>> rest.start.tolist(), rest.stop.tolist()
    ([3], [4])
    """
    far = np.array([2**60])
    begin, end = np.append(-far, others.stop), np.append(others.start, far)
    some = begin < end  # Touching spans have no gap.
    begin, end = begin[some], end[some]
    number, gap = joined(spans.start, spans.stop, begin, end)
    return Spans(np.maximum(spans.start[number], begin[gap]), np.minimum(spans.stop[number], end[gap]))
