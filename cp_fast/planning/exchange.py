"""Which rows the a2a schedules exchange for heads, and where the group's rows lie.

The group's buffers hold what takes part: the queries that see a key, and the keys that a query sees, sequence after
sequence in the order of their positions. Padding is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cp_fast.planning.batch import Array, Batch, by_sequence
from cp_fast.planning.blocks import Block, Range, packed
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
    begin = owned.below(start)
    return packed((Range(begin, np.maximum(owned.below(stop) - begin, 0)),))


def draft_side(batch: Batch, rank: int, side: str, block: Block, tables: Tables) -> DraftSide:
    """The rows of every rank of the group, in its buffers; and the own ones at home."""
    first = rank - rank % batch.unit_size
    start, stop = _taking_part(batch, side)
    owned = batch.owned(side, first // batch.unit_size)
    spans = [batch.spans(side, batch.problem.cp_size, first + n) for n in range(batch.unit_size)]
    shape = (len(spans), batch.size, len(spans[0]))  # rank by rank, sequence by sequence, piece by piece
    rows, counts = (np.empty(shape, dtype=batch.dtype) for _ in range(2))  # written once: fresh memory is what costs
    for n, pieces in enumerate(spans):
        for piece, (begin, end) in enumerate(pieces):
            taken = np.maximum(begin, start)
            np.add(owned.below(taken), block.anchors[0], out=rows[n, :, piece])
            np.subtract(np.minimum(end, stop), taken, out=counts[n, :, piece])
    np.maximum(counts, 0, out=counts)
    sizes = tuple(counts.sum(axis=(1, 2)).tolist())
    own = rank - first
    home = tables.rows(by_sequence(_home_rows(batch, side, rank, start)), counts[own].ravel())
    group = tables.rows(rows.ravel(), counts.ravel())
    return DraftSide(home, home, sizes[own], group, group, sizes)


def _taking_part(batch: Batch, side: str) -> tuple[Array, Array]:
    """The positions [start, stop) of every sequence that see a key, or that are seen by a query."""
    mine, other = (batch.len_q, batch.len_kv) if side == "q" else (batch.len_kv, batch.len_q)
    # query i sees keys i + lo ... i + hi, so key j is seen by queries j - hi ... j - lo
    low, high = (batch.lo, batch.hi) if side == "kv" else (_minus(batch.hi), _minus(batch.lo))
    start = np.zeros_like(mine) if low is None else np.maximum(low, 0) + np.zeros_like(mine)
    stop = mine if high is None else np.minimum(mine, other + high)
    return start, np.where(other > 0, stop, 0)


def _minus(edge: int | Array | None) -> int | Array | None:
    return None if edge is None else -edge


def _home_rows(batch: Batch, side: str, rank: int, start: Array) -> list[Array]:
    """The own row of the first position that takes part, piece by piece."""
    row, found = batch.home_rows(side, rank), []
    for begin, end in batch.spans(side, batch.problem.cp_size, rank):
        found.append(row + np.maximum(begin, start) - begin)
        row = row + (end - begin)
    return found
