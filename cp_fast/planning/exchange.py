"""Which rows the a2a schedules exchange for heads, and where the group's rows lie.

The group's buffers hold what takes part: the queries that see a key, and the keys that a query sees, sequence after
sequence in the order of their positions. Padding is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cp_fast.planning.batch import Batch
from cp_fast.planning.blocks import Block, packed
from cp_fast.planning.columns import Array, Range, by_sequence
from cp_fast.planning.tables import RowKey, Tables

__all__ = ["DraftSide", "draft_side", "group_block"]


class DraftSide(NamedTuple):
    """See `cp_fast.heads.Side`."""

    home_rows: RowKey
    into_home: RowKey
    home_count: int
    group_rows: RowKey
    into_group: RowKey
    group_counts: tuple[int, ...]


def group_block(batch: Batch, unit: int, side: str) -> Block:
    """The buffer of a unit's queries ("q") or keys ("kv") that take part."""
    owned = batch.owned(side, unit)
    start, stop = _taking_part(batch, side)
    begin, end = (batch.loops.below(owned, x) for x in (start, stop))
    return packed(batch, (Range(begin, np.maximum(end - begin, 0)),))


def draft_side(batch: Batch, rank: int, side: str, block: Block, tables: Tables) -> DraftSide:
    """The rows of every rank of the group, in its buffers; and the own ones at home."""
    first = rank - rank % batch.unit_size
    positions = _taking_part(batch, side)
    owned = batch.owned(side, first // batch.unit_size)
    size = batch.problem.cp_size
    shares = [batch.share(side, size, first + n) for n in range(batch.unit_size)]
    spans, sizes = batch.loops.exchanged(owned, shares, positions, block.anchors[0])
    own = rank - first
    home = tables.rows(*map(by_sequence, _home_spans(batch, side, rank, positions)))
    group = tables.spans(spans)
    return DraftSide(home, home, sizes[own], group, group, tuple(sizes))


def _taking_part(batch: Batch, side: str) -> tuple[Array, Array]:
    """The positions [start, stop) of every sequence that see a key, or that are seen by a query."""
    mine, other = (batch.len_q, batch.len_kv) if side == "q" else (batch.len_kv, batch.len_q)
    # query i sees keys i + lo ... i + hi, so key j is seen by queries j - hi ... j - lo
    low, high = (batch.lo, batch.hi) if side == "kv" else (_minus(batch.hi), _minus(batch.lo))
    start = np.zeros_like(mine) if low is None else np.maximum(np.zeros_like(mine) + low, 0)
    stop = mine if high is None else np.minimum(mine, other + high)
    return start, np.where(other > 0, stop, 0)


def _minus(edge: int | Array | None) -> int | Array | None:
    return None if edge is None else -edge


def _home_spans(batch: Batch, side: str, rank: int, positions: tuple[Array, Array]) -> tuple[list[Array], list[Array]]:
    """The own rows of positions that take part, piece by piece: the first one, and their number."""
    row = batch.home_rows(side, rank)
    rows: list[Array] = []
    counts: list[Array] = []
    for begin, end in batch.spans(side, batch.problem.cp_size, rank):
        taken = np.maximum(begin, positions[0])
        rows.append(row + taken - begin)
        counts.append(np.maximum(np.minimum(end, positions[1]) - taken, 0))
        row = row + (end - begin)
    return rows, counts
