"""Is every visible (query, key) pair computed exactly once? Decided on a small grid, whatever the lengths.

The tiles' edges cut an attention slice into cells; inside a cell every pair is covered by the same tiles. So it is
enough to count the tiles over each cell, and to ask the area's diagonal band whether the cell has a visible pair at
all. Heads are a third axis.

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

from cp_ref.spec.tables.attention_slices import AttentionSlices, crop, pairs
from cp_ref.spec.tables.schedule import Tiles
from cp_ref.spec.tables.table import Column
from cp_ref.spec.verify.grid import edges_of

__all__ = ["Pair", "TileUses", "coverage_errors"]


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
    areas: AttentionSlices, heads_q: int, uses: TileUses, name: Callable[[Pair], str], holders: Callable[[Pair], str]
) -> Iterator[str]:
    """One sentence for every cell that is computed twice or never. `name(pair)` says which pair is meant, and
    `holders(pair)` who has it. The tiles lie inside their attention slices.
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
