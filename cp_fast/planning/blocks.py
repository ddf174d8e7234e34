"""Where the tokens of a unit lie in a buffer, and which of them another unit sees.

A buffer holds ranges of one unit's token axis, sequence after sequence: one range of each sequence, or two where two
chunks of queries look through a window. With `anchor = row - token`, a range's tokens are found by one addition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cp_fast.planning.batch import Batch
from cp_fast.planning.columns import Array, Owned, Range
from cp_fast.planning.tables import RowKey, Tables
from cp_fast.planning.views import View

__all__ = ["Block", "farther", "message_rows", "packed", "reach", "seen", "seen_within"]


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
    if batch.last_reach is None or batch.last_reach[0] != unit:
        batch.last_reach = (unit, _reach(batch, batch.owned("q", unit)))
    return batch.last_reach[1]


def _reach(batch: Batch, queries: Owned) -> Array:
    if batch.hi is None and batch.lo is not None:
        # the second piece is empty where the first one is
        return np.where(queries.count[0] > 0, queries.first[0] + batch.lo, batch.far)
    last = batch.loops.ends(queries, batch.far)
    return last + batch.hi if isinstance(batch.hi, np.ndarray) or batch.hi else last


def farther(batch: Batch, one: Array, other: Array) -> Array:
    """The reach of two sets of units together."""
    return np.minimum(one, other) if batch.hi is None and batch.lo is not None else np.maximum(one, other)


def packed(batch: Batch, ranges: tuple[Range, ...]) -> Block:
    """The buffer that holds these ranges and nothing else, sequence after sequence."""
    return Block(ranges, *batch.loops.packed(ranges), dense=True)


def seen(view: View) -> tuple[Range, ...]:
    """The keys that queries see: one range, or under a two-sided window one for each piece of queries, disjoint."""
    batch = view.batch
    queries, keys = batch.owned("q", view.reader), batch.owned("kv", view.owner)
    if not batch.windowed:
        return (seen_within(batch, reach(batch, view.reader), keys),)
    return batch.loops.seen(queries, view.sights, batch.band, keys)


def seen_within(batch: Batch, reached: Array, keys: Owned) -> Range:
    """The keys that any of the units of a reach sees, in bands that are open on one side at least."""
    if batch.hi is None and batch.lo is None:
        return Range(batch.nothing, np.where(reached >= 0, keys.total, 0))
    below = batch.loops.below(keys, reached)
    return Range(batch.nothing, below) if batch.hi is not None else Range(below, keys.total - below)


def message_rows(tables: Tables, block: Block, anchor: Array, ranges: tuple[Range, ...]) -> tuple[RowKey, int]:
    """The rows of a message in a buffer with one anchor, and their number."""
    number, size = tables.loops.tokens(ranges)
    if size == 0 or (block.dense and size == block.size):
        return slice(0, size), size
    return tables.spans(tables.loops.rows(ranges, anchor, number, size)), size
