"""Launches whose segments share keys. Each segment reads its rows where they lie, and no row is copied.

A launch usually packs the rows of its segments one after the other. So it has common keys several times. Some kernel
libraries take the first row and the length of each segment instead. In block-causal attention, for example, block n
sees all blocks up to block n. If keys lie in a buffer in their order, one launch has all blocks:

    rows of the buffer     0       1       2       3
    segment 3 first     [  keys of 3                ]  queries of 3
    segment 2           [  keys of 2        ]          queries of 2

The segments with most keys come first: their tiles take longest, and short ones fill the launch's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cp_fast.compile.row_maps import RowMap, Spans
from cp_fast.compile.row_numbers import MOST_ROWS
from cp_fast.compile.tiles.segments import LaunchSegments, SegmentSpans
from cp_ref.schedules.planners.ring_members import merged
from cp_ref.schedules.table import Column

__all__ = ["Placed", "placed"]


class Placed(NamedTuple):
    """Segments, and the first row of each among the rows of q and of k and v; these are consecutive in their buffers,
    and given as global rows.
    """

    segments: LaunchSegments
    start_q: Column
    start_kv: Column
    q: Spans
    kv: Spans


def placed(launches: Sequence[LaunchSegments], q: RowMap, kv: RowMap) -> list[Placed] | None:
    """The launches on buffers with these rows. None if a segment's rows do not lie together, if rows lie between
    segments, or if all segments together have more keys than int32 numbers.

    >>> three = LaunchSegments.of_rows([(0, 0, 2), (1, 2, 4)], [(0, 0, 2), (1, 0, 4)])
    >>> buffer = RowMap.at(Spans(np.array([0]), np.array([4])), np.array([10]))
    >>> (found,) = placed([three], buffer, buffer) or []
    >>> found.start_q.tolist(), found.start_kv.tolist(), found.segments.k.lengths(2).tolist()
    ([2, 0], [0, 0], [4, 2])
    """
    found: list[Placed] = []
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
        found.append(Placed(launch, side_q[0], side_kv[0], side_q[1], side_kv[1]))
    return found


def _consecutive(spans: SegmentSpans, buffer: RowMap, count: int, *, any_order: bool) -> tuple[Column, Spans] | None:
    """The first row of each segment, from the first of all on, and all rows. None if they do not lie together."""
    located = buffer.locate(Spans(spans.start, spans.stop))
    if not located.whole:
        return None
    segment, row, size = spans.segment[located.number], located.row, located.count
    if any_order:
        order = np.lexsort((row, segment))
        segment, row, size = segment[order], row[order], size[order]
    begin = np.searchsorted(segment, np.arange(count))
    joined = row[1:] == row[:-1] + size[:-1]
    joined[begin[1:] - 1] = True
    first, total = row[begin], np.bincount(segment, size, count).astype(np.int64)
    if not bool(joined.all()) or len(merged(first, first + total)[0]) > 1:
        return None
    start, stop = merged(located.start, located.start + located.count)
    rows = buffer.locate(Spans(start, stop))
    order = np.argsort(rows.row, kind="stable")
    return first - first.min(), Spans(rows.start[order], rows.start[order] + rows.count[order])
