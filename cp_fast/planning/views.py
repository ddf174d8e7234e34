"""What one unit and each of the others are to each other, by the numbers of their chunks alone.

Where all sequences are cut alike, chunks of unit `a` and of unit `b` lie as many chunks apart in each of them. So a few
operations on small arrays tell, for all units at once, which pieces of keys a piece of queries sees whole, or not at
all, and up to which size of chunk two units see each other through a window on both sides: units that are far apart do
in short sequences alone, and steps then look at these alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cp_fast.planning.batch import Batch
from cp_fast.planning.columns import Array
from cp_fast.planning.loops.base import Sight

__all__ = ["Pair", "View", "Views"]

Pair = tuple[int, int]  # a piece of queries, and one of keys

_HIDDEN, _PLAIN, _CROSSED = range(3)


class View(NamedTuple):
    """A unit's queries and an owner's keys.

    Attributes:
        batch: the sequences in which a query may see a key.
        reader, owner: the units.
        plain: the pairs of pieces between which nothing is hidden, in all sequences.
        crossed: those that may differ.
        sights: what each piece of the queries sees.
    """

    batch: Batch
    reader: int
    owner: int
    plain: tuple[Pair, ...]
    crossed: tuple[Pair, ...]
    sights: tuple[int | Sight, ...]


class Views:
    """Every pair of units of which `unit` is one."""

    def __init__(self, batch: Batch, unit: int) -> None:
        self._count, self._found = batch.count, dict[Pair, View]()
        units = range(batch.count)
        chunks = [batch.chunks(n) for n in units]
        if batch.alike and chunks[0] is not None:
            edges = np.array(chunks).transpose(2, 0, 1)  # first and stop of [units, pieces]
            own = edges[:, unit : unit + 1]
            for readers, owners, q, k in ((unit, None, own, edges), (None, unit, edges, own)):
                self._add(batch, readers, owners, q[:, :, :, None], k[:, :, None, :])
        else:
            q, k = batch.owned("q", unit).pieces, batch.owned("kv", unit).pieces
            every = tuple((piece, other) for piece in range(q) for other in range(k))
            for n in units:
                for pair in ((unit, n), (n, unit)):
                    self._found[pair] = View(batch, *pair, (), every, (Sight.WINDOW,) * q)

    def of(self, reader: int, owner: int) -> View:
        """What a reader sees of an owner; unit numbers count on and on, modulo the number of units."""
        return self._found[reader % self._count, owner % self._count]

    def _add(self, batch: Batch, reader: int | None, owner: int | None, q: Array, k: Array) -> None:
        """All units as readers of one (`reader` is None), or as owners; first and stop chunks of [units, pieces]."""
        (a0, a1), (b0, b1) = q, k
        behind, before = b0 - a1, a0 - b1  # chunks between the last query and the first key, and the other way round
        empty = (a0 == a1) | (b0 == b1)
        nears = _nears(batch, behind, before, empty)
        sizes = np.array([near.chunk_sizes for near in nears]).T[:, :, None, None]
        kinds = _kinds(batch, behind, before, empty, sizes)
        pairs = kinds.reshape(len(kinds), -1).tolist()
        for n, (near, of_pairs) in enumerate(zip(nears, pairs, strict=True)):
            pair = (n if reader is None else reader, n if owner is None else owner)
            self._found[pair] = View(near, *pair, *_facts(kinds.shape[2], tuple(of_pairs)))


def _nears(batch: Batch, behind: Array, before: Array, empty: Array) -> list[Batch]:
    """The sequences in which a query may see a key: of all units, [units, pieces, pieces]."""
    if not batch.windowed:
        return [batch] * len(empty)
    assert isinstance(batch.lo, int)
    assert isinstance(batch.hi, int)
    largest = np.full(empty.shape, batch.far)
    for away, edge in ((behind, batch.hi), (before, -batch.lo)):  # away * chunk + 1 <= edge, on both sides
        largest = np.where(away > 0, np.minimum(largest, (edge - 1) // np.maximum(away, 1)), largest)
        if edge < 1:
            largest = np.where(away == 0, -1, largest)
    largest = np.where(empty, -1, largest)
    return [batch.of_chunks_up_to(chunk) for chunk in largest.max(axis=(1, 2)).tolist()]


def _kinds(batch: Batch, behind: Array, before: Array, empty: Array, sizes: Array) -> Array:
    """Hidden, plain or crossed; key - query lies between two numbers that are linear in the size of a chunk."""
    lo, hi = batch.lo, batch.hi
    lowest = (behind * sizes).min(axis=0) + 1
    highest = (-before * sizes).max(axis=0) - 1
    hidden, plain = empty, np.ones_like(empty)
    if hi is not None:
        hidden, plain = hidden | (lowest > hi), plain & (highest <= hi)
    if lo is not None:
        hidden, plain = hidden | (highest < lo), plain & (lowest >= lo)
    return np.where(hidden, _HIDDEN, np.where(plain, _PLAIN, _CROSSED))


@lru_cache
def _facts(others: int, kinds: tuple[int, ...]) -> tuple[tuple[Pair, ...], tuple[Pair, ...], tuple[int | Sight, ...]]:
    """plain, crossed and sights of a `View`; `kinds` of its pairs, with `others` pieces of keys for each of queries.

    >>> _facts(2, (1, 0, 2, 1))
    (((0, 0), (1, 1)), ((1, 0),), (0, <Sight.WINDOW: -2>))
    """
    rows = [kinds[n : n + others] for n in range(0, len(kinds), others)]
    of_kind = [[(p, o) for p, row in enumerate(rows) for o, x in enumerate(row) if x == kind] for kind in range(3)]
    return tuple(of_kind[_PLAIN]), tuple(of_kind[_CROSSED]), tuple(map(_sight, rows))


def _sight(kinds: tuple[int, ...]) -> int | Sight:
    """What a piece of queries sees of the pieces of keys."""
    if _CROSSED in kinds:
        return Sight.WINDOW
    if _PLAIN not in kinds:
        return Sight.NOTHING
    return kinds.index(_PLAIN) if _HIDDEN in kinds else Sight.ALL
