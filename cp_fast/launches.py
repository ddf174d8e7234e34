"""From a step's tiles to few kernel launches.

A tile is a cropped rectangle of one sequence's score matrix. Kernels take batches of rectangles that share a window
(`cp_fast.backends.Segments`), so three things happen here, on integers:

1. `join`: the tiles of one sequence become one, where that is the same set of pairs. Under dual_chunk a rank has two
   chunks, and in the buffers their rows lie one after the other:

        queries \\ keys   r      R                    rows in the buffers
              r        tri    .                     tri      .           one causal square of twice the size:
              R        full   tri                   full     tri         no merge of partial results for the rows of R

2. `window`: a tile's band as the bottom-right aligned window of a varlen kernel; None on a side where nothing is cut.
   Tiles are cropped, so both sides come out non-negative.
3. `batch`: tiles with equal windows share a launch, if no two of them have a query row or a key row in common (a
   launch writes each row of out, dq, dk and dv once).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from cp_fast.backends import Segments
from cp_fast.rows import Frame, Rows, Span, rows_of
from cp_ref.spec import Band, Piece, Problem, Rect, Tile

__all__ = ["Launch", "LocalTile", "batch", "join", "local_tiles"]


@dataclass(frozen=True, slots=True)
class LocalTile:
    """A tile in buffer rows: rows q0:q1 of q against rows k0:k1 of the block in hand. `band` counts in buffer rows
    too.
    """

    seq: int
    rect: Rect
    band: Band

    @property
    def window(self) -> tuple[int | None, int | None]:
        """(left, right), aligned bottom-right; None where the band cuts nothing off."""
        r = self.rect
        left = right = None
        if self.band.lo is not None and r.k0 - (r.q1 - 1) < self.band.lo:
            left = (r.k1 - r.q1) - self.band.lo
        if self.band.hi is not None and (r.k1 - 1) - r.q0 > self.band.hi:
            right = self.band.hi - (r.k1 - r.q1)
        return left, right


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: which rows it reads and writes, and how they are segmented."""

    q_rows: Rows  # of the rank's q, out, dq
    kv_rows: Rows  # of the block's k, v
    grad_rows: Rows  # of the block's dk, dv buffer
    segments: Segments


def local_tiles(problem: Problem, tiles: Iterable[Tile], q_frame: Frame, kv_frame: Frame) -> list[LocalTile]:
    """A step's tiles in buffer rows, joined where possible."""
    by_sequence: dict[int, list[LocalTile]] = defaultdict(list)
    for tile in tiles:
        r, band = tile.rect, problem.band(problem.sequences[tile.seq])
        (q,), (k,) = q_frame.spans(Piece(tile.seq, r.q0, r.q1)), kv_frame.spans(Piece(tile.seq, r.k0, r.k1))
        shift = (k.start - r.k0) - (q.start - r.q0)
        moved = Band(None if band.lo is None else band.lo + shift, None if band.hi is None else band.hi + shift)
        by_sequence[tile.seq].append(LocalTile(tile.seq, Rect(q.start, q.stop, k.start, k.stop), moved))
    return [joined for group in by_sequence.values() for joined in join(group)]


def join(tiles: Sequence[LocalTile]) -> Sequence[LocalTile]:
    """One tile with exactly the pairs of all of them, or the tiles as they are where there is none.

    The candidate is the bounding rectangle, with edges that the tiles' bands have. It is right if every tile keeps its
    pairs and no pair is added, which counting decides.

    >>> diagonal = Band(None, 0)
    >>> square = [LocalTile(0, Rect(0, 2, 0, 2), diagonal), LocalTile(0, Rect(2, 4, 0, 2), Band(None, 4)),
    ...           LocalTile(0, Rect(2, 4, 2, 4), diagonal)]
    >>> join(square)
    [LocalTile(seq=0, rect=Rect(q0=0, q1=4, k0=0, k1=4), band=Band(lo=None, hi=0))]
    """
    if len(tiles) < 2:
        return tiles
    rects = [t.rect for t in tiles]
    whole = Rect(min(r.q0 for r in rects), max(r.q1 for r in rects), min(r.k0 for r in rects), max(r.k1 for r in rects))
    kept = [t.band.count(t.rect) for t in tiles]
    for lo in _edges({t.band.lo for t in tiles if t.window[0] is not None}, {t.band.lo for t in tiles}):
        for hi in _edges({t.band.hi for t in tiles if t.window[1] is not None}, {t.band.hi for t in tiles}):
            band = Band(lo, hi)
            if band.count(whole) == sum(kept) and kept == [band.count(r) for r in rects]:
                return [replace(tiles[0], rect=whole, band=band)]
    return tiles


def _edges(cutting: set[int | None], all_edges: set[int | None]) -> list[int | None]:
    """What one edge of a joined band can be: the one that cuts tiles; nothing if two do; anything if no tile is cut."""
    if cutting:
        return list(cutting) if len(cutting) == 1 else []
    return [None, *sorted(edge for edge in all_edges if edge is not None)]


def batch(tiles: Iterable[LocalTile], device: torch.device, block: Frame, grads: Frame) -> list[Launch]:
    """Few launches for the tiles, whose key rows count in `block`; their gradients go to the rows of `grads`."""
    bins: list[_Bin] = []
    for tile in tiles:
        for found in bins:
            if found.window == tile.window and found.free(tile):
                break
        else:
            found = _Bin(tile.window)
            bins.append(found)
        found.add(tile)
    return [_launch(b.window, b.tiles, device, block, grads) for b in bins]


class _Bin:
    """Tiles of one launch: one window, no row twice. Tiles of different sequences have no row in common anyway."""

    def __init__(self, window: tuple[int | None, int | None]) -> None:
        self.window = window
        self.tiles: list[LocalTile] = []
        self._by_sequence: dict[int, list[Rect]] = defaultdict(list)

    def free(self, tile: LocalTile) -> bool:
        """Whether no row of the tile is taken."""
        return not any(_share_rows(tile.rect, rect) for rect in self._by_sequence[tile.seq])

    def add(self, tile: LocalTile) -> None:
        self.tiles.append(tile)
        self._by_sequence[tile.seq].append(tile.rect)


def _share_rows(a: Rect, b: Rect) -> bool:
    return (a.q0 < b.q1 and b.q0 < a.q1) or (a.k0 < b.k1 and b.k0 < a.k1)


def _launch(
    window: tuple[int | None, int | None], tiles: list[LocalTile], device: torch.device, block: Frame, grads: Frame
) -> Launch:
    q = [Span(t.rect.q0, t.rect.q1) for t in tiles]
    kv = [Span(t.rect.k0, t.rect.k1) for t in tiles]
    kv_rows = rows_of(kv, device)
    grad_rows = kv_rows
    if grads is not block:
        pieces = (piece for span in kv for piece in block.pieces(span))
        grad_rows = rows_of((span for piece in pieces for span in grads.spans(piece)), device)
    return Launch(
        q_rows=rows_of(q, device),
        kv_rows=kv_rows,
        grad_rows=grad_rows,
        segments=Segments.pack([s.stop - s.start for s in q], [s.stop - s.start for s in kv], *window, device),
    )
