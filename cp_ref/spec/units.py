"""Who sees which keys of whom: the one question that every schedule is planned from.

A unit is what takes one place in a ring: a rank, or, where heads are exchanged inside groups of `a2a_size` ranks, such
a group, whose ranks then hold the rows of all of them for some of the heads. Under dual_chunk the rows of a group are
again a dual chunk:

    cp_size 4, a2a_size 2:    chunk   0 1 2 3 4 5 6 7
                              rank    0 1 2 3 3 2 1 0
                              unit    0 0 1 1 1 1 0 0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from cp_ref.spec.layout import Fragment, kv_fragments, q_fragments
from cp_ref.spec.mask import Rect
from cp_ref.spec.problem import Problem
from cp_ref.spec.schedule import Piece, Tile

__all__ = ["Units", "common", "real_rows", "union"]


class Units:
    """A problem's units, their rows, and what they see of each other. Each answer is worked out once.

    Unit numbers are taken modulo the number of units, so that a ring can count on and on.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.unit_size = problem.a2a_size
        self.count = problem.cp_size // self.unit_size
        bands = [problem.band(s) for s in problem.sequences]
        self.windowed = bool(bands) and all(b.lo is not None and b.hi is not None for b in bands)
        self._tiles: dict[tuple[int, int], tuple[Tile, ...]] = {}
        self._seen: dict[tuple[int, int], tuple[Piece, ...]] = {}
        self._seen_by_some: dict[tuple[int, int, int], tuple[Piece, ...]] = {}
        self._active: dict[tuple[str, int], tuple[Piece, ...]] = {}
        self._rows: dict[tuple[str, int], dict[int, list[Piece]]] = {}

    def tiles(self, unit: int, owner: int) -> tuple[Tile, ...]:
        """What `unit`'s queries see of `owner`'s keys, as cropped rectangles; real tokens only."""
        where = (unit % self.count, owner % self.count)
        if where not in self._tiles:
            self._tiles[where] = tuple(self._find_tiles(*where))
        return self._tiles[where]

    def seen(self, unit: int, owner: int) -> tuple[Piece, ...]:
        """The rows of `owner`'s block that `unit` sees."""
        where = (unit % self.count, owner % self.count)
        if where not in self._seen:
            self._seen[where] = union(Piece(t.seq, t.rect.k0, t.rect.k1) for t in self.tiles(*where))
        return self._seen[where]

    def seen_by_some(self, owner: int, first: int, last: int) -> tuple[Piece, ...]:
        """The rows of `owner`'s block that any of the units owner + first ... owner + last sees."""
        where = (owner % self.count, first, last)
        if where not in self._seen_by_some:
            hops = range(first, last + 1)
            self._seen_by_some[where] = union(p for hop in hops for p in self.seen(owner + hop, owner))
        return self._seen_by_some[where]

    def active(self, unit: int, side: str) -> tuple[Piece, ...]:
        """The query rows ("q") of a unit that see anything, or the key rows ("kv") that anybody sees."""
        where = (side, unit % self.count)
        if where not in self._active:
            others = range(self.count)
            if side == "q":
                pieces = (Piece(t.seq, t.rect.q0, t.rect.q1) for other in others for t in self.tiles(unit, other))
            else:
                pieces = (Piece(t.seq, t.rect.k0, t.rect.k1) for other in others for t in self.tiles(other, unit))
            self._active[where] = union(pieces)
        return self._active[where]

    def _find_tiles(self, unit: int, owner: int) -> Iterable[Tile]:
        keys = self._unit_rows("kv", owner)
        for seq, queries in self._unit_rows("q", unit).items():
            band = self.problem.band(self.problem.sequences[seq])
            for q in queries:
                for k in keys.get(seq, ()):
                    if (rect := band.crop(Rect(q.start, q.stop, k.start, k.stop))) is not None:
                        yield Tile(seq, rect)

    def _unit_rows(self, side: str, unit: int) -> dict[int, list[Piece]]:
        if (side, unit) not in self._rows:
            ranks = range(unit * self.unit_size, (unit + 1) * self.unit_size)
            pieces = [p for rank in ranks for p in real_rows(self.problem, rank, side)]
            # one rank's chunks stay apart, as they lie in its buffer; the chunks of a group are joined
            rows = union(pieces) if self.unit_size > 1 else pieces
            by_sequence: dict[int, list[Piece]] = defaultdict(list)
            for piece in rows:
                by_sequence[piece.seq].append(piece)
            self._rows[side, unit] = by_sequence
        return self._rows[side, unit]


def real_rows(problem: Problem, rank: int, side: str) -> list[Piece]:
    """The real tokens that a rank owns, fragment by fragment; `side` is "q" or "kv".

    >>> from cp_ref.spec.problem import Sequence
    >>> [str(p) for p in real_rows(Problem(2, (Sequence(7, 7, 8, 8),)), 0, "q")]
    ['0[0:2]', '0[6:7]']
    """
    fragments: tuple[Fragment, ...] = (q_fragments if side == "q" else kv_fragments)(problem, rank)
    pieces: list[Piece] = []
    for f in fragments:
        sequence = problem.sequences[f.seq]
        stop = min(f.stop, sequence.len_q if side == "q" else sequence.len_kv)
        if f.start < stop:
            pieces.append(Piece(f.seq, f.start, stop))
    return pieces


def common(pieces: Iterable[Piece], others: Iterable[Piece]) -> list[Piece]:
    """The positions that are in both, cut as in `pieces`.

    >>> [str(p) for p in common([Piece(0, 0, 4), Piece(0, 6, 8), Piece(1, 0, 2)], [Piece(0, 2, 7)])]
    ['0[2:4]', '0[6:7]']
    """
    by_sequence: dict[int, list[Piece]] = defaultdict(list)
    for p in others:
        by_sequence[p.seq].append(p)
    found: list[Piece] = []
    for p in pieces:
        for other in by_sequence[p.seq]:
            if (start := max(p.start, other.start)) < (stop := min(p.stop, other.stop)):
                found.append(Piece(p.seq, start, stop))
    return found


def union(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same positions as few pieces, sorted; all heads.

    >>> [str(p) for p in union([Piece(0, 4, 8), Piece(0, 0, 4), Piece(1, 2, 3), Piece(0, 6, 9)])]
    ['0[0:9]', '1[2:3]']
    """
    merged: list[Piece] = []
    for p in sorted(pieces, key=lambda p: (p.seq, p.start)):
        if merged and merged[-1].seq == p.seq and p.start <= merged[-1].stop:
            merged[-1] = Piece(p.seq, merged[-1].start, max(merged[-1].stop, p.stop))
        else:
            merged.append(Piece(p.seq, p.start, p.stop))
    return tuple(merged)
