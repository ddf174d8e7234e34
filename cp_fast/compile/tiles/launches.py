"""The kernel launches of tiles: segments with equal windows in one varlen launch, if no two of them share a row."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cp_fast.compile.pass_table import bit_of
from cp_fast.compile.row_maps import RowMap, Spans
from cp_fast.compile.tiles.joins import (
    halved_stairs,
    merge_adjacent,
    merge_causal,
    merge_dense,
    merge_stripes,
    merge_triangles,
)
from cp_fast.compile.tiles.segments import LaunchSegments, SegmentSpans, one_each
from cp_fast.compile.tiles.shared_keys import dedupe_queries, factor_keys
from cp_fast.compile.tiles.sharing import areas_meet, layers, prepend_keys, split_disjoint
from cp_fast.compile.tiles.split_queries import split_queries
from cp_fast.compile.tiles.windows import BandTiles, WindowRule, split_windows
from cp_ref.schedules.planners.ring_members import merged
from cp_ref.schedules.table import Column, one_value

__all__ = ["overlap", "sort_keys", "tile_launches"]

_FEW = 8  # Segments.
_SAMPLE = 1024  # Spans.
_BATCH, _DISJOINT, _SORT = map(bit_of, ("batch_segments", "split_disjoint", "sort_keys"))


def tile_launches(
    tiles: BandTiles, rule: WindowRule, skipped: Collection[str] = (), *, keys_repeat: bool = False
) -> list[LaunchSegments]:
    """The launches of tiles that are computed together, in order: each has segments of one window, and each row of
    queries once. Each sequence keeps the order of its tiles.

    Args:
        skipped: the passes that do not run (`cp_fast.compile.pass_table`).
        keys_repeat: whether it costs nothing if segments of a launch have common keys.
    """
    if not len(tiles):
        return []
    if "merge_adjacent" not in skipped:
        tiles = merge_adjacent(tiles)
    if rule.disjoint or not areas_meet(tiles):
        segments = _Segments.of(tiles, rule, skipped)
        dense = segments.dense if "merge_causal" in skipped else merge_stripes(segments.dense)
        found = _batches(segments.with_dense(dense), rule, skipped)
        return [replace(some, made_by=some.made_by | _BATCH) if len(some) > 1 else some for some in found]
    best = _best(_Segments.of(tiles, rule, skipped), rule, skipped, keys_repeat=keys_repeat)
    if keys_repeat and "merge_causal" not in skipped:
        cut = _Segments.of(merge_triangles(tiles), rule, skipped)
        best = min(best, _best(cut, rule, skipped, keys_repeat=True), key=_cost)
    best = [_by_queries(some) for some in best]
    parts = best if "split_queries" in skipped or keys_repeat else map(split_queries, best)
    return [
        replace(some, layer=layers(some), made_by=some.made_by | (_DISJOINT if len(whole) > 1 else 0))
        for whole, some in zip(best, parts, strict=True)
    ]


@dataclass(frozen=True)
class _Segments:
    """Tiles as segments: causal squares, those without hidden pairs, and the others."""

    square: LaunchSegments | None
    dense: LaunchSegments
    edges: LaunchSegments | None

    @staticmethod
    def of(tiles: BandTiles, rule: WindowRule, skipped: Collection[str]) -> _Segments:
        """The segments of tiles."""
        square = edges = None
        if "merge_causal" not in skipped and bool(tiles.diagonal.any()):
            square, part = merge_causal(tiles, rule)
            tiles = tiles.take(~part) if part.any() else tiles
        if "split_windows" not in skipped:
            tiles = split_windows(tiles, rule)
        full = tiles.full
        if not full.all():
            tiles, edges = tiles.take(full), one_each(tiles.take(~full))
        dense = one_each(tiles) if "merge_dense" in skipped else merge_dense(tiles)
        return _Segments(square, dense, edges)

    def with_dense(self, dense: LaunchSegments | None = None) -> LaunchSegments:
        """All segments; `dense`: others in place of those without hidden pairs."""
        dense = self.dense if dense is None else dense
        return LaunchSegments.concat([x for x in (self.square, dense, self.edges) if x is not None])


def _best(
    segments: _Segments, rule: WindowRule, skipped: Collection[str], *, keys_repeat: bool
) -> list[LaunchSegments]:
    """Segments of attention slices that share rows, as few launches."""
    dense = segments.dense
    factored = dense if "factor_keys" in skipped or len(dense) < 2 else factor_keys(dense)
    best = _fewest(segments.with_dense(factored), rule, skipped)
    if "dedupe_queries" in skipped or len(dense) < 2:
        return best
    most = math.inf if keys_repeat else len(best) * _most_keys(segments.with_dense())
    deduped = dedupe_queries(dense, most)
    if deduped is None:
        return best
    other = _fewest(segments.with_dense(deduped), rule, skipped, len(best), keys_repeat=keys_repeat)
    return min(best, other or best, key=_cost)


def _fewest(
    way: LaunchSegments,
    rule: WindowRule,
    skipped: Collection[str],
    most: float = math.inf,
    *,
    keys_repeat: bool = False,
) -> list[LaunchSegments]:
    """The segments in launches, with keys prepended to causal segments or not, by the lower cost. Empty if both need
    more launches than `most`.
    """
    best: list[LaunchSegments] = []
    joined = way if "prepend_keys" in skipped else prepend_keys(way)
    for some in (joined, way) if len(joined) < len(way) else (way,):
        found: list[LaunchSegments] = []
        for group in _by_window(some, rule):
            if "split_disjoint" in skipped:
                more = _one_by_one(group)
            else:
                more = split_disjoint(group, most - len(found), keys_repeat=keys_repeat)
            if more is None:
                break
            found += more
        else:
            if not best or _cost(found) < _cost(best):
                best, most = found, len(found)
    return best


def _one_by_one(segments: LaunchSegments) -> list[LaunchSegments]:
    """Each segment alone."""
    return [segments.take(np.array([n])) for n in range(len(segments))]


def _batches(segments: LaunchSegments, rule: WindowRule, skipped: Collection[str]) -> Iterator[LaunchSegments]:
    """The segments of attention slices without common rows in launches."""
    if "batch_segments" in skipped:
        yield from _one_by_one(segments)
        return
    for group in _by_window(segments, rule):
        yield from _places(group, skipped)


def _most_keys(segments: LaunchSegments) -> int:
    """The most rows of keys of a launch of these queries and keys: each key once, plus half the number of queries."""
    q, k = (merged(spans.start, spans.stop) for spans in (segments.q, segments.k))
    return int((k[1] - k[0]).sum()) + int((q[1] - q[0]).sum()) // 2


def _cost(launches: Sequence[LaunchSegments]) -> tuple[int, int]:
    """The number of launches, and of their rows of queries: each row is read, and its result merged."""
    return len(launches), sum(int((launch.q.stop - launch.q.start).sum()) for launch in launches)


def sort_keys(launch: LaunchSegments, rows: RowMap, keys: Spans) -> LaunchSegments:
    """A launch without hidden pairs, with each segment's keys in the order of their buffer. With few segments the keys
    may then be contiguous and need no gather. `keys` are those of its `k`.
    """
    if launch.left[0] >= 0 or launch.right[0] >= 0 or len(launch) > _FEW:
        return launch
    located = rows.locate(keys)
    segment = launch.k.segment[located.number]
    order = np.lexsort((located.row, segment))
    start, count = located.start[order], located.count[order]
    made_by = launch.made_by if bool((order[1:] > order[:-1]).all()) else launch.made_by | _SORT
    return replace(launch, k=SegmentSpans(segment[order], start, start + count), made_by=made_by)


def _by_queries(segments: LaunchSegments) -> LaunchSegments:
    """The segments in the order of their queries. If a launch has most rows of a buffer, they are then contiguous and
    need no gather.
    """
    first = segments.q.start[np.searchsorted(segments.q.segment, np.arange(len(segments)))]
    return segments.take(np.argsort(first, kind="stable"))


def _by_window(segments: LaunchSegments, rule: WindowRule) -> Iterator[LaunchSegments]:
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


def _places(segments: LaunchSegments, skipped: Collection[str]) -> Iterator[LaunchSegments]:
    """The segments in launches without repeated rows of queries or keys, since results are added by rows. The first
    segments of all attention slices are one launch, the second ones the next: attention slices have no rows in common.
    Stairs of many segments are halved first.
    """
    if not (overlap(segments.q.start, segments.q.stop) or overlap(segments.k.start, segments.k.stop)):
        yield segments
        return
    if not bool((segments.area[1:] >= segments.area[:-1]).all()):
        segments = segments.take(np.argsort(segments.area, kind="stable"))
    if "factor_keys" in skipped:
        place = np.arange(len(segments)) - np.searchsorted(segments.area, segments.area)  # In their attention slice.
    else:
        segments, place = halved_stairs(segments)
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
