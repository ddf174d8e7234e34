"""Is every visible (query, key) pair computed exactly once? Decided on a small grid, whatever the lengths.

The tiles' edges cut a sequence's score matrix into cells; inside a cell every pair is covered by the same tiles. So it
is enough to count the tiles over each cell, and to ask the band whether the cell has a visible pair at all.

          k0   k1        k2
       q0 .----.---------.        a cell covered by no tile, with a visible pair in it: computed never
          | 1  |    0    |        a cell covered by two tiles, with a visible pair in it: computed twice
       q1 .----.---------.
          | 1  |    2    |
       q2 .----.---------.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cp_ref.spec.mask import Band, Rect
from cp_ref.spec.problem import Problem
from cp_ref.spec.schedule import Tile

__all__ = ["TileUse", "coverage_errors"]


@dataclass(frozen=True, slots=True)
class TileUse:
    """A tile, and where it is computed."""

    tile: Tile
    rank: int
    step: int


def coverage_errors(
    problem: Problem,
    direction: str,
    uses: Sequence[TileUse],
    head_cuts: Sequence[int],
    holders: Callable[[int, int, int], str],
) -> list[str]:
    """One sentence for every cell that is computed twice or never. `holders(seq, q, k)` says who has a pair."""
    errors: list[str] = []
    by_sequence: dict[int, list[TileUse]] = defaultdict(list)
    for use in uses:
        by_sequence[use.tile.seq].append(use)
        outside = use.tile.rect & _whole(problem, use.tile.seq)
        if outside != use.tile.rect:
            where = f"{direction} rank {use.rank} step {use.step}"
            errors.append(f"{where}: {use.tile} reaches outside the real tokens of sequence {use.tile.seq}")
    for seq in range(len(problem.sequences)):
        for first, last in pairwise(head_cuts):
            here = [
                u
                for u in by_sequence[seq]
                if u.tile.heads is None or (u.tile.heads[0] < last and first < u.tile.heads[1])
            ]
            errors += _sequence_errors(problem, direction, seq, here, (first, last), holders)
    return errors


def _whole(problem: Problem, seq: int) -> Rect:
    return Rect(0, problem.sequences[seq].len_q, 0, problem.sequences[seq].len_kv)


def _sequence_errors(
    problem: Problem,
    direction: str,
    seq: int,
    uses: list[TileUse],
    heads: tuple[int, int],
    holders: Callable[[int, int, int], str],
) -> list[str]:
    whole, band = _whole(problem, seq), problem.band(problem.sequences[seq])
    if whole.area == 0:
        return []
    rects = [use.tile.rect & whole for use in uses]
    rows = sorted({whole.q0, whole.q1} | {q for r in rects for q in (r.q0, r.q1) if whole.q0 < q < whole.q1})
    columns = sorted({whole.k0, whole.k1} | {k for r in rects for k in (r.k0, r.k1) if whole.k0 < k < whole.k1})
    row_at = {q: n for n, q in enumerate(rows)}
    column_at = {k: n for n, k in enumerate(columns)}
    counts = [[0] * (len(columns) - 1) for _ in range(len(rows) - 1)]
    for rect in rects:
        if rect.area:
            for n in range(row_at[rect.q0], row_at[rect.q1]):
                for m in range(column_at[rect.k0], column_at[rect.k1]):
                    counts[n][m] += 1
    errors: list[str] = []
    of_heads = f" of heads {heads[0]}:{heads[1]}" if heads != (0, problem.heads_q) else ""
    for n, (q0, q1) in enumerate(pairwise(rows)):
        for m, (k0, k1) in enumerate(pairwise(columns)):
            cell = Rect(q0, q1, k0, k1)
            if counts[n][m] == 1 or (seen := band.crop(cell)) is None:
                continue
            pair = _first_pair(band, seen)
            name = f"{direction}: sequence {seq}, query {pair[0]}, key {pair[1]}{of_heads}"
            if counts[n][m] == 0:
                errors.append(f"{name}: computed never ({holders(seq, *pair)})")
            else:
                places = [
                    f"rank {u.rank} step {u.step}" for u, r in zip(uses, rects, strict=True) if (r & cell) == cell
                ]
                times = "twice" if len(places) == 2 else f"{len(places)} times"
                errors.append(f"{name}: computed {times} ({', '.join(places)})")
    return errors


def _first_pair(band: Band, rect: Rect) -> tuple[int, int]:
    """A visible pair of a cropped rectangle, whose first row sees something by construction."""
    return rect.q0, band.row(rect.q0, rect.k0, rect.k1)[0]
