"""Which rows the a2a schedules exchange for heads, and where the group's rows lie.

The group's buffers hold what takes part: the queries that see a key, and the keys that a query sees, sequence after
sequence in the order of their positions. Padding is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cp_fast.planning.batch import Array, Batch
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
    rows: list[Array] = []
    counts: list[Array] = []
    sizes: list[int] = []
    home: RowKey = slice(0, 0)
    for peer in range(first, first + batch.unit_size):
        pieces = [
            (np.maximum(begin, start), np.minimum(end, stop), begin)
            for begin, end in batch.spans(side, batch.problem.cp_size, peer)
        ]
        count = _flat([np.maximum(end - begin, 0) for begin, end, _ in pieces])
        rows.append(_flat([owned.below(begin) + block.anchors[0] for begin, _, _ in pieces]))
        counts.append(count)
        sizes.append(int(count.sum()))
        if peer == rank:
            home = tables.rows(_flat(_home_rows(batch, side, rank, pieces)), count)
    group = tables.rows(np.concatenate(rows), np.concatenate(counts))
    return DraftSide(home, home, sizes[rank - first], group, group, tuple(sizes))


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


def _home_rows(batch: Batch, side: str, rank: int, pieces: list[tuple[Array, Array, Array]]) -> list[Array]:
    row, found = batch.home_rows(side, rank), []
    spans = batch.spans(side, batch.problem.cp_size, rank)
    for (begin, _, piece_begin), (slots_begin, slots_end) in zip(pieces, spans, strict=True):
        found.append(row + begin - piece_begin)
        row = row + (slots_end - slots_begin)
    return found


def _flat(columns: list[Array]) -> Array:
    """Piece after piece of sequence after sequence."""
    return columns[0] if len(columns) == 1 else np.stack(columns, axis=1).ravel()
