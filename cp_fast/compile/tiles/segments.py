"""Segments of kernel launches: queries and keys with one window, whose rows may lie anywhere.

Rows are gathered for the launch, or they are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cp_fast.compile.tiles.windows import BandTiles
from cp_ref.schedules.table import Column, Table, constant, ranges

__all__ = ["LaunchSegments", "SegmentSpans", "one_each"]


Row = tuple[int, int, int]  # Segment, first global row, the row behind the last.


@dataclass(frozen=True, eq=False)
class SegmentSpans(Table):
    """The rows of segments: spans of global rows, sorted by segment."""

    segment: Column
    start: Column
    stop: Column

    def lengths(self, number: int) -> Column:
        """The number of rows of each of `number` segments."""
        size = self.stop - self.start
        return size if len(size) == number else np.bincount(self.segment, size, number).astype(np.int64)


@dataclass(frozen=True, eq=False)
class LaunchSegments:
    """Segments of launches. Segment s has the kernel's window (left[s], right[s]), -1 for unbounded, the queries
    of its spans of `q`, one after the other, and the keys of its spans of `k`. `made_by`: see `BandTiles`.
    `layer`: in a launch with repeated rows of keys, a number for each segment; those of one layer repeat no row.
    """

    area: Column
    left: Column
    right: Column
    made_by: Column
    q: SegmentSpans
    k: SegmentSpans
    layer: Column | None = None

    def __len__(self) -> int:
        return len(self.area)

    @staticmethod
    def dense(area: Column, made_by: Column, q: SegmentSpans, k: SegmentSpans) -> LaunchSegments:
        """LaunchSegments without a mask."""
        none = constant(-1, area)
        return LaunchSegments(area, none, none, made_by, q, k)

    @staticmethod
    def of_rows(q: Sequence[Row], k: Sequence[Row]) -> LaunchSegments:
        """LaunchSegments without a mask that no pass made, each of an attention slice of its own."""
        spans = SegmentSpans.of_rows(q), SegmentSpans.of_rows(k)
        area = np.unique(spans[0].segment)
        return LaunchSegments.dense(area, constant(0, area), *spans)

    def take(self, which: Column) -> LaunchSegments:
        """The segments with these numbers, in this order."""
        q, k = (_taken(spans, which, len(self)) for spans in (self.q, self.k))
        return LaunchSegments(self.area[which], self.left[which], self.right[which], self.made_by[which], q, k)

    @staticmethod
    def concat(parts: Sequence[LaunchSegments]) -> LaunchSegments:
        """The segments of all parts, in the order of their attention slices and queries."""
        parts = [part for part in parts if len(part)] or list(parts[:1])
        if len(parts) == 1:
            return parts[0]
        first = np.cumsum([0, *(len(part) for part in parts)])
        columns = zip(*((p.area, p.left, p.right, p.made_by) for p in parts), strict=True)
        area, left, right, made_by = map(np.concatenate, columns)
        q, k = (
            SegmentSpans.concat(
                [SegmentSpans(s.segment + n, s.start, s.stop) for s, n in zip(sides, first, strict=False)]
            )
            for sides in ([p.q for p in parts], [p.k for p in parts])
        )
        joined = LaunchSegments(area, left, right, made_by, q, k)
        return joined.take(np.lexsort((q.start[np.searchsorted(q.segment, np.arange(len(area)))], area)))


def _taken(spans: SegmentSpans, which: Column, number: int) -> SegmentSpans:
    begin, end = (np.searchsorted(spans.segment, np.arange(number), side=side) for side in ("left", "right"))
    size = (end - begin)[which]
    rows = ranges(begin[which], size)
    return SegmentSpans(np.repeat(np.arange(len(which)), size), spans.start[rows], spans.stop[rows])


def one_each(tiles: BandTiles) -> LaunchSegments:
    """Every tile as a segment."""
    number = np.arange(len(tiles))
    q, k = SegmentSpans(number, tiles.q_start, tiles.q_stop), SegmentSpans(number, tiles.k_start, tiles.k_stop)
    return LaunchSegments(tiles.area, tiles.left, tiles.right, tiles.made_by, q, k)
