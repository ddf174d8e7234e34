"""Is every visible (query, key) pair computed exactly once? Decided on a small grid, whatever the lengths.

The tiles' edges cut an area into cells; inside a cell every pair is covered by the same tiles. So it is enough to count
the tiles over each cell, and to ask the area's diagonal band whether the cell has a visible pair at all. Heads are a
third axis.

          k0   k1        k2
       q0 .----.---------.        a cell covered by no tile, with a visible pair in it: computed never
          | 1  |    0    |        a cell covered by two tiles, with a visible pair in it: computed twice
       q1 .----.---------.
          | 1  |    2    |
       q2 .----.---------.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from cp_ref.schedules.areas import Areas, crop, pairs
from cp_ref.schedules.ownership import Fragments, Ownership
from cp_ref.schedules.schedule import Schedule, Tiles, side_of
from cp_ref.schedules.table import Column, ranges

__all__ = [
    "Cells",
    "Grid",
    "Pair",
    "TileUses",
    "boxes_of",
    "coverage_errors",
    "edges_of",
    "grids",
]

# ---- the grid of rows and heads
#
# Rows and heads as few cells: a schedule treats all rows and heads of a cell alike.
#
# The edges of everything that a schedule names cut the rows of a buffer, and its heads, into cells. So for any lengths,
# the rows of a rank are a small array of [cells of rows, cells of heads], here as one flat axis.
#
#     rows    0     4     6        10        [0:6] [4:10] and heads 0:2 of 0:4 are named somewhere
#             |-----|-----|---------|        cells of rows 0:4, 4:6, 6:10, of heads 0:2, 2:4: six cells in all


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


class Pair(NamedTuple):
    """A query row and a key row, for query heads [head_start, head_stop)."""

    area: int
    q: int
    k: int
    head_start: int
    head_stop: int


class TileUses(NamedTuple):
    """The tiles of a whole pass, and where each is computed."""

    tiles: Tiles
    rank: Column
    step: Column

    def where(self, tile: int) -> str:
        """The place of one of them, in words."""
        return f"rank {self.rank[tile]} step {self.step[tile]}"


def coverage_errors(
    areas: Areas, heads_q: int, uses: TileUses, name: Callable[[Pair], str], holders: Callable[[Pair], str]
) -> Iterator[str]:
    """One sentence for every cell that is computed twice or never. `name(pair)` says which pair is meant, and
    `holders(pair)` who has it. The tiles lie inside their areas.
    """
    order = np.argsort(uses.tiles.area, kind="stable")
    ends = np.searchsorted(uses.tiles.area[order], np.arange(len(areas) + 1)).tolist()
    for area, rectangle in enumerate(areas.rows()):
        here = order[ends[area] : ends[area + 1]]
        tiles = uses.tiles.take(here)
        for pair, over in _wrong_cells(area, rectangle, heads_q, tiles):
            if not len(over):
                yield f"{name(pair)}: computed never ({holders(pair)})"
            else:
                times = "twice" if len(over) == 2 else f"{len(over)} times"
                yield f"{name(pair)}: computed {times} ({', '.join(uses.where(int(here[n])) for n in over)})"


def _wrong_cells(area: int, rectangle: tuple[int, ...], heads_q: int, tiles: Tiles) -> Iterator[tuple[Pair, Column]]:
    """A visible pair of every cell that is not covered once, and the numbers of the tiles over it."""
    q_start, q_stop, k_start, k_stop, lo, hi = rectangle
    starts, stops = (tiles.q_start, tiles.k_start, tiles.head_start), (tiles.q_stop, tiles.k_stop, tiles.head_stop)
    whole = [np.array(x) for x in ((q_start, q_stop), (k_start, k_stop), (0, heads_q))]
    axes = [edges_of(*edges) for edges in zip(whole, starts, stops, strict=True)]
    boxes = [(np.searchsorted(x, a), np.searchsorted(x, b)) for x, a, b in zip(axes, starts, stops, strict=True)]
    counts = _counts([len(x) - 1 for x in axes], boxes)
    if (counts == 1).all():
        return
    rows, columns = np.meshgrid(np.arange(len(axes[0]) - 1), np.arange(len(axes[1]) - 1), indexing="ij")
    band = np.broadcast_to(lo, rows.shape), np.broadcast_to(hi, rows.shape)
    corners = axes[0][rows], axes[0][rows + 1], axes[1][columns], axes[1][columns + 1]
    wrong = (counts != 1) & (pairs(*corners, *band) > 0)[:, :, None]
    for n, m, h in np.argwhere(wrong).tolist():
        cell = (axes[0][n : n + 1], axes[0][n + 1 : n + 2], axes[1][m : m + 1], axes[1][m + 1 : m + 2])
        q0, _, k0, _ = (int(x[0]) for x in crop(*cell, np.array([lo]), np.array([hi])))
        over = np.ones(len(tiles), dtype=bool)
        for (start, stop), at in zip(boxes, (n, m, h), strict=True):
            over &= (start <= at) & (at < stop)
        heads = int(axes[2][h]), int(axes[2][h + 1])
        yield Pair(area, q0, max(k0, q0 + lo), *heads), np.flatnonzero(over)


def _counts(shape: Sequence[int], boxes: Sequence[tuple[Column, Column]]) -> Column:
    """How many boxes lie over each cell of a grid: their corners are marked, and added up along each axis.

        boxes 0:2 and 1:3 of 3 cells     corners + + - -     added up 1 2 1

    >>> _counts([3], [(np.array([0, 1]), np.array([2, 3]))]).tolist()
    [1, 2, 1]
    """
    counts = np.zeros([n + 1 for n in shape], dtype=np.int64)
    for corner in product((0, 1), repeat=len(shape)):
        np.add.at(counts, tuple(edges[c] for edges, c in zip(boxes, corner, strict=True)), (-1) ** sum(corner))
    for axis in range(len(shape)):
        np.cumsum(counts, axis=axis, out=counts)
    return counts[tuple(slice(n) for n in shape)]
