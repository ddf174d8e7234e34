"""Where the tokens of a unit lie in a buffer, and which of them another unit sees.

A buffer holds ranges of one unit's token axis, sequence after sequence: one range of each sequence, or two where two
chunks of queries look through a window. With `anchor = row - token`, a range's tokens are found by one addition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cp_fast.planning.batch import Array, Batch, Owned

__all__ = ["Block", "Range", "Reach", "packed", "rows_in", "seen", "seen_within"]


class Range(NamedTuple):
    """Tokens [start, start + count) of a token axis, one range a sequence."""

    start: Array
    count: Array


class Block(NamedTuple):
    """A buffer: `anchors[n]` belongs to `ranges[n]`. Neighbouring ranges of a sequence that touch have one anchor."""

    ranges: tuple[Range, ...]
    anchors: tuple[Array, ...]
    size: int


class Reach(NamedTuple):
    """The first and the last query (exclusive) of some units, by sequence; beyond each other where there is none."""

    first: Array
    last: Array

    @staticmethod
    def of(owned: Owned, far: int) -> Reach:
        """Of one unit."""
        first, last = owned.first[0], owned.first[0] + owned.count[0]
        for start, count in zip(owned.first[1:], owned.count[1:], strict=True):
            last = np.where(count > 0, start + count, last)
        there = owned.total > 0  # the second piece is empty where the first one is
        return Reach(np.where(there, first, far), np.where(there, last, -far))

    def __or__(self, other: Reach) -> Reach:
        return Reach(np.minimum(self.first, other.first), np.maximum(self.last, other.last))


def packed(ranges: tuple[Range, ...]) -> Block:
    """The buffer that holds these ranges and nothing else, sequence after sequence.

    >>> one = packed((Range(np.array([4, 0]), np.array([2, 3])),))     # rows 0:2 and 2:5
    >>> one.size, one.anchors[0].tolist()
    (5, [-4, 2])
    """
    total = ranges[0].count
    for r in ranges[1:]:
        total = total + r.count
    ends = np.cumsum(total, dtype=total.dtype)
    row, anchors = ends - total, []
    for r in ranges:
        anchors.append(row - r.start)
        row = row + r.count
    return Block(ranges, tuple(anchors), int(ends[-1]) if len(ends) else 0)


def seen(batch: Batch, reader: int, owner: int) -> tuple[Range, ...]:
    """The keys of `owner` that `reader`'s queries see: one range, or under a two-sided window one for each piece of
    queries, disjoint.
    """
    queries, keys = batch.owned("q", reader), batch.owned("kv", owner)
    if not batch.windowed:
        return (seen_within(batch, Reach.of(queries, batch.far), keys),)
    ranges: list[Range] = []
    for first, count in zip(queries.first, queries.count, strict=True):
        there = count > 0
        start, stop = keys.below(first + batch.lo), keys.below(first + count + batch.hi)
        start, stop = np.where(there, start, 0), np.where(there, stop, 0)
        if ranges:
            start = np.maximum(start, ranges[0].start + ranges[0].count)
        ranges.append(Range(start, np.maximum(stop - start, 0)))
    return tuple(ranges)


def seen_within(batch: Batch, reach: Reach, keys: Owned) -> Range:
    """The keys that any of the units of a reach sees, in bands that are open on one side at least."""
    stop = np.where(reach.last > 0, keys.total, 0) if batch.hi is None else keys.below(reach.last + batch.hi)
    if batch.lo is None:
        return Range(np.zeros_like(stop), stop)
    start = np.minimum(keys.below(reach.first + batch.lo), stop)
    return Range(start, stop - start)


def rows_in(anchor: Array, ranges: tuple[Range, ...]) -> tuple[Array, Array]:
    """(first row, number of rows) of ranges in a buffer with one anchor, sequence after sequence."""
    if len(ranges) == 1:
        return ranges[0].start + anchor, ranges[0].count
    starts = np.stack([r.start + anchor for r in ranges], axis=1).ravel()
    return starts, np.stack([r.count for r in ranges], axis=1).ravel()
