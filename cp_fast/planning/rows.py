"""Where rows of the global packed buffers lie in a local buffer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_ref.spec import Column, Fragments, joined

__all__ = ["Located", "RowMap", "RowMaps", "Spans", "count", "intersect", "subtract"]

Spans = tuple[Column, Column]  # (start, stop) of spans of global rows
_KNOWN = 4  # answers of a map: a launch asks for the same rows of several tensors


@dataclass(frozen=True, eq=False)
class Located:
    """Global spans in a buffer: span `number[n]` of those asked for has rows [row[n], row[n] + count[n]), in order."""

    number: Column
    start: Column  # the global row that row[n] holds
    row: Column
    count: Column
    whole: bool  # all rows that were asked for

    @cached_property
    def spans(self) -> Spans:
        """The global rows that were found."""
        return self.start, self.start + self.count

    @cached_property
    def total(self) -> int:
        """The number of rows that were found."""
        return int(self.count.sum())

    @cached_property
    def by_row(self) -> Column:
        """The order in which they lie in the buffer."""
        return np.argsort(self.row, kind="stable")

    @cached_property
    def rows_in_order(self) -> tuple[Column, Column]:
        """The rows and their numbers, in the order in which they lie in the buffer."""
        return self.row[self.by_row], self.count[self.by_row]


class RowMap:
    """A buffer's contents: global rows [start, stop) lie at rows [row, row + stop - start). Sorted by start, disjoint.

    >>> buffer = RowMap.packed((np.array([8, 0]), np.array([12, 4])))  # rows 8 to 11, then rows 0 to 3
    >>> located = buffer.locate((np.array([2]), np.array([10])))
    >>> located.row.tolist(), located.count.tolist()
    ([6, 0], [2, 2])
    """

    def __init__(self, start: Column, stop: Column, row: Column) -> None:
        self.start, self.stop, self.row = start, stop, row
        self._known: deque[tuple[Spans, Located]] = deque(maxlen=_KNOWN)

    def __len__(self) -> int:
        return len(self.start)

    @staticmethod
    def packed(spans: Spans) -> RowMap:
        """A buffer that holds these spans one behind the other."""
        start, stop = spans
        size = stop - start
        return RowMap.at(start, stop, np.cumsum(size) - size)

    @staticmethod
    def at(start: Column, stop: Column, row: Column) -> RowMap:
        """A buffer that holds these spans from these rows on."""
        if not bool((start[1:] >= start[:-1]).all()):
            order = np.argsort(start, kind="stable")
            start, stop, row = start[order], stop[order], row[order]
        return RowMap(start, stop, row)

    @staticmethod
    def of(fragments: Fragments) -> RowMap:
        """A rank's own buffer."""
        return RowMap.at(fragments.start, fragments.stop, fragments.row)

    def locate(self, spans: Spans) -> Located:
        """The rows of these spans, as far as they are here: by span, and in the order of the global rows."""
        if (located := self._recognised(spans)) is not None:
            return located
        for known, located in self._known:
            if same_spans(known, spans):
                return located
        located = self._locate(*spans)
        self._known.appendleft((spans, located))
        return located

    def covers(self, spans: Spans) -> bool:
        """Whether all of these rows are here. Most buffers that lack some lack the first one, which is looked for."""
        if (located := self._recognised(spans)) is not None:
            return located.whole
        if len(spans[0]):
            here = int(np.searchsorted(self.stop, spans[0][0], side="right"))
            if here == len(self) or self.start[here] > spans[0][0]:
                return False
        return self.locate(spans).whole

    def _recognised(self, spans: Spans) -> Located | None:
        """What was found for these very columns."""
        start, stop = spans
        for (known_start, known_stop), located in self._known:
            if start is known_start and stop is known_stop:
                return located
        return None

    def _locate(self, start: Column, stop: Column) -> Located:
        if len(start) == len(self) and np.array_equal(start, self.start):  # all stretches, or the first part of each
            if np.array_equal(stop, self.stop) or bool((stop <= self.stop).all()):
                return Located(np.arange(len(start)), start, self.row, stop - start, True)
        elif len(self):
            here = np.searchsorted(self.stop, start, side="right")  # usually each span lies in one stretch
            np.minimum(here, len(self) - 1, out=here)
            if bool((self.start[here] <= start).all()) and bool((self.stop[here] >= stop).all()):
                return Located(np.arange(len(start)), start, start + (self.row - self.start)[here], stop - start, True)
        number, here = joined(start, stop, self.start, self.stop)
        first, last = np.maximum(start[number], self.start[here]), np.minimum(stop[number], self.stop[here])
        size, row = last - first, first + (self.row - self.start)[here]
        return Located(number, first, row, size, int(size.sum()) == count((start, stop)))

    def meets(self, other: RowMap) -> bool:
        """Whether the buffers have a row in common; none of the spans is empty."""
        few, many = sorted((self, other), key=len)
        here = np.searchsorted(many.stop, few.start, side="right")
        there = here < len(many)
        return bool((many.start[here[there]] < few.stop[there]).any())


class RowMaps:
    """The packed buffers of a plan: equal ones are one map, as q, kv, do and their results often have the same rows."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[tuple[Spans, RowMap]]] = {}  # by what is quickly compared

    def packed(self, spans: Spans) -> RowMap:
        """`RowMap.packed`, or what it gave for equal spans."""
        start, stop = spans
        key = (len(start), int(start[0]), int(start[-1]), int(stop[-1])) if len(start) else (0,)
        known = self._known.setdefault(key, [])
        for others, rows in known:
            if same_spans(others, spans):
                return rows
        known.append((spans, RowMap.packed(spans)))
        return known[-1][1]


def same_spans(spans: Spans, others: Spans) -> bool:
    """Whether these are the same spans in the same order."""
    (start, stop), (start_2, stop_2) = spans, others
    if start is start_2 and stop is stop_2:
        return True
    if len(start) != len(start_2) or (len(start) and (start[0] != start_2[0] or stop[-1] != stop_2[-1])):
        return False
    return bool((start == start_2).all() and (stop == stop_2).all())


def count(spans: Spans) -> int:
    """The number of rows in the buffer."""
    return int((spans[1] - spans[0]).sum())


def intersect(spans: Spans, others: Spans) -> Spans:
    """The rows that are in both; `others` are sorted and disjoint.

    >>> [x.tolist() for x in intersect((np.array([0, 6]), np.array([4, 9])), (np.array([2]), np.array([7])))]
    [[2, 6], [4, 7]]
    """
    number, other = joined(*spans, *others)
    return np.maximum(spans[0][number], others[0][other]), np.minimum(spans[1][number], others[1][other])


def subtract(spans: Spans, others: Spans) -> Spans:
    """The rows of `spans` that are not in `others`; both are sorted and disjoint.

    >>> [x.tolist() for x in subtract((np.array([0, 6]), np.array([4, 9])), (np.array([2]), np.array([7])))]
    [[0, 7], [2, 9]]
    >>> [x.tolist() for x in subtract((np.array([0]), np.array([4])), (np.array([0, 2]), np.array([2, 3])))]
    [[3], [4]]
    """
    far = np.array([2**60])
    begin, end = np.append(-far, others[1]), np.append(others[0], far)
    some = begin < end  # others that touch have nothing between them
    return intersect(spans, (begin[some], end[some]))
