"""Where the tokens of a unit lie in a buffer, and which of them another unit sees.

A buffer holds ranges of one unit's token axis, sequence after sequence: one range of each sequence, or two where two
chunks of queries look through a window. With `anchor = row - token`, a range's tokens are found by one addition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cp_fast.planning.batch import Array, Batch, Owned, by_sequence
from cp_fast.planning.tables import RowKey, Tables

__all__ = ["Block", "Range", "farther", "message_rows", "packed", "reach", "rows_in", "seen", "seen_within"]


class Range(NamedTuple):
    """Tokens [start, start + count) of a token axis, one range a sequence."""

    start: Array
    count: Array


class Block(NamedTuple):
    """A buffer: `anchors[n]` belongs to `ranges[n]`. Neighbouring ranges of a sequence that touch have one anchor.
    `dense`: it holds the ranges and nothing else.
    """

    ranges: tuple[Range, ...]
    anchors: tuple[Array, ...]
    size: int
    dense: bool = False


def reach(batch: Batch, unit: int) -> Array:
    """How far a unit sees: the position behind the last key, or where only the left side is bounded, that of the first
    one; beyond all keys where it has no query. `farther` combines units.
    """
    spans = batch.spans("q", batch.count, unit % batch.count)
    if batch.hi is None and batch.lo is not None:
        first = spans[0][0]  # the second piece is empty where the first one is
        return np.where(first < np.minimum(spans[0][1], batch.len_q), first + batch.lo, batch.far)
    last: Array | int = -batch.far
    for start, stop in spans:
        stop = np.minimum(stop, batch.len_q)
        last = np.where(start < stop, stop, last)
    assert isinstance(last, np.ndarray)
    return last + batch.hi if isinstance(batch.hi, np.ndarray) or batch.hi else last


def farther(batch: Batch, one: Array, other: Array) -> Array:
    """The reach of two sets of units together."""
    return np.minimum(one, other) if batch.hi is None and batch.lo is not None else np.maximum(one, other)


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
    return Block(ranges, tuple(anchors), int(ends[-1]) if len(ends) else 0, dense=True)


def seen(batch: Batch, reader: int, owner: int) -> tuple[Range, ...]:
    """The keys of `owner` that `reader`'s queries see: one range, or under a two-sided window one for each piece of
    queries, disjoint.
    """
    queries, keys = batch.owned("q", reader), batch.owned("kv", owner)
    if not batch.windowed:
        return (seen_within(batch, reach(batch, reader), keys),)
    ranges: list[Range] = []
    for piece, (first, count) in enumerate(zip(queries.first, queries.count, strict=True)):
        found = _whole_pieces(batch, reader, piece, owner)
        if found is None:
            start, stop = keys.below(first + batch.lo), keys.below(first + count + batch.hi)
            there = count > 0
            start, stop = np.where(there, start, 0), np.where(there, stop, 0)
            found = Range(start, stop - start)
        if ranges and found.count is not batch.nothing and ranges[0].count is not batch.nothing:
            start = np.maximum(found.start, ranges[0].start + ranges[0].count)
            found = Range(start, np.maximum(found.start + found.count - start, 0))
        ranges.append(found)
    return tuple(ranges)


def _whole_pieces(batch: Batch, reader: int, piece: int, owner: int) -> Range | None:
    """What a piece of queries sees where no piece of keys is cut in any sequence; None where one may be."""
    readers, owners = batch.chunks(reader), batch.chunks(owner)
    if readers is None or owners is None:
        return None
    relations = [batch.relation(readers[piece], chunks) for chunks in owners]
    if "crossed" in relations:
        return None
    queries, keys = batch.owned("q", reader), batch.owned("kv", owner)
    plain = [other for other, how in enumerate(relations) if how == "plain"]
    if not plain:
        return Range(batch.nothing, batch.nothing)
    count = keys.total if len(plain) == len(keys.first) else keys.count[plain[0]]
    start = keys.offset[plain[0]] + batch.nothing
    there = queries.count[piece] > 0
    return Range(np.where(there, start, 0), np.where(there, count, 0))


def seen_within(batch: Batch, reached: Array, keys: Owned) -> Range:
    """The keys that any of the units of a reach sees, in bands that are open on one side at least."""
    if batch.hi is not None:
        return Range(batch.nothing, keys.below(reached))
    if batch.lo is None:
        return Range(batch.nothing, np.where(reached >= 0, keys.total, 0))
    start = keys.below(reached)
    return Range(start, keys.total - start)


def message_rows(tables: Tables, block: Block, anchor: Array, ranges: tuple[Range, ...]) -> tuple[RowKey, int]:
    """The rows of a message in a buffer with one anchor, and their number."""
    sizes = [int(r.count.sum(dtype=r.count.dtype)) for r in ranges]
    size = sum(sizes)
    if size == 0 or (block.dense and size == block.size):
        return slice(0, size), size
    there = tuple(r for r, n in zip(ranges, sizes, strict=True) if n)
    return tables.rows(*rows_in(anchor, there)), size


def rows_in(anchor: Array, ranges: tuple[Range, ...]) -> tuple[Array, Array]:
    """(first row, number of rows) of ranges in a buffer with one anchor, sequence after sequence."""
    return by_sequence([r.start + anchor for r in ranges]), by_sequence([r.count for r in ranges])
