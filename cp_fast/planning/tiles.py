"""What a unit's queries see of another's keys, as batches of tiles that share a window.

The band crosses the rectangle of a query piece and a key piece anywhere, differently for every sequence. A kernel's
window is aligned to the bottom-right corner of a tile, so equal windows need equal corners. Each rectangle is cut, for
each sequence by itself, into at most three tiles with corners on an edge of the band:

        keys ->             A   right edge in the corner: window (width of the band, 0)
      . a a a a . .         B   left edge in the corner: window (0, unbounded)
      . . a a a a .         C   nothing hidden: no window
      . . . b b c c         (D  the corner where the whole sequence has it: the user's own window)
      . . . . b c c

Then all sequences share four windows, however long they are. Tiles with nothing hidden are joined again, over pieces
that lie side by side; so are the tiles of the own chunks under a causal mask (one causal square). What becomes of a
sequence does not depend on the others, and neither does the order of its tiles: its results have the same bits in
every batch.

A large rectangle is left whole with a window of its own, as one large launch is better than three; and so it is in bshd
and sbhd, where the sequences have the same corners anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cp_fast.planning.batch import Batch
from cp_fast.planning.columns import Array, Cut, Owned, Range, Slot
from cp_fast.planning.views import View

__all__ = ["LARGE", "Placed", "Whole", "Window", "cut", "join", "launches", "see", "see_whole"]

Window = tuple[int | None, int | None]
Slots = Sequence[Slot | None]

LARGE = 2048  # query rows from which a tile has its own window


class Placed(NamedTuple):
    """One launch: a window, and its slots. It may turn out that no sequence has a tile in them: then it is none."""

    window: Window
    slots: list[Slot]


class Whole(NamedTuple):
    """One tile a sequence that nothing is hidden from but by its window: the piece of the queries and of the keys, or
    all of them (None); None for no tile.
    """

    window: Window
    pieces: tuple[int | None, int | None] | None


def see(view: View) -> list[Placed]:
    """The tiles of a unit's queries with an owner's keys, as launches in order."""
    batch, plain, crossed = view.batch, view.plain, view.crossed
    queries, keys = batch.owned("q", view.reader), batch.owned("kv", view.owner)
    square = _squares(batch, queries, keys) if view.reader == view.owner else None
    whole = _whole(view, square, queries, keys)
    if whole is not None:
        if whole.pieces is None:
            return []
        tile = batch.loops.plain(queries, whole.pieces[0], keys, whole.pieces[1])
        return [Placed(whole.window, [tile])]
    if not crossed:
        full = {(p, o): batch.loops.plain(queries, p, keys, o) for p, o in plain}
        return launches(batch, [], [], join(full), [], [])
    found = {(p, o): _tiles(batch, queries, keys, p, o, square) for p, o in (*plain, *crossed)}
    cuts = [found[pair] for pair in sorted(found)]
    squares = None
    if square is not None and square.any():
        squares = batch.loops.plain(queries, None, keys, None).only(square)
    return launches(
        batch,
        [squares, *(c.natural for c in cuts)],
        [c.right for c in cuts],
        join({pair: c.full for pair, c in found.items() if c.full is not None}),
        [c.left for c in cuts],
        [c.own for c in cuts],
    )


def see_whole(view: View) -> Whole | None:
    """The same where it is one tile a sequence, of the same pieces in all sequences; None where it may be more."""
    batch = view.batch
    queries, keys = batch.owned("q", view.reader), batch.owned("kv", view.owner)
    return _whole(view, _squares(batch, queries, keys) if view.reader == view.owner else None, queries, keys)


def _whole(view: View, square: Array | None, queries: Owned, keys: Owned) -> Whole | None:
    if square is not None and square.all():
        return Whole(view.batch.window, (None, None))
    plain = view.plain
    pieces, others = {p for p, _ in plain}, {o for _, o in plain}
    if view.crossed or len(plain) < len(pieces) * len(others):
        return None
    if not plain:
        return Whole((None, None), None)
    piece = None if len(pieces) == queries.pieces else min(pieces)
    return Whole((None, None), (piece, None if len(others) == keys.pieces else min(others)))


def cut(batch: Batch, q: Range, k: Range, offsets: tuple[Array, Array], piece: int) -> Cut:
    """The tiles of rectangles of positions; `offsets` are (token - position) of queries and keys."""
    bounded = batch.lo is not None or batch.hi is not None
    large = LARGE if batch.problem.qkv_format == "thd" else 0
    return batch.loops.cut(q, k, batch.band, bounded, large, offsets, piece)


def join(full: dict[tuple[int, int], Slot]) -> list[Slot]:
    """Unmasked tiles by (piece of queries, piece of keys): neighbours with the same rows, or the same columns, are
    one tile.
    """
    found = dict(full)
    for piece in {p for p, _ in found}:
        found = _joined(found, (piece, 0), (piece, 1), over_keys=True)
    for other in {o for _, o in found}:
        found = _joined(found, (0, other), (1, other), over_keys=False)
    return [found[pair] for pair in sorted(found)]


def launches(batch: Batch, natural: Slots, right: Slots, full: Slots, left: Slots, own: Slots) -> list[Placed]:
    """The launches of tiles by kind; None is no tile. Slots without a row in common share one; each sequence keeps the
    order of its tiles.
    """
    width = None if batch.window[0] is None or batch.window[1] is None else batch.window[0] + batch.window[1]
    placed: list[Placed] = []
    kinds: list[tuple[Window, Slots]] = [
        (batch.window, natural),
        ((width, 0), right),
        ((None, None), full),
        ((0, None), left),
    ]
    for window, slots in kinds:
        together: list[Slot] = []
        for slot in slots:
            if slot is None:
                continue
            if any(batch.loops.meet(slot, other) for other in together):
                placed.append(Placed(window, together))
                together = []
            together.append(slot)
        if together:
            placed.append(Placed(window, together))
    for slot in own:
        placed += _with_own_windows(slot) if slot is not None else []
    return placed


def _with_own_windows(slot: Slot) -> list[Placed]:
    assert slot.left is not None
    assert slot.right is not None
    there = slot.rows > 0
    windows = sorted(set(zip(slot.left[there].tolist(), slot.right[there].tolist(), strict=True)))
    return [
        Placed(
            (None if a < 0 else a, None if b < 0 else b),
            [slot.only(there & (slot.left == a) & (slot.right == b))],
        )
        for a, b in windows
    ]


def _squares(batch: Batch, queries: Owned, keys: Owned) -> Array | None:
    """The sequences whose own two chunks of queries and keys are one causal square in the buffers; None if none can
    be.
    """
    if queries.pieces == 1 or batch.hi is None:
        return None
    if batch.alike and batch.lo is None and isinstance(batch.hi, int):
        return np.ones(batch.size, dtype=bool) if batch.hi == 0 else None
    same = (batch.len_q == batch.len_kv) & (batch.slots_q == batch.slots_kv) & (np.asarray(batch.hi) == 0)
    return same if batch.lo is None else same & (np.asarray(batch.lo) <= 1 - batch.len_q)


def _tiles(batch: Batch, queries: Owned, keys: Owned, piece: int, other: int, square: Array | None) -> Cut:
    q0, k0 = queries.first[piece], keys.first[other]
    rows = queries.count[piece] if square is None else np.where(square, 0, queries.count[piece])
    return cut(batch, Range(q0, rows), Range(k0, keys.count[other]), (queries.shifts[piece], keys.shifts[other]), piece)


def _joined(
    full: dict[tuple[int, int], Slot], one: tuple[int, int], two: tuple[int, int], *, over_keys: bool
) -> dict[tuple[int, int], Slot]:
    if one not in full or two not in full:
        return full
    a, b = full[one], full[two]
    both = (a.rows > 0) & (b.rows > 0)
    if over_keys:
        both &= (a.q == b.q) & (a.rows == b.rows) & (a.k + a.columns == b.k)
        joined = a._replace(columns=a.columns + np.where(both, b.columns, 0))
    else:
        both &= (a.k == b.k) & (a.columns == b.columns) & (a.q + a.rows == b.q)
        joined = a._replace(rows=a.rows + np.where(both, b.rows, 0))
    return {**full, one: joined, two: b.only(~both)}
