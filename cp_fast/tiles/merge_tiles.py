"""Merge tiles of an area.

merge_adjacent   touching tiles, if their bounding rectangle has no other rows and pairs: that rectangle.
merge_causal     the own chunks of a causal sequence: q early x k early, q late x k early, q late x k late are one
                 causal square.
merge_triangles  a causal tile and tiles of its hidden pairs: rectangles, cheap as segments with common keys.
merge_dense      tiles without hidden pairs and with the same queries: one segment with all their keys in any order.
                 Tiles of other queries with exactly the same keys join it too.
merge_stripes    segments of many rows, each of which sees a key more than the row before it: one causal segment. With a
                 window, later rows have the row before's keys from the next one on.
halved_stairs    many segments, each of which sees the keys of the one before it and more: few disjoint rectangles.

Stripes: row n of eight ranks' buffers is row 8 n + rank of the document. Rank 2 sees keys of rank 1, and of two ranks:

    merge_stripes    a . . .      halved_stairs    a a . . . . . .      a: one launch
                     a a . .                       b b a a . . . .      b: another one
                     a a a .                       c c c c a a . .      c: a third
                     a a a a                       c c c c b b a a
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cp_fast.passes import bit_of
from cp_fast.tiles.segments import SegmentRows, Segments, WindowedTiles, WindowRule, one_each, windowed
from cp_ref.schedules.areas import UNBOUNDED, pairs
from cp_ref.schedules.table import Column, constant, ranges, runs

__all__ = [
    "halved_stairs",
    "merge_adjacent",
    "merge_causal",
    "merge_dense",
    "merge_stripes",
    "merge_triangles",
]

_ADJACENT, _CAUSAL, _DENSE, _FACTOR = map(bit_of, ("merge_adjacent", "merge_causal", "merge_dense", "factor_keys"))
_MANY = 8  # Segments of an area; fewer are a launch each.


def merge_dense(tiles: WindowedTiles) -> Segments:
    """Tiles without hidden pairs as few segments.

    >>> from cp_fast.tiles.segments import windowed
    >>> four = [(0, 0, 2, 4, 6), (0, 0, 2, 8, 9), (0, 10, 12, 4, 6), (0, 10, 12, 8, 9)]  # area, queries, keys
    >>> edge = np.full(4, UNBOUNDED)
    >>> found = merge_dense(windowed(*map(np.array, zip(*four)), -edge, edge))
    >>> list(found.q.rows()), list(found.k.rows())
    ([(0, 0, 2), (0, 10, 12)], [(0, 4, 6), (0, 8, 9)])
    """
    q0, q1, k0 = tiles.q_start, tiles.q_stop, tiles.k_start
    if len(tiles) and not bool(
        ((q0[1:] > q0[:-1]) | ((q0[1:] == q0[:-1]) & (k0[1:] >= k0[:-1]) & (q1[1:] == q1[:-1]))).all()
    ):
        tiles = tiles.take(np.lexsort((k0, q1, q0)))
        q0, q1 = tiles.q_start, tiles.q_stop
    begin, size = runs((q0[1:] != q0[:-1]) | (q1[1:] != q1[:-1]), len(tiles))  # Tiles with the same queries.
    first, queries = runs(~_same_keys(tiles, begin, size), len(begin))  # Segments: those with the same keys.
    number = np.arange(len(first))
    keys = ranges(begin[first], size[first])
    area = tiles.area[begin[first]]
    merged = (queries > 1) | (size[first] > 1)
    return Segments.dense(
        area,
        np.where(merged, _DENSE, tiles.made_by[begin[first]]),
        SegmentRows(np.repeat(number, queries), q0[begin], q1[begin]),
        SegmentRows(np.repeat(number, size[first]), tiles.k_start[keys], tiles.k_stop[keys]),
    )


def _same_keys(tiles: WindowedTiles, begin: Column, size: Column) -> Column:
    """Whether each group of tiles after the first has the keys of the group before it."""
    same = (size[1:] == size[:-1]) & (tiles.k_start[begin[1:]] == tiles.k_start[begin[:-1]])  # Quick: it decides most.
    some = np.flatnonzero(same)
    if len(some):
        here = ranges(begin[1:][some], size[1:][some])
        before = here - np.repeat(size[1:][some], size[1:][some])
        equal = (tiles.k_start[here] == tiles.k_start[before]) & (tiles.k_stop[here] == tiles.k_stop[before])
        ends = np.cumsum(size[1:][some])
        same[some] = np.logical_and.reduceat(equal, ends - size[1:][some])
    return same


def merge_stripes(segments: Segments) -> Segments:
    """Rows of an area, each with a key more than the row before, as causal segments. With a window the number of keys
    stays the same, and they begin one key later. `segments` have no mask, and areas no rows in common.

    >>> rows = range(10)  # row 8 n + 1 sees keys 0, 8, ..., 8 n
    >>> q, k = [(n, 8 * n + 1, 8 * n + 2) for n in rows], [(n, 8 * m, 8 * m + 1) for n in rows for m in range(n + 1)]
    >>> one = merge_stripes(replace(Segments.of_rows(q, k), area=np.zeros(10, dtype=np.int64)))
    >>> len(one), one.right.tolist(), list(one.k.rows()) == [(0, 8 * m, 8 * m + 1) for m in rows]
    (1, [0], True)
    """
    if not _many(segments):
        return segments
    (rows, keys), area, k = (
        (side.lengths(len(segments)) for side in (segments.q, segments.k)),
        segments.area,
        segments.k,
    )
    first = np.searchsorted(k.segment, np.arange(len(segments) + 1))
    last, size = first[1:] - 1, np.diff(first)
    single = (rows == 1) & (k.stop[last] - k.start[last] == 1)
    next_to = single[1:] & single[:-1] & (area[1:] == area[:-1]) & (k.start[last[1:]] > k.start[last[:-1]])
    grows, slides = (next_to & (keys[1:] == keys[:-1] + more) & (size[1:] == size[:-1] + more) for more in (1, 0))
    grows &= _same(k, first[1:-1], first[:-2], np.where(grows, size[:-1], 0))
    slides &= _same(k, first[1:-1], first[:-2] + 1, np.where(slides, size[1:] - 1, 0))
    follows = slides | grows & ~np.append(False, slides[:-1])  # No row sees more keys once one has lost one.
    begin, count = runs(~follows, len(segments))
    stripe = count > _MANY
    if not stripe.any():
        return segments
    begin, count = begin[stripe], count[stripe]
    end, number = begin + count - 1, np.arange(len(begin))
    inside = ranges(begin, count)
    queries = segments.take(inside).q
    # The keys of the first row, and the last key of each other one.
    start = last[begin] - size[begin] + 1
    key = np.concatenate([ranges(start, size[begin]), last[np.setdiff1d(inside, begin)]])
    of = np.concatenate([np.repeat(number, size[begin]), np.repeat(number, count - 1)])
    order = np.lexsort((k.start[key], of))
    merged = Segments(
        area[begin],
        np.where(slides[end - 1], keys[end] - 1, -1),
        np.zeros_like(number),
        constant(_CAUSAL, number),
        SegmentRows(np.repeat(number, count)[queries.segment], queries.start, queries.stop),
        SegmentRows(of[order], k.start[key[order]], k.stop[key[order]]),
    )
    kept = np.ones(len(segments), dtype=bool)
    kept[inside] = False
    return Segments.concat([segments.take(np.flatnonzero(kept)), merged])


def halved_stairs(segments: Segments) -> tuple[Segments, Column]:
    """Segments without a mask, sorted by area, in launches without repeated rows; and each one's launch. The later half
    of an area's segments takes the keys of the earlier half together, and both are halved again, where every segment
    sees the keys of the one before it. Other areas have a segment in each launch.

    >>> q = [(n, 10 + n, 11 + n) for n in range(9)]
    >>> some = Segments.of_rows(q, [(n, 2 * m, 2 * m + 1) for n in range(9) for m in range(2 * n + 1)])
    >>> found, launch = halved_stairs(replace(some, area=np.zeros(9, dtype=np.int64)))
    >>> launch.tolist(), found.take(np.flatnonzero(launch == 3)).q.rows().__next__()
    ([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4], (0, 14, 15))
    """
    count = len(segments)
    first = np.searchsorted(segments.area, segments.area)
    place = np.arange(count) - first  # In their area.
    grows = _sees_more(segments) | (place == 0)
    some = np.bincount(segments.area)[segments.area] > _MANY
    stair = some & np.logical_and.reduceat(grows, np.unique(first))[np.cumsum(place == 0) - 1]
    if not stair.any():
        return segments, place
    spans_q, spans_k = (np.searchsorted(x.segment, np.arange(count + 1)) for x in (segments.q, segments.k))
    keys = np.diff(spans_k)  # Spans of keys of each segment.
    before = np.where(place == 0, 0, np.append(0, keys[:-1]))  # Those that the one before it sees too.
    own, rest = np.flatnonzero(stair), np.flatnonzero(~stair)
    # Of each rectangle: its launch, first and last segment of queries, the segment that has its keys, which of them.
    parts = [(constant(0, own), own, own, own, before[own], keys[own])]
    for bit in range(int(place[own].max()).bit_length()):
        later = own[place[own] >> bit & 1 > 0]
        begin, size = runs(later[1:] != later[:-1] + 1, len(later))
        middle = later[begin]
        early = middle - (1 << bit)
        parts.append(
            (constant(bit + 1, middle), middle, later[begin + size - 1], middle - 1, before[early], before[middle])
        )
    parts.append((place[rest], rest, rest, rest, np.zeros_like(rest), keys[rest]))
    launch, head, tail, of, key, stop = (np.concatenate(column) for column in zip(*parts, strict=True))
    sides: list[SegmentRows] = []
    for spans, begin, size in (
        (segments.q, spans_q[head], spans_q[tail + 1] - spans_q[head]),
        (segments.k, spans_k[of] + key, stop - key),
    ):
        row = ranges(begin, size)
        sides.append(SegmentRows(np.repeat(np.arange(len(head)), size), spans.start[row], spans.stop[row]))
    made_by = np.where(stair[head], _FACTOR, segments.made_by[head])
    q, k = sides
    return Segments(segments.area[head], segments.left[head], segments.right[head], made_by, q, k), launch


def _many(segments: Segments) -> bool:
    """Whether an area has many of these."""
    return len(segments) > _MANY and int(np.bincount(segments.area).max()) > _MANY


def _sees_more(segments: Segments) -> Column:
    """Whether each segment without a mask sees the keys of the segment before it, first, and more keys."""
    area, count = segments.area, len(segments)
    more = np.zeros(count, dtype=bool)
    if not _many(segments):
        return more
    first = np.searchsorted(segments.k.segment, np.arange(count + 1))
    size = np.diff(first)
    more[1:] = (area[1:] == area[:-1]) & (size[1:] > size[:-1]) & (segments.left[1:] < 0) & (segments.right[1:] < 0)
    more[1:] &= _same(segments.k, first[1:-1], first[:-2], np.where(more[1:], size[:-1], 0))
    return more


def _same(spans: SegmentRows, first: Column, other: Column, size: Column) -> Column:
    """Whether size[n] spans from first[n] on are those from other[n] on."""
    same, some = np.ones(len(size), dtype=bool), np.flatnonzero(size)
    if len(some):
        first, other, size = first[some], other[some], size[some]
        here, there = ranges(first, size), ranges(other, size)
        equal = (spans.start[here] == spans.start[there]) & (spans.stop[here] == spans.stop[there])
        same[some] = np.logical_and.reduceat(equal, np.cumsum(size) - size)
    return same


def merge_adjacent(tiles: WindowedTiles) -> WindowedTiles:
    """Join touching tiles of an area if their bounding rectangle has exactly their rows and pairs, as the neighbouring
    chunks of the last rank.

    >>> from cp_fast.tiles.segments import windowed
    >>> three = [(0, 0, 2, 0, 2, -3, 0), (0, 2, 4, 0, 2, -3, 0), (0, 2, 4, 2, 4, -3, 0)]  # a window of three
    >>> [row[1:5] for row in merge_adjacent(windowed(*map(np.array, zip(*three)))).rows()]
    [(0, 4, 0, 4)]
    """
    same = tiles.area[1:] == tiles.area[:-1]
    touch = (tiles.q_start[1:] == tiles.q_stop[:-1]) | (tiles.k_start[1:] == tiles.k_stop[:-1])
    if not bool((same & touch).any()):
        return tiles
    if not bool((tiles.area[1:] >= tiles.area[:-1]).all()):
        tiles = tiles.take(np.argsort(tiles.area, kind="stable"))
    begin, size = runs(tiles.area[1:] != tiles.area[:-1], len(tiles))
    q0, k0 = (np.minimum.reduceat(x, begin) for x in (tiles.q_start, tiles.k_start))
    q1, k1 = (np.maximum.reduceat(x, begin) for x in (tiles.q_stop, tiles.k_stop))
    area, lo, hi = tiles.area[begin], tiles.lo[begin], tiles.hi[begin]
    visible = pairs(q0, q1, k0, k1, lo, hi)
    cells = np.add.reduceat((tiles.q_stop - tiles.q_start) * (tiles.k_stop - tiles.k_start), begin)
    if not bool(((size > 1) & (cells >= visible)).any()):  # Visible or not: quickly counted.
        return tiles
    whole = (size > 1) & (visible == np.add.reduceat(pairs(*tiles.columns[1:7]), begin))
    if not whole.any():
        return tiles
    whole &= _rows_together(tiles.area, tiles.q_start, tiles.q_stop)[area] == q1 - q0
    whole &= _rows_together(tiles.area, tiles.k_start, tiles.k_stop)[area] == k1 - k0
    if not whole.any():
        return tiles
    joined = windowed(*(x[whole] for x in (area, q0, q1, k0, k1, lo, hi)))
    joined = replace(joined, made_by=constant(_ADJACENT, joined.area))
    found = WindowedTiles.concat([tiles.take(~np.repeat(whole, size)), joined])
    return found.take(np.argsort(found.area, kind="stable"))


def merge_causal(tiles: WindowedTiles, rule: WindowRule) -> tuple[Segments, Column]:
    """The own tiles of each causal area as one causal square; and whether each tile belongs to one.

    Queries and keys of such an area are the same positions along the diagonal, with any gaps. So each of the given rows
    sees exactly the given rows before it and itself.
    """
    diagonal = np.zeros(int(tiles.area.max(initial=0)) + 1, dtype=bool)
    diagonal[tiles.area[tiles.diagonal]] = True
    causal = (tiles.hi < UNBOUNDED) & diagonal[tiles.area]
    some = tiles.take(causal & (np.bincount(tiles.area)[tiles.area] > 1))
    if not len(some):
        return one_each(some), np.zeros(len(tiles), dtype=bool)
    q = _distinct(some.area, some.q_start, some.q_stop)
    k = _distinct(some.area, some.k_start - some.hi, some.k_stop - some.hi)
    number = int(some.area.max()) + 1
    count_q, count_k = (np.bincount(x.segment, minlength=number) for x in (q, k))
    good = (count_q == count_k) & (count_q > 0)
    q, k = q.take(good[q.segment]), k.take(good[k.segment])
    equal = (q.start == k.start) & (q.stop == k.stop)
    equal[1:] &= (q.segment[1:] != q.segment[:-1]) | (q.start[1:] >= q.stop[:-1])
    good[q.segment[~equal]] = False
    rows = np.bincount(q.segment, q.stop - q.start, number)
    visible = np.bincount(some.area, pairs(*some.columns[1:7]), number)
    good &= visible == rows * (rows + 1) / 2
    lo, hi = np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.int64)
    lo[some.area], hi[some.area] = some.lo, some.hi
    begin, end = np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.int64)
    begin[q.segment[::-1]], end[q.segment] = q.start[::-1], q.stop  # The first span's and the last one's.
    good &= hi - lo >= end - 1 - begin  # A window that hides nothing on the left.
    part = causal & (np.append(good, False)[np.minimum(tiles.area, number)])
    q = q.take(good[q.segment])
    area = np.flatnonzero(good)
    segment = (np.cumsum(good) - 1)[q.segment]
    own = SegmentRows(segment, q.start, q.stop)
    keys = SegmentRows(segment, q.start + hi[q.segment], q.stop + hi[q.segment])
    own_left, own_right = rule.own
    left = np.where((own_right == 0) & (hi - lo == own_left), own_left, -1)[area]
    return Segments(area, left, np.zeros_like(area), constant(_CAUSAL, area), own, keys), part


def merge_triangles(tiles: WindowedTiles) -> WindowedTiles:
    """Causal tiles cut where other tiles see all that they hide: both are then a rectangle. For example, a prefix that
    sees itself wholly lies in a causal document, as the causal square and the triangle next to it.

    >>> from cp_fast.tiles.segments import windowed
    >>> edge = UNBOUNDED
    >>> two = [(0, 0, 6, 0, 6, -edge, 0), (1, 2, 4, 3, 5, 1, edge)]  # causal, and queries 2 and 3 see keys up to 4
    >>> [row[1:5] + row[7:9] for row in merge_triangles(windowed(*map(np.array, zip(*two)))).rows()]
    [(0, 2, 0, 2, -1, 0), (2, 5, 0, 5, -1, -1), (5, 6, 0, 6, -1, -1)]
    """
    causal = np.flatnonzero(tiles.diagonal & (tiles.left < 0) & (tiles.right >= 0))
    beside = np.flatnonzero((tiles.left == 0) & (tiles.right < 0) & (tiles.k_start == tiles.q_start + tiles.lo))
    if not (len(causal) and len(beside)):
        return tiles
    _, band = np.unique(np.concatenate([tiles.hi[causal], tiles.lo[beside] - 1]), return_inverse=True)
    size = int(tiles.q_stop.max()) + 1
    of_causal, of_beside = band[: len(causal)] * size, band[len(causal) :] * size  # Bands side by side on one axis.
    order = np.argsort(of_causal + tiles.q_start[causal])
    causal, start = causal[order], (of_causal + tiles.q_start[causal])[order]
    found = np.searchsorted(start, of_beside + tiles.q_start[beside], side="right") - 1
    into = causal[np.maximum(found, 0)]
    # The row behind the triangle's last one sees all of its keys: it is the last one of the square.
    met = (found >= 0) & (tiles.hi[into] == tiles.lo[beside] - 1) & (tiles.q_stop[beside] < tiles.q_stop[into])
    if not met.any():
        return tiles
    beside, into = beside[met], into[met]
    order = np.lexsort((tiles.q_start[beside], into))
    beside, into = beside[order], into[order]
    whole, begin = np.unique(into, return_index=True)
    q0, q1, k0 = tiles.q_start[beside], tiles.q_stop[beside] + 1, tiles.k_start[into]
    first = np.where(np.isin(np.arange(len(into)), begin), tiles.q_start[into], np.append(0, q1[:-1]))
    gap_start, gap_stop = np.append(first, q1[np.append(begin[1:], len(into)) - 1]), np.append(q0, tiles.q_stop[whole])
    of = np.append(into, whole)
    rest = gap_start < gap_stop
    of, gap_start, gap_stop = of[rest], gap_start[rest], gap_stop[rest]
    none = constant(UNBOUNDED, into)
    parts = (
        windowed(tiles.area[into], q0, q1, k0, tiles.k_stop[beside], -none, none),
        windowed(
            *(tiles.area[of], gap_start, gap_stop, tiles.k_start[of]),
            *(gap_stop + tiles.hi[of], tiles.lo[of], tiles.hi[of]),
        ),
    )
    kept = np.ones(len(tiles), dtype=bool)
    kept[beside] = kept[whole] = False
    made = [replace(part, made_by=constant(_CAUSAL, part.area)) for part in parts]
    found_tiles = WindowedTiles.concat([tiles.take(kept), *made])
    return found_tiles.take(np.lexsort((found_tiles.q_start, found_tiles.area)))


def _rows_together(segment: Column, start: Column, stop: Column) -> Column:
    """The total number of rows of each segment's spans, by the segment's number."""
    order = np.lexsort((start, segment))
    shift = segment[order] * (int(stop.max()) + 1)  # Segments side by side on one axis, with gaps.
    start, stop = start[order] + shift, stop[order] + shift
    reach = np.maximum.accumulate(stop)
    new = stop - np.maximum(start, np.append(start[0], reach[:-1]))
    return np.bincount(segment[order], np.maximum(new, 0))


def _distinct(segment: Column, start: Column, stop: Column) -> SegmentRows:
    """Spans sorted by segment and start, equal ones once."""
    order = np.lexsort((stop, start, segment))
    segment, start, stop = segment[order], start[order], stop[order]
    new = (segment[1:] != segment[:-1]) | (start[1:] != start[:-1]) | (stop[1:] != stop[:-1])
    return SegmentRows(segment, start, stop).take(np.append(True, new))
