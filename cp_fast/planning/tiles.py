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

from typing import NamedTuple

import numpy as np

from cp_fast.planning.batch import Array, Batch, Owned

__all__ = ["LARGE", "Cut", "Placed", "Slot", "cut", "join", "launches", "see"]

Window = tuple[int | None, int | None]

LARGE = 2048  # query rows from which a tile has its own window


class Slot(NamedTuple):
    """One tile a sequence, on the token axes of queries and keys: `rows` queries from `q`, `columns` keys from `k`;
    all zero where a sequence has none. `piece` numbers the queries' piece. For tiles with windows of their own, `left`
    and `right` have them, -1 where unbounded.
    """

    q: Array
    rows: Array
    k: Array
    columns: Array
    piece: int = 0
    left: Array | None = None
    right: Array | None = None

    def only(self, where: Array) -> Slot:
        """The tiles of some sequences."""
        q, rows, k, columns = (x * where for x in (self.q, self.rows, self.k, self.columns))
        return self._replace(q=q, rows=rows, k=k, columns=columns)

    def meets(self, other: Slot) -> bool:
        """Whether any sequence has a query row or a key row in both."""
        in_q = (self.q < other.q + other.rows) & (other.q < self.q + self.rows)
        in_k = (self.k < other.k + other.columns) & (other.k < self.k + self.columns)
        return bool((in_q | in_k).any())


class Placed(NamedTuple):
    """One launch: a window, and its slots."""

    window: Window
    slots: list[Slot]


class Cut(NamedTuple):
    """A rectangle's tiles, by kind."""

    natural: Slot
    right: Slot
    full: Slot
    left: Slot
    own: Slot


def see(batch: Batch, unit: int, owner: int) -> list[Placed]:
    """The tiles of a unit's queries with an owner's keys, as launches in order."""
    queries, keys = batch.owned("q", unit), batch.owned("kv", owner)
    readers, owners = batch.chunks(unit), batch.chunks(owner)
    square = _squares(batch, queries, keys) if (unit - owner) % batch.count == 0 else None
    if square is not None and square.all():
        return launches(batch, [Slot(_zero(queries), queries.total, _zero(queries), keys.total)], [], [], [], [])
    plain, crossed = [], []
    for piece in range(len(queries.first)):
        for other in range(len(keys.first)):
            how = "crossed" if readers is None or owners is None else batch.relation(readers[piece], owners[other])
            if how != "hidden":
                (crossed if how == "crossed" else plain).append((piece, other))
    if not crossed:
        return launches(batch, [], [], _plain(queries, keys, plain), [], [])
    found = {(p, o): _tiles(batch, queries, keys, p, o, square) for p, o in plain + crossed}
    cuts = [found[pair] for pair in sorted(found)]
    natural = [c.natural for c in cuts]
    if square is not None and square.any():
        natural.insert(0, Slot(_zero(queries), queries.total, _zero(queries), keys.total).only(square))
    full = join({pair: found[pair].full for pair in found})
    return launches(batch, natural, [c.right for c in cuts], full, [c.left for c in cuts], [c.own for c in cuts])


def cut(
    batch: Batch, q0: Array, q1: Array, k0: Array, k1: Array, offset: tuple[Array | int, Array | int], piece: int
) -> Cut:
    """The tiles of rectangles [q0, q1) x [k0, k1) of positions; `offset` is (token - position) of queries and keys."""
    lo, hi = batch.lo, batch.hi
    row0 = q0 if hi is None else np.maximum(q0, k0 - hi)
    row1 = q1 if lo is None else np.minimum(q1, k1 - lo)
    end = k1 if hi is None else np.minimum(k1, q1 + hi)
    begin = k0 if lo is None else np.maximum(k0, q0 + lo)
    there = (q0 < q1) & (k0 < k1) & (row0 < row1) & (begin < end)
    if not there.any():
        return Cut(*[Slot(batch.nothing, batch.nothing, batch.nothing, batch.nothing, piece)] * 5)
    nothing = np.zeros_like(there)
    cut_right = nothing if hi is None else there & (end - 1 - row0 > hi)
    cut_left = nothing if lo is None else there & (begin - (row1 - 1) < lo)
    natural = nothing if lo is None and hi is None else there & (end - row1 == batch.shift)
    rest = there & ~natural

    split = row0 if hi is None else np.where(cut_right, end - hi, row0)  # rows from here on see every key on the right
    below = rest & (split < row1)
    start = begin if lo is None else np.maximum(begin, split + lo)
    edge = start if lo is None else np.where(start - (row1 - 1) < lo, row1 + lo, start)
    has_right, has_left, has_full = rest & cut_right, below & (start < edge), below & (edge < end)
    several = has_right.astype(np.int8) + has_left + has_full > 1
    if batch.problem.qkv_format == "thd":
        several &= row1 - row0 >= LARGE

    def slot(where: Array, a: Array, b: Array, c: Array, d: Array) -> Slot:
        if not where.any():
            return Slot(batch.nothing, batch.nothing, batch.nothing, batch.nothing, piece)
        return Slot(a + offset[0], b - a, c + offset[1], d - c, piece).only(where)

    own = slot(several, row0, row1, begin, end)
    if several.any():
        none = np.full_like(row0, -1)
        left = none if lo is None else np.where(cut_left, end - row1 - lo, -1)
        right = none if hi is None else np.where(cut_right, hi + row1 - end, -1)
        own = own._replace(left=left, right=right)
    return Cut(
        natural=slot(natural, row0, row1, begin, end),
        right=slot(has_right & ~several, row0, split, begin, end),
        full=slot(has_full & ~several, split, row1, edge, end),
        left=slot(has_left & ~several, split, row1, start, edge),
        own=own,
    )


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


def launches(
    batch: Batch, natural: list[Slot], right: list[Slot], full: list[Slot], left: list[Slot], own: list[Slot]
) -> list[Placed]:
    """The launches of tiles by kind. Slots without a row in common share one; each sequence keeps the order of its
    tiles.
    """
    width = None if batch.window[0] is None or batch.window[1] is None else batch.window[0] + batch.window[1]
    placed: list[Placed] = []
    kinds: list[tuple[Window, list[Slot]]] = [
        (batch.window, natural),
        ((width, 0), right),
        ((None, None), full),
        ((0, None), left),
    ]
    for window, slots in kinds:
        together: list[Slot] = []
        for slot in slots:
            if not slot.rows.any():
                continue
            if any(slot.meets(other) for other in together):
                placed.append(Placed(window, together))
                together = []
            together.append(slot)
        if together:
            placed.append(Placed(window, together))
    for slot in own:
        placed += _with_own_windows(slot)
    return placed


def _with_own_windows(slot: Slot) -> list[Placed]:
    if not slot.rows.any():
        return []
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
    if len(queries.first) == 1 or batch.hi is None:
        return None
    if batch.alike and batch.lo is None and isinstance(batch.hi, int):
        return np.ones(batch.size, dtype=bool) if batch.hi == 0 else None
    same = (batch.len_q == batch.len_kv) & (batch.slots_q == batch.slots_kv) & (np.asarray(batch.hi) == 0)
    return same if batch.lo is None else same & (np.asarray(batch.lo) <= 1 - batch.len_q)


def _plain(queries: Owned, keys: Owned, pairs: list[tuple[int, int]]) -> list[Slot]:
    """Tiles with nothing hidden, of all sequences alike."""
    pieces, others = sorted({p for p, _ in pairs}), sorted({o for _, o in pairs})
    if len(pairs) == len(pieces) * len(others) and pairs:  # a full grid is one rectangle, and alone
        q, rows = _along(queries, pieces)
        k, columns = _along(keys, others)
        rows = rows * (columns > 0)
        return [Slot(q, rows, k, columns * (rows > 0), pieces[0])]
    return join(
        {
            (p, o): Slot(
                queries.offset[p] + _zero(queries), queries.count[p], keys.offset[o] + _zero(keys), keys.count[o], p
            ).only((queries.count[p] > 0) & (keys.count[o] > 0))
            for p, o in pairs
        }
    )


def _along(owned: Owned, pieces: list[int]) -> tuple[Array, Array]:
    if len(pieces) == len(owned.first):
        return _zero(owned), owned.total
    return owned.offset[pieces[0]] + _zero(owned), owned.count[pieces[0]]


def _tiles(batch: Batch, queries: Owned, keys: Owned, piece: int, other: int, square: Array | None) -> Cut:
    q0, k0 = queries.first[piece], keys.first[other]
    rows = queries.count[piece] if square is None else np.where(square, 0, queries.count[piece])
    offset = (queries.offset[piece] - q0, keys.offset[other] - k0)
    return cut(batch, q0, q0 + rows, k0, k0 + keys.count[other], offset, piece)


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


def _zero(owned: Owned) -> Array:
    return np.zeros_like(owned.total)
