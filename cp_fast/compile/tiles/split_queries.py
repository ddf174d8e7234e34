"""Cut segments of few keys and many queries along the queries, so that a backward pass fills the GPU.

Kernels divide a backward pass by blocks of keys, and each block visits all queries that see it in sequence. If 16,384
queries see 64 keys (first tokens before a window), there is one block for each head, although a GPU could work on four.
So the queries are cut, and every part has all the keys. The gradients of the keys are added, as for several launches. A
forward pass is divided by queries, so the cut does not matter.

      keys                    keys  again
    q a            becomes    q a   .
    q a                       q a   .
    q a                       q .   b
    q a                       q .   b
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cp_fast.compile.pass_table import bit_of
from cp_fast.compile.tiles.segments import LaunchSegments, SegmentSpans
from cp_ref.schedules.table import Column, constant

__all__ = ["split_queries"]

_SPLIT = bit_of("split_queries")
_BLOCK = 128  # Keys of a kernel's block. Queries are cut at its multiples too.
_BLOCKS = 4  # Enough blocks of keys a head: 32 heads then have 128, and an H200 has 132 multiprocessors.
_ROWS = 1024  # The least queries of a part: more than a block of them.


def split_queries(launch: LaunchSegments) -> LaunchSegments:
    """Cut each segment of a launch without a mask and with few keys into equally many parts. Other launches do not
    change.

    >>> q, k = [(0, 0, 2000), (0, 3000, 5300)], [(0, 0, 64)]
    >>> found = split_queries(LaunchSegments.of_rows(q, k))
    >>> list(found.q.rows()), list(found.k.rows())[-1]
    ([(0, 0, 1024), (1, 1024, 2000), (1, 3000, 3048), (2, 3048, 4200), (3, 4200, 5300)], (3, 0, 64))
    """
    rows, keys = (spans.lengths(len(launch)) for spans in (launch.q, launch.k))
    parts = _BLOCKS // int((-(-keys // _BLOCK)).sum())
    parts = min(parts, int(rows.min()) // _ROWS)
    if parts < 2 or bool(((launch.left >= 0) | (launch.right >= 0)).any()):
        return launch
    first = np.cumsum(rows) - rows  # Of each segment, among all consecutive rows of queries.
    edges = rows[:, None] * np.arange(parts) // parts // _BLOCK * _BLOCK + first[:, None]
    each = launch.take(np.repeat(np.arange(len(launch)), parts))
    return replace(each, made_by=constant(_SPLIT, each.area), q=_cut(launch.q, edges.ravel()))


def _cut(spans: SegmentSpans, edges: Column) -> SegmentSpans:
    """Spans whose consecutive rows are cut into a segment from each of these edges to the next.

    >>> list(_cut(SegmentSpans.of_rows([(0, 10, 14), (0, 20, 22)]), np.array([0, 3])).rows())
    [(0, 10, 13), (1, 13, 14), (1, 20, 22)]
    """
    size = spans.stop - spans.start
    begin = np.cumsum(size) - size
    cuts = np.unique(np.concatenate([begin, edges]))
    span = np.searchsorted(begin, cuts, side="right") - 1
    start = spans.start[span] + cuts - begin[span]
    stop = start + np.diff(np.append(cuts, size.sum()))
    return SegmentSpans(np.searchsorted(edges, cuts, side="right") - 1, start, stop)
