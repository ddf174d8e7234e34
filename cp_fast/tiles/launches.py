"""The kernel launches of tiles: segments with equal windows in one varlen launch, if no two of them share a row."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cp_fast.compile.index_tables import MOST_ROWS
from cp_fast.passes import bit_of
from cp_fast.tiles.merge_tiles import (
    halved_stairs,
    merge_adjacent,
    merge_causal,
    merge_dense,
    merge_stripes,
    merge_triangles,
)
from cp_fast.tiles.row_spans import Placement
from cp_fast.tiles.segments import SegmentRows, Segments, WindowedTiles, WindowRule, one_each, split_windows
from cp_fast.tiles.shared_rows import areas_meet, dedupe_queries, factor_keys, layers, split_disjoint
from cp_ref.schedules.table import Column, Spans, one_value

__all__ = [
    "SharedKeys",
    "share_keys",
    "sort_keys",
    "tile_launches",
]

# ---- Segments that share keys
#
# Launches whose segments share keys. Each segment reads its rows where they lie, and no row is copied.
#
# A launch usually packs the rows of its segments one after the other. So it has common keys several times. Some kernel
# libraries take the first row and the length of each segment instead. In block-causal attention, for example, block n
# sees all blocks up to block n. If keys lie in a buffer in their order, one launch has all blocks:
#
#     rows of the buffer     0       1       2       3
#     segment 3 first     [  keys of 3                ]  queries of 3
#     segment 2           [  keys of 2        ]          queries of 2
#
# The segments with most keys come first: their tiles take longest, and short ones fill the launch's end.


class SharedKeys(NamedTuple):
    """Segments, and the first row of each among the rows of q and of k and v.

    Attributes:
        start_q, start_kv: the first rows, from the first row of all on.
        q: the global rows of the segments' queries, and where they lie, in this order; other rows may lie between them.
        size_q: how many rows of its buffer q spans.
        kv: the global rows of k and v, which are consecutive in their buffer.
    """

    segments: Segments
    start_q: Column
    start_kv: Column
    q: Placement
    size_q: int
    kv: Spans

    @property
    def rows_q(self) -> Spans:
        """The global row of each row of q from the first to the last; any other one where none of these lies.

        >>> one = Placement(Spans(np.array([8, 4]), np.array([10, 5])), np.array([0, 3]))
        >>> [x.tolist() for x in SharedKeys(*[None] * 3, one, 4, None).rows_q]
        [[8, 8, 4], [10, 9, 5]]
        """
        spans, row = self.q.spans, self.q.row
        gap = np.append(row[1:], self.size_q) - row - spans.size
        start = np.stack([spans.start, np.full_like(row, spans.start[0])], axis=1).ravel()
        size = np.stack([spans.size, gap], axis=1).ravel()
        return Spans(start[size > 0], (start + size)[size > 0])


def share_keys(launches: Sequence[Segments], q: Placement, kv: Placement) -> list[SharedKeys] | None:
    """The launches on buffers with these rows. None if a segment's rows do not lie together, if padding lies between
    keys, or if all segments together have more keys than int32 numbers.

    >>> three = Segments.of_rows([(0, 0, 2), (1, 2, 4)], [(0, 0, 2), (1, 0, 4)])
    >>> buffer = Placement(Spans(np.array([0]), np.array([4])), np.array([10]))
    >>> (found,) = share_keys([three], buffer, buffer) or []
    >>> found.start_q.tolist(), found.start_kv.tolist(), found.segments.k.lengths(2).tolist()
    ([2, 0], [0, 0], [4, 2])
    """
    found: list[SharedKeys] = []
    for launch in launches:
        rows, keys = launch.q.lengths(len(launch)), launch.k.lengths(len(launch))
        if int(keys.sum()) > MOST_ROWS:
            return None
        launch = launch.take(np.lexsort((-rows, -keys)))
        dense = bool(((launch.left < 0) & (launch.right < 0)).all())
        side_q = _consecutive(launch.q, q, len(launch), any_order=dense)
        side_kv = _consecutive(launch.k, kv, len(launch), any_order=dense)
        if side_q is None or side_kv is None:
            return None
        (start_q, size_q), (start_kv, size_kv) = side_q, side_kv
        first = kv.find(launch.k.spans).row.min()
        rows = kv.between(first, first + size_kv)
        if rows.total < size_kv:
            return None
        at = q.find(launch.q.spans)
        order = np.argsort(at.row, kind="stable")
        begin, row = at.start[order], at.row[order]
        queries = Placement(Spans(begin, begin + at.count[order]), row - row.min())
        found.append(SharedKeys(launch, start_q, start_kv, queries, size_q, rows))
    return found


def _consecutive(spans: SegmentRows, buffer: Placement, count: int, *, any_order: bool) -> tuple[Column, int] | None:
    """The first row of each segment, from the first of all on, and how many rows there are from this to the last one.
    None if a segment's rows do not lie together.
    """
    found = buffer.find(spans.spans)
    if not found.whole:
        return None
    segment, row, size = spans.segment[found.span], found.row, found.count
    if any_order:
        order = np.lexsort((row, segment))
        segment, row, size = segment[order], row[order], size[order]
    begin = np.searchsorted(segment, np.arange(count))
    joined = row[1:] == row[:-1] + size[:-1]
    joined[begin[1:] - 1] = True
    if not bool(joined.all()):
        return None
    first = row[begin]
    return first - first.min(), int((row + size).max() - first.min())


# ---- The launches of tiles


_FEW = 8  # Segments.
_BATCH, _DISJOINT, _SORT = map(bit_of, ("batch_segments", "split_disjoint", "sort_keys"))


def tile_launches(
    tiles: WindowedTiles, rule: WindowRule, skipped: Collection[str] = (), *, shared_keys: bool = False
) -> list[Segments]:
    """The launches of tiles that are computed together, in order: each has segments of one window, and each row of
    queries once. Each sequence keeps the order of its tiles.

    Args:
        skipped: the passes that do not run (`cp_fast.passes`).
        shared_keys: whether it costs nothing if segments of a launch have common keys.
    """
    if not len(tiles):
        return []
    if "merge_adjacent" not in skipped:
        tiles = merge_adjacent(tiles)
    if rule.disjoint or not areas_meet(tiles):
        segments = _TileSegments.of(tiles, rule, skipped)
        dense = segments.dense if "merge_causal" in skipped else merge_stripes(segments.dense)
        found = _batches(segments.with_dense(dense), rule, skipped, shared_keys=shared_keys)
        return [replace(some, made_by=some.made_by | _BATCH) if len(some) > 1 else some for some in found]
    best = _best(_TileSegments.of(tiles, rule, skipped), rule, skipped, shared_keys=shared_keys)
    if shared_keys and "merge_causal" not in skipped:
        cut = _TileSegments.of(merge_triangles(tiles), rule, skipped)
        best = min(best, _best(cut, rule, skipped, shared_keys=True), key=_cost)
    return [
        replace(some, layer=layers(some), made_by=some.made_by | (_DISJOINT if len(some) > 1 else 0))
        for some in map(_by_queries, best)
    ]


@dataclass(frozen=True)
class _TileSegments:
    """Tiles as segments: causal squares, those without hidden pairs, and the others."""

    square: Segments | None
    dense: Segments
    edges: Segments | None

    @staticmethod
    def of(tiles: WindowedTiles, rule: WindowRule, skipped: Collection[str]) -> _TileSegments:
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
        return _TileSegments(square, dense, edges)

    def with_dense(self, dense: Segments | None = None) -> Segments:
        """All segments; `dense`: others in place of those without hidden pairs."""
        dense = self.dense if dense is None else dense
        return Segments.concat([x for x in (self.square, dense, self.edges) if x is not None])


def _best(segments: _TileSegments, rule: WindowRule, skipped: Collection[str], *, shared_keys: bool) -> list[Segments]:
    """Segments of areas that share rows, as few launches."""
    dense = segments.dense
    factored = dense if "factor_keys" in skipped or len(dense) < 2 else factor_keys(dense)
    best = _few(segments.with_dense(factored), rule, skipped)
    assert best is not None
    if "dedupe_queries" in skipped or len(dense) < 2:
        return best
    most = math.inf if shared_keys else len(best) * _most_keys(segments.with_dense())
    deduped = dedupe_queries(dense, most)
    if deduped is None:
        return best
    other = _few(segments.with_dense(deduped), rule, skipped, len(best), shared_keys=shared_keys)
    return min(best, other or best, key=_cost)


def _few(
    segments: Segments,
    rule: WindowRule,
    skipped: Collection[str],
    most: float = math.inf,
    *,
    shared_keys: bool = False,
) -> list[Segments] | None:
    """The segments in launches; None if they need more than `most`."""
    found: list[Segments] = []
    for group in _by_window(segments, rule):
        if "split_disjoint" in skipped:
            more = _one_by_one(group)
        else:
            more = split_disjoint(group, most - len(found), shared_keys=shared_keys)
        if more is None:
            return None
        found += more
    return found


def _one_by_one(segments: Segments) -> list[Segments]:
    """Each segment alone."""
    return [segments.take(np.array([n])) for n in range(len(segments))]


def _batches(
    segments: Segments, rule: WindowRule, skipped: Collection[str], *, shared_keys: bool
) -> Iterator[Segments]:
    """The segments of areas without common rows in launches."""
    if "batch_segments" in skipped:
        yield from _one_by_one(segments)
        return
    for group in _by_window(segments, rule):
        if group.q.spans.disjoint and (shared_keys or group.k.spans.disjoint):
            yield group
        else:
            yield from _places(group, skipped)


def _most_keys(segments: Segments) -> int:
    """The most rows of keys of a launch of these queries and keys: each key once, plus half the number of queries."""
    return segments.k.spans.merged().total + segments.q.spans.merged().total // 2


def _cost(launches: Sequence[Segments]) -> tuple[int, int]:
    """The number of launches, and of their rows of queries: each row is read, and its result merged."""
    return len(launches), sum(launch.q.spans.total for launch in launches)


def sort_keys(launch: Segments, rows: Placement, keys: Spans) -> Segments:
    """A launch without hidden pairs, with each segment's keys in the order of their buffer. With few segments the keys
    may then be contiguous and need no gather. `keys` are those of its `k`.
    """
    if launch.left[0] >= 0 or launch.right[0] >= 0 or len(launch) > _FEW:
        return launch
    found = rows.find(keys)
    segment = launch.k.segment[found.span]
    order = np.lexsort((found.row, segment))
    start, count = found.start[order], found.count[order]
    made_by = launch.made_by if bool((order[1:] > order[:-1]).all()) else launch.made_by | _SORT
    return replace(launch, k=SegmentRows(segment[order], start, start + count), made_by=made_by)


def _by_queries(segments: Segments) -> Segments:
    """The segments in the order of their queries. If a launch has most rows of a buffer, they are then contiguous and
    need no gather.
    """
    first = segments.q.start[np.searchsorted(segments.q.segment, np.arange(len(segments)))]
    return segments.take(np.argsort(first, kind="stable"))


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


def _places(segments: Segments, skipped: Collection[str]) -> Iterator[Segments]:
    """The segments in launches without repeated rows of queries or keys, since results are added by rows. The first
    segments of all areas are one launch, the second ones the next: areas have no rows in common. Stairs of many
    segments are halved first.
    """
    if not bool((segments.area[1:] >= segments.area[:-1]).all()):
        segments = segments.take(np.argsort(segments.area, kind="stable"))
    if "factor_keys" in skipped:
        place = np.arange(len(segments)) - np.searchsorted(segments.area, segments.area)  # In their area.
    else:
        segments, place = halved_stairs(segments)
    for n in range(int(place.max()) + 1):
        yield segments.take(np.flatnonzero(place == n))
