"""Rows and heads as few cells, for `verify`: a schedule treats all rows and heads of a cell alike.

The edges of everything that a schedule names cut the rows of a buffer, and its heads, into cells. So for any lengths,
the rows of a rank are a small array of [cells of rows, cells of heads], here as one flat axis.

    rows    0     4     6        10        [0:6] [4:10] and heads 0:2 of 0:4 are named somewhere
            |-----|-----|---------|        cells of rows 0:4, 4:6, 6:10, of heads 0:2, 2:4: six cells in all
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cp_ref.spec.tables.messages import side_of
from cp_ref.spec.tables.ownership import Fragments, Ownership
from cp_ref.spec.tables.schedule import Schedule, Tiles
from cp_ref.spec.tables.table import Column, ranges

__all__ = ["Cells", "Grid", "boxes_of", "edges_of", "grids"]


def edges_of(*columns: Column) -> Column:
    """All edges, each once, ascending: cell n lies between number n and n + 1.

    >>> edges_of(np.array([0, 4]), np.array([4, 2])).tolist()
    [0, 2, 4]
    """
    return np.unique(np.concatenate(columns))


class Cells(NamedTuple):
    """The cells of some boxes, box after box."""

    cell: Column
    box: Column


class Grid(NamedTuple):
    """The cells of one side."""

    rows: Column  # edges
    heads: Column  # edges

    @property
    def size(self) -> int:
        """How many cells there are."""
        return max((len(self.rows) - 1) * (len(self.heads) - 1), 0)

    def cells(self, start: Column, stop: Column, head_start: Column, head_stop: Column) -> Cells:
        """The cells of boxes: rows [start, stop) of heads [head_start, head_stop), whose edges are the grid's.

        >>> grid = Grid(np.array([0, 4, 6, 10]), np.array([0, 2, 4]))
        >>> cells = grid.cells(*(np.array(x) for x in ([0, 6], [6, 10], [0, 2], [2, 4])))
        >>> cells.cell.tolist(), cells.box.tolist()
        ([0, 2, 5], [0, 0, 1])
        """
        row, row_stop = np.searchsorted(self.rows, start), np.searchsorted(self.rows, stop)
        head, head_stop_cell = np.searchsorted(self.heads, head_start), np.searchsorted(self.heads, head_stop)
        box = np.repeat(np.arange(len(start)), row_stop - row)
        count = (head_stop_cell - head)[box]
        first = ranges(row, row_stop - row) * (len(self.heads) - 1) + head[box]
        return Cells(ranges(first, count), np.repeat(box, count))

    def owned(self, rows: Fragments) -> Column:
        """Whether each cell lies in these rows, in any of the heads: bool [cells]."""
        there = np.zeros(self.size, dtype=np.bool_)
        heads = (np.full_like(rows.start, edge) for edge in (self.heads[0], self.heads[-1]))
        there[self.cells(rows.start, rows.stop, *heads).cell] = True
        return there

    def rows_of(self, cell: int) -> tuple[int, int]:
        """The rows of a cell."""
        n = cell // (len(self.heads) - 1)
        return int(self.rows[n]), int(self.rows[n + 1])


def grids(ownership: Ownership, schedule: Schedule) -> dict[str, Grid]:
    """The cells of both sides, from everything that is owned, sent and computed."""
    rows = {side: [np.zeros(1, int), f.start, f.stop] for side in ("q", "kv") for f in (ownership.side(side),)}
    heads = {"q": [np.array([0, schedule.heads[0]])], "kv": [np.array([0, schedule.heads[1]])]}
    for *_, step in schedule.steps():
        rows["q"] += [step.scans.start, step.scans.stop]
        for message in (*step.sends, *step.recvs):
            side, pieces = side_of(message.kind), message.pieces
            rows[side] += [pieces.start, pieces.stop]
            heads[side] += [pieces.head_start, pieces.head_stop]
        for side in ("q", "kv"):
            start, stop, *of_heads = boxes_of(side, step.tiles, schedule)
            rows[side] += [start, stop]
            heads[side] += of_heads
    return {side: Grid(edges_of(*rows[side]), edges_of(*heads[side])) for side in ("q", "kv")}


def boxes_of(side: str, tiles: Tiles, schedule: Schedule) -> tuple[Column, Column, Column, Column]:
    """The rows of one side that tiles read, and their heads: a tile of some of the query heads that share a kv head
    reads this whole kv head.
    """
    if side == "q":
        return tiles.q_start, tiles.q_stop, tiles.head_start, tiles.head_stop
    size = schedule.heads[0] // schedule.heads[1]
    return tiles.k_start, tiles.k_stop, tiles.head_start // size, -(-tiles.head_stop // size)
