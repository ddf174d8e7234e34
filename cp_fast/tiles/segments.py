"""A tile's diagonal band as a kernel's window, and tiles cut so that few windows serve all of them.

A kernel's window is aligned to the last row and last key of a tile. So tiles share a launch only if the diagonal band
has the same position at these corners. In packed batches it differs for the tiles of every sequence. So each tile whose
window is not the problem's own is cut, by itself, into at most three with corners on an edge of the diagonal band:

        keys ->             A   right edge in the corner: window (width of the diagonal band, 0)
      . a a a a . .         B   left edge in the corner: window (0, unbounded)
      . . a a a a .         C   nothing hidden: no window
      . . . b b c c
      . . . . b c c

Then all sequences share four windows, for any lengths. A large tile stays whole with a separate window, since one large
launch is better than three. The cut of a tile depends on nothing else, so a sequence's results have the same bits in
every batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cp_fast.passes import bit_of
from cp_ref.schedules.areas import UNBOUNDED, Areas, crop
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Tiles
from cp_ref.schedules.table import Column, Spans, Table, constant, in_blocks, ranges

__all__ = [
    "SegmentRows",
    "Segments",
    "WindowRule",
    "WindowedTiles",
    "one_each",
    "own_window",
    "split_windows",
    "windowed",
    "with_windows",
]

# ---- Tiles with windows


_SPLIT = bit_of("split_windows")


@dataclass(frozen=True, eq=False)
class WindowedTiles(Table):
    """Tiles with their diagonal bands: rectangles of global rows, cropped; `left` and `right` are the kernel's window,
    -1 for unbounded. `made_by` has the compiler passes that made each tile (`pass_table.bit_of`); 0 for the schedule's
    own.
    """

    area: Column
    q_start: Column
    q_stop: Column
    k_start: Column
    k_stop: Column
    lo: Column
    hi: Column
    left: Column
    right: Column
    made_by: Column

    @property
    def full(self) -> Column:
        """Whether nothing is hidden."""
        return (self.left < 0) & (self.right < 0)

    @property
    def diagonal(self) -> Column:
        """Whether the last row's last visible key is the tile's last key, as in causal squares."""
        return self.hi == self.k_stop - self.q_stop


class WindowRule(NamedTuple):
    """`own`: the problem's window (left, right), -1 for unbounded; a tile with it is never cut. `large`: the number of
    query rows from which a tile has its own window. `disjoint`: whether no two areas are known to share rows.
    """

    own: tuple[int, int]
    large: int
    disjoint: bool = False


def own_window(problem: Problem) -> tuple[int, int]:
    """The problem's window; of areas the window of most query rows, among those with hidden pairs."""
    if problem.areas is None:
        left, right = problem.window_size
        return left, 0 if problem.causal else right
    rows: Counter[tuple[int, int]] = Counter()
    for q_start, q_stop, _, _, left, right in problem.areas:
        rows[left, right] += q_stop - q_start
    del rows[-1, -1]
    return max(rows, key=lambda window: (rows[window], window), default=(-1, -1))


def with_windows(areas: Areas, tiles: Tiles) -> WindowedTiles:
    """A schedule's tiles with their diagonal bands, cropped to rows and keys with visible pairs. Only the first keys
    stay, seen or not: the planner may have them begin with a block (`Visibility`).
    """
    lo, hi = areas.lo[tiles.area], areas.hi[tiles.area]
    q0, q1, k0, k1 = crop(tiles.q_start, tiles.q_stop, tiles.k_start, tiles.k_stop, lo, hi)
    there = (q0 < q1) & (k0 < k1)
    k0 = tiles.k_start
    if not there.all():
        q0, q1, k0, k1, lo, hi = (x[there] for x in (q0, q1, k0, k1, lo, hi))
    return windowed(tiles.area if there.all() else tiles.area[there], q0, q1, k0, k1, lo, hi)


def windowed(area: Column, q0: Column, q1: Column, k0: Column, k1: Column, lo: Column, hi: Column) -> WindowedTiles:
    """Tiles with the windows of their diagonal bands."""
    return WindowedTiles(area, q0, q1, k0, k1, lo, hi, *_windows(q0, q1, k0, k1, lo, hi), constant(0, area))


@in_blocks
def _windows(q0: Column, q1: Column, k0: Column, k1: Column, lo: Column, hi: Column) -> tuple[Column, Column]:
    corner = k1 - q1
    left = np.where(k0 - (q1 - 1) < lo, corner - lo, -1)  # -1 if no row has a hidden key on its left.
    right = np.where(k1 - 1 - q0 > hi, hi - corner, -1)
    return left, right


def split_windows(tiles: WindowedTiles, rule: WindowRule) -> WindowedTiles:
    """Tiles of few windows with the same pairs; the parts of a tile stay together, in the order right, full, left.

    >>> one = [np.array([x]) for x in (0, 0, 6, 0, 8, -2, 3)]  # six rows see two keys to the left, three to the right
    >>> cut = split_windows(windowed(*one), WindowRule((-1, -1), 2048))
    >>> [row[1:5] + row[7:9] for row in cut.rows()]
    [(0, 5, 0, 8, 5, 0), (5, 6, 3, 8, -1, -1)]
    """
    area, q0, q1, k0, k1, lo, hi, left, right, made_by = tiles.columns
    corner, (own_left, own_right) = k1 - q1, rule.own
    own = (left < 0) if own_left < 0 else corner - lo == own_left
    own &= (right < 0) if own_right < 0 else hi - corner == own_right
    left, right = np.where(own, own_left, left), np.where(own, own_right, right)
    rest = ~own & ~tiles.full
    if not rest.any():
        return WindowedTiles(area, q0, q1, k0, k1, lo, hi, left, right, made_by)
    split = np.where(right >= 0, k1 - hi, q0)  # Rows from here on see every key on the right.
    start = np.maximum(k0, split + lo)
    edge = np.where(start - (q1 - 1) < lo, q1 + lo, start)  # All rows below the split see keys from here on.
    below = split < q1
    has_right, has_full, has_left = right >= 0, below & (edge < k1), below & (start < edge)
    several = has_right.astype(np.int8) + has_full + has_left > 1
    cut = rest & ~(several & (q1 - q0 >= rule.large))
    width = np.where(lo <= -UNBOUNDED, -1, hi - lo)
    none, zero = np.full_like(left, -1), np.zeros_like(left)
    parts = [
        (~cut, q0, q1, k0, k1, left, right),
        (cut & has_right, q0, np.minimum(split, q1), k0, k1, width, zero),
        (cut & has_full, split, q1, edge, k1, none, none),
        (cut & has_left, split, q1, start, np.minimum(edge, k1), zero, none),
    ]
    chosen = [np.flatnonzero(there) for there, *_ in parts]
    order = np.argsort(np.concatenate(chosen), kind="stable")
    q0, q1, k0, k1, left, right = (
        np.concatenate([part[n][c] for part, c in zip(parts, chosen, strict=True)])[order] for n in range(1, 7)
    )
    tile = np.concatenate(chosen)[order]
    made_by = np.where(cut, _SPLIT, made_by)[tile]
    return WindowedTiles(area[tile], q0, q1, k0, k1, lo[tile], hi[tile], left, right, made_by)


# ---- Segments
#
# Segments of kernel launches: queries and keys with one window, whose rows may lie anywhere.
#
# Rows are gathered for the launch, or they are contiguous.


Row = tuple[int, int, int]  # Segment, first global row, the row behind the last.


@dataclass(frozen=True, eq=False)
class SegmentRows(Table):
    """The rows of segments: spans of global rows, sorted by segment."""

    segment: Column
    start: Column
    stop: Column

    @property
    def spans(self) -> Spans:
        """The rows of all segments."""
        return Spans(self.start, self.stop)

    def lengths(self, number: int) -> Column:
        """The number of rows of each of `number` segments."""
        size = self.stop - self.start
        return size if len(size) == number else np.bincount(self.segment, size, number).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of launches. Segment s has the kernel's window (left[s], right[s]), -1 for unbounded, the queries
    of its spans of `q`, one after the other, and the keys of its spans of `k`. `made_by`: see `WindowedTiles`.
    `layer`: in a launch with repeated rows of keys, a number for each segment; those of one layer repeat no row.
    """

    area: Column
    left: Column
    right: Column
    made_by: Column
    q: SegmentRows
    k: SegmentRows
    layer: Column | None = None

    def __len__(self) -> int:
        return len(self.area)

    @staticmethod
    def dense(area: Column, made_by: Column, q: SegmentRows, k: SegmentRows) -> Segments:
        """Segments without a mask."""
        none = constant(-1, area)
        return Segments(area, none, none, made_by, q, k)

    @staticmethod
    def of_rows(q: Sequence[Row], k: Sequence[Row]) -> Segments:
        """Segments without a mask that no pass made. No two of them share an area."""
        spans = SegmentRows.of_rows(q), SegmentRows.of_rows(k)
        area = np.unique(spans[0].segment)
        return Segments.dense(area, constant(0, area), *spans)

    def take(self, which: Column) -> Segments:
        """The segments with these numbers, in this order."""
        q, k = (_taken(spans, which, len(self)) for spans in (self.q, self.k))
        return Segments(self.area[which], self.left[which], self.right[which], self.made_by[which], q, k)

    @staticmethod
    def concat(parts: Sequence[Segments]) -> Segments:
        """The segments of all parts, in the order of their areas and queries."""
        parts = [part for part in parts if len(part)] or list(parts[:1])
        if len(parts) == 1:
            return parts[0]
        first = np.cumsum([0, *(len(part) for part in parts)])
        columns = zip(*((p.area, p.left, p.right, p.made_by) for p in parts), strict=True)
        area, left, right, made_by = map(np.concatenate, columns)
        q, k = (
            SegmentRows.concat(
                [SegmentRows(s.segment + n, s.start, s.stop) for s, n in zip(sides, first, strict=False)]
            )
            for sides in ([p.q for p in parts], [p.k for p in parts])
        )
        joined = Segments(area, left, right, made_by, q, k)
        return joined.take(np.lexsort((q.start[np.searchsorted(q.segment, np.arange(len(area)))], area)))


def _taken(spans: SegmentRows, which: Column, number: int) -> SegmentRows:
    begin, end = (np.searchsorted(spans.segment, np.arange(number), side=side) for side in ("left", "right"))
    size = (end - begin)[which]
    rows = ranges(begin[which], size)
    return SegmentRows(np.repeat(np.arange(len(which)), size), spans.start[rows], spans.stop[rows])


def one_each(tiles: WindowedTiles) -> Segments:
    """Every tile as a segment."""
    number = np.arange(len(tiles))
    q, k = SegmentRows(number, tiles.q_start, tiles.q_stop), SegmentRows(number, tiles.k_start, tiles.k_stop)
    return Segments(tiles.area, tiles.left, tiles.right, tiles.made_by, q, k)
