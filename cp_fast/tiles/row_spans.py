"""Rows as spans, and where they lie.

`Spans` (`cp_ref.schedules.table`) are rows of the global packed buffers: those of a message, a launch or a buffer. A
`Placement` says where spans lie in a buffer, or in a tensor that is one part of it:

    spans       [8:12] [0:4]          global rows
    placement   at rows 0 and 4       the buffer has rows 8 9 10 11 0 1 2 3

Two placements of the same rows tell how to move them: rows [here, here + count) of one to [there, there + count) of the
other (`Common`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from cp_fast.compile.index_tables import one_range
from cp_ref.schedules.ownership import Fragments
from cp_ref.schedules.table import Column, Spans

__all__ = ["Common", "Found", "Placement", "SpanSets", "by_start", "shared_out"]

Holder = TypeVar("Holder")


def by_start(start: Column) -> Column | slice:
    """The order of spans, or of rows, from the first one on."""
    return slice(None) if bool((start[1:] >= start[:-1]).all()) else np.argsort(start, kind="stable")


class SpanSets:
    """The spans of a plan: equal ones are one object, as q, kv, do and their results often have the same rows. So what
    is known of spans and their placements is found once, for several tensors and both programs.

    >>> sets = SpanSets()
    >>> sets.of(np.array([0]), np.array([4])) is sets.of(np.array([0]), np.array([4]))
    True
    """

    def __init__(self) -> None:
        self._by_columns: dict[tuple[int, int], tuple[Column, Column, Spans]] = {}  # By the columns' ids.
        self._by_edges: dict[tuple[int, ...], list[Spans]] = {}  # By values that compare quickly.
        self._packed: dict[Spans, Placement] = {}

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

    def packed(self, spans: Spans) -> Placement:
        """A buffer that packs these spans one after the other; the same object for the same spans. It is kept here and
        not by the spans, which launches keep alive.
        """
        if spans not in self._packed:
            self._packed[spans] = Placement.packed(spans)
        return self._packed[spans]

    def joined(self, parts: list[Spans]) -> Spans:
        """Several spans, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return self.of(np.concatenate([p.start for p in parts]), np.concatenate([p.stop for p in parts]))


class Found(NamedTuple):
    """Rows of some spans in a buffer: `count[n]` rows of span `span[n]`, from global row `start[n]` on, lie at
    `row[n]`. Span by span, in the order of the global rows. `whole`: these are all of the rows.
    """

    span: Column
    start: Column
    row: Column
    count: Column
    whole: bool


class Common(NamedTuple):
    """Rows [here, here + count) of a tensor are rows [there, there + count) of a buffer; and the tensor's other
    rows.
    """

    here: Column
    there: Column
    count: Column
    rest: Placement


@dataclass(frozen=True, eq=False)
class Placement:
    """Where rows lie: span n at rows [row[n], row[n] + its size) of a buffer, or of a tensor. Who looks for rows in it
    needs disjoint spans.

    >>> buffer = Placement.packed(Spans(np.array([8, 0]), np.array([12, 4])))  # rows 8 to 11, then rows 0 to 3
    >>> found = buffer.find(Spans(np.array([2]), np.array([10])))
    >>> found.row.tolist(), found.count.tolist()
    ([6, 0], [2, 2])
    """

    spans: Spans
    row: Column
    _found: dict[Spans, Found] = field(default_factory=dict)
    _common: dict[Placement, Common] = field(default_factory=dict)

    @staticmethod
    def of(fragments: Fragments) -> Placement:
        """A rank's own buffer."""
        return Placement(fragments.spans, fragments.row)

    @staticmethod
    def packed(spans: Spans) -> Placement:
        """A buffer that packs spans one after the other."""
        return Placement(spans, spans.begin)

    @cached_property
    def ascending(self) -> tuple[Column, Column, Column]:
        """(start, stop, row) of the spans, by start."""
        start, stop, order = self.spans.start, self.spans.stop, by_start(self.spans.start)
        return (start, stop, self.row) if isinstance(order, slice) else (start[order], stop[order], self.row[order])

    @property
    def disjoint(self) -> bool:
        """Whether no row lies there twice: as `Spans.disjoint`, by the order that `find` needs too."""
        start, stop, _ = self.ascending
        return bool((start[1:] >= stop[:-1]).all())

    def find(self, spans: Spans) -> Found:
        """The rows of these spans that are here."""
        if spans not in self._found:
            self._found[spans] = self._find(spans)
        return self._found[spans]

    def covers(self, spans: Spans) -> bool:
        """Whether all of these rows are here; they may repeat. Most buffers that lack a row lack the first one."""
        if spans not in self._found and len(spans):
            first, (start, stop, _) = spans.start[0], self.ascending
            here = int(stop.searchsorted(first, side="right"))
            if here == len(stop) or start[here] > first:
                return False
        return self.find(spans).whole

    def _find(self, spans: Spans) -> Found:
        start, stop = spans.start, spans.stop
        held, ends, row = self.ascending
        if len(start) == len(held) and bool((start == held).all()) and bool((stop <= ends).all()):
            return Found(np.arange(len(start)), start, row, spans.size, True)  # The first part of each stretch.
        if len(held):
            here = ends.searchsorted(start, side="right")  # Usually each span lies in one stretch.
            np.minimum(here, len(held) - 1, out=here)
            first = held[here]
            if bool((first <= start).all()) and bool((ends[here] >= stop).all()):
                return Found(np.arange(len(start)), start, start - first + row[here], spans.size, True)
        span, here, first, last = spans.overlaps(Spans(held, ends))
        size, row = last - first, first + (row - held)[here]
        return Found(span, first, row, size, int(size.sum()) == spans.total)

    def between(self, first: int, last: int) -> Spans:
        """The global rows that lie at rows [first, last) of the buffer, in their order there.

        >>> buffer = Placement.packed(Spans(np.array([8, 0]), np.array([12, 4])))
        >>> [x.tolist() for x in buffer.between(2, 6)]
        [[10, 0], [12, 2]]
        """
        order = np.argsort(self.row, kind="stable")
        row, start, size = self.row[order], self.spans.start[order], self.spans.size[order]
        low, high = np.maximum(row, first), np.minimum(row + size, last)
        some = low < high
        start = (start + low - row)[some]
        return Spans(start, start + (high - low)[some])

    def meets(self, other: Placement) -> bool:
        """Whether the buffers have a row in common."""
        (few, few_stop, _), (many, many_stop, _) = sorted((self.ascending, other.ascending), key=lambda x: len(x[0]))
        here = np.searchsorted(many_stop, few, side="right")
        there = here < len(many)
        return bool((many[here[there]] < few_stop[there]).any())

    def common(self, buffer: Placement) -> Common:
        """Which of these rows a buffer has. Here they may repeat."""
        if buffer not in self._common:
            self._common[buffer] = self._in_common(buffer)
        return self._common[buffer]

    def _in_common(self, buffer: Placement) -> Common:
        found, start = buffer.find(self.spans), self.spans.start
        here, there, count = self.row, found.row, found.count
        if found.start is not start:
            here = here[found.span] + found.start - start[found.span]
        rest = _NOTHING if found.whole else self._without(found)
        if not (one_range(here, count) or one_range(there, count)):  # One gather, no scatter.
            order = np.argsort(there, kind="stable")
            here, there, count = here[order], there[order], count[order]
        return Common(here, there, count, rest)

    def _without(self, found: Found) -> Placement:
        start, stop, row = self.ascending
        taken = by_start(found.start)
        first = found.start[taken]
        rest = Spans(start, stop).minus(Spans(first, first + found.count[taken]))
        span = np.searchsorted(start, rest.start, side="right") - 1
        return Placement(rest, row[span] + rest.start - start[span])


_NOTHING = Placement(Spans(*np.zeros((2, 0), dtype=np.int64)), np.zeros(0, dtype=np.int64))


def shared_out(
    rows: Placement, holders: Iterable[tuple[Holder, Placement]]
) -> tuple[list[tuple[Holder, Common]], Spans]:
    """For each buffer in turn, the rows of a tensor that it has and no earlier one; and the rows that none has.

    >>> edges = [[0], [9]], [[2], [4]], [[3], [9]]
    >>> spans, first, second = (Placement.packed(Spans(*np.array(x))) for x in edges)
    >>> found, rest = shared_out(spans, [("a", first), ("b", second)])
    >>> [(name, x.here.tolist(), x.there.tolist(), x.count.tolist()) for name, x in found], rest.total
    ([('a', [2], [0], [2]), ('b', [4], [1], [5])], 2)
    """
    shares: list[tuple[Holder, Common]] = []
    for holder, buffer in holders:
        if len(rows.spans):
            common = rows.common(buffer)
            if len(common.count):
                shares.append((holder, common))
            rows = common.rest
    return shares, rows.spans
