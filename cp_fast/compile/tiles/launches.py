"""Tiles with equal windows in one kernel launch, if no two of them share a row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cp_fast.compile.row_maps import RowMap, Spans
from cp_fast.compile.tiles.joins import Segments, SegmentSpans, boxes, one_each, squares, strips
from cp_fast.compile.tiles.sharing import alike, apart, areas_meet, behind, layers, staircases
from cp_fast.compile.tiles.spreading import spread
from cp_fast.compile.tiles.windows import BandTiles, WindowRule, cut_to_windows
from cp_ref.spec import Column
from cp_ref.spec.planners.ring_members import merged
from cp_ref.spec.tables.table import one_value

__all__ = ["LaunchTable", "keys_in_buffer_order", "launch_tables", "overlap"]

_FEW = 8  # Segments.
_SAMPLE = 1024  # Spans.


class LaunchTable(NamedTuple):
    """One launch: its window, its rows as spans of global rows, segment after segment, and the segments' lengths.

    Each row of queries occurs once. Without `layer` each row of keys also occurs once. Otherwise `layer` has a number
    for each segment, and segments with the same number have no row of keys in common.
    """

    left: int | None
    right: int | None
    q: SegmentSpans
    k: SegmentSpans
    lengths_q: Column
    lengths_k: Column
    layer: Column | None = None


def launch_tables(tiles: BandTiles, rule: WindowRule) -> list[LaunchTable]:
    """The launches of tiles that are computed together, in order. Each sequence keeps the order of its tiles."""
    if not len(tiles):
        return []
    meet = not rule.apart and areas_meet(tiles)
    tiles = boxes(tiles)
    square = edges = None
    if bool(tiles.diagonal.any()):
        square, part = squares(tiles, rule)
        tiles = tiles.take(~part) if part.any() else tiles
    tiles = cut_to_windows(tiles, rule)
    full = tiles.full
    if not full.all():
        tiles, edges = tiles.take(full), one_each(tiles.take(~full))
    strip = strips(tiles)

    def with_others(strip: Segments) -> Segments:
        return Segments.concat([x for x in (square, strip, edges) if x is not None])

    if not meet:
        return [_launch(found) for group in _by_window(with_others(strip), rule) for found in _places(group)]
    best = _fewest(with_others(staircases(strip) if len(strip) > 1 else strip), rule)
    if len(strip) > 1 and (other := alike(strip, len(best) * _most_keys(with_others(strip)))) is not None:
        best = min(best, _fewest(with_others(other), rule, len(best)) or best, key=_cost)
    return [_launch(some, layers(some)) for some in (spread(_by_queries(x)) for x in best)]


def _fewest(way: Segments, rule: WindowRule, most: float = math.inf) -> list[Segments]:
    """The segments in launches, with keys prepended to causal segments or not, by the lower cost. Empty if both need
    more launches than `most`.
    """
    best: list[Segments] = []
    joined = behind(way)
    for some in (joined, way) if len(joined) < len(way) else (way,):
        found: list[Segments] = []
        for group in _by_window(some, rule):
            more = apart(group, most - len(found))
            if more is None:
                break
            found += more
        else:
            if not best or _cost(found) < _cost(best):
                best, most = found, len(found)
    return best


def _most_keys(segments: Segments) -> int:
    """The most rows of keys of a launch of these queries and keys: each key once, plus half the number of queries."""
    q, k = (merged(spans.start, spans.stop) for spans in (segments.q, segments.k))
    return int((k[1] - k[0]).sum()) + int((q[1] - q[0]).sum()) // 2


def _cost(launches: Sequence[Segments]) -> tuple[int, int]:
    """The number of launches, and of their rows of queries: each row is read, and its result merged."""
    return len(launches), sum(int((launch.q.stop - launch.q.start).sum()) for launch in launches)


def keys_in_buffer_order(table: LaunchTable, rows: RowMap, keys: Spans) -> LaunchTable:
    """A launch without hidden pairs, with each segment's keys in the order of their buffer. With few segments the keys
    may then be contiguous and need no gather. `keys` are those of its `k`.
    """
    if table.left is not None or table.right is not None or len(table.lengths_k) > _FEW:
        return table
    located = rows.locate(keys)
    segment = table.k.segment[located.number]
    order = np.lexsort((located.row, segment))
    start, count = located.start[order], located.count[order]
    return table._replace(k=SegmentSpans(segment[order], start, start + count))


def _by_queries(segments: Segments) -> Segments:
    """The segments in the order of their queries. If a launch has most rows of a buffer, they are then contiguous and
    need no gather.
    """
    first = segments.q.start[np.searchsorted(segments.q.segment, np.arange(len(segments)))]
    return segments.take(np.argsort(first, kind="stable"))


def _launch(segments: Segments, layer: Column | None = None) -> LaunchTable:
    left, right = int(segments.left[0]), int(segments.right[0])
    lengths = segments.q.lengths(len(segments)), segments.k.lengths(len(segments))
    window = (None if left < 0 else left), (None if right < 0 else right)
    return LaunchTable(*window, segments.q, segments.k, *lengths, layer)


def _by_window(segments: Segments, rule: WindowRule) -> Iterator[Segments]:
    """The segments of each window. The problem's own window comes first: its launch has most rows, and the rest is
    merged into it. Then come a right edge in the corner, no edge, a left one, both.
    """
    left, right = segments.left, segments.right
    if one_value(left) and one_value(right):
        yield segments
        return
    pairs = np.unique(left + 1j * right)  # As one number each.
    windows = list(zip(pairs.real.astype(int).tolist(), pairs.imag.astype(int).tolist(), strict=True))
    kinds = [rule.own, *((-1, 0), (-1, -1), (0, -1))]

    def place(window: tuple[int, int]) -> tuple[int, int, int]:
        kind = (-1, 0) if window[1] == 0 and window != rule.own else window
        return kinds.index(kind) if kind in kinds else len(kinds), *window

    for window in sorted(windows, key=place):
        yield segments.take(np.flatnonzero((left == window[0]) & (right == window[1])))


def _places(segments: Segments) -> Iterator[Segments]:
    """The segments in launches without repeated rows of queries or keys, since results are added by rows. The first
    segments of all areas are one launch, the second ones the next: areas have no rows in common.
    """
    if not (overlap(segments.q.start, segments.q.stop) or overlap(segments.k.start, segments.k.stop)):
        yield segments
        return
    if not bool((segments.area[1:] >= segments.area[:-1]).all()):
        segments = segments.take(np.argsort(segments.area, kind="stable"))
    place = np.arange(len(segments)) - np.searchsorted(segments.area, segments.area)  # In their area.
    for n in range(int(place.max()) + 1):
        yield segments.take(np.flatnonzero(place == n))


def overlap(start: Column, stop: Column) -> bool:
    """Whether any two spans have a row in common."""
    if bool((start[1:] >= start[:-1]).all()):
        return bool((start[1:] < stop[:-1]).any())
    for size in (_SAMPLE, len(start)) if len(start) > _SAMPLE else (len(start),):  # If many overlap, a sample shows it.
        order = np.argsort(start[:size])
        if bool((start[order[1:]] < stop[order[:-1]]).any()):
            return True
    return False
