"""Areas with common rows, as few segments in few launches.

A launch adds its results by rows, so no two of its segments may share a query row. They may share a key row only if the
gradients of keys are added layer by layer. Areas of one mask often share rows: the blocks before each block, a prompt
before its answers.

split_disjoint   segments in launches with room.
layers           a launch's segments in groups whose gradients may be added at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import and_, or_

import numpy as np

from cp_fast.passes import bit_of
from cp_fast.tiles.segments import SegmentRows, Segments, WindowedTiles
from cp_ref.schedules.table import Column, constant, ranges, runs

__all__ = [
    "Atoms",
    "Uses",
    "areas_meet",
    "atoms_of",
    "dedupe_queries",
    "factor_keys",
    "layers",
    "rows_in",
    "split_disjoint",
]

# ---- Sets of rows
#
# Sets of rows as integers: rows that are in the same spans form one atom, and bit n of a set is atom n.


class Atoms:
    """Rows that are in the same spans form one atom. A set of atoms is an integer with bit n for atom n."""

    def __init__(self, spans: SegmentRows) -> None:
        self.given = spans
        self._edges = np.unique(np.concatenate([spans.start, spans.stop]))
        self.rows = np.diff(self._edges)  # of each
        first, last = (np.searchsorted(self._edges, x) for x in (spans.start, spans.stop))
        self.places: tuple[list[int], list[int]] = first.tolist(), last.tolist()  # Of each span, in atoms.

    @cached_property
    def sizes(self) -> list[int]:
        """The atoms with bit 0 set in their number of rows, those with bit 1, ...: `rows_in` counts with these."""
        planes = range(int(self.rows.max(initial=0)).bit_length())
        return [int.from_bytes(np.packbits(self.rows >> n & 1, bitorder="little").tobytes(), "little") for n in planes]

    def sets(self, segments: Segments) -> list[int]:
        """The atoms of each segment."""
        found = [0] * len(segments)
        for segment, begin, end in zip(self.given.segment.tolist(), *self.places, strict=True):
            found[segment] |= (1 << end) - (1 << begin)
        return found

    def spans(self, sets: Sequence[Sequence[int] | Column]) -> SegmentRows:
        """The rows of each set, given as its atoms, as few spans."""
        count = np.array([len(atoms) for atoms in sets], dtype=np.int64)
        atom = np.concatenate([np.zeros(0, dtype=np.int64), *(np.sort(np.asarray(x, dtype=np.int64)) for x in sets)])
        segment = np.repeat(np.arange(len(sets)), count)
        begin, size = runs((segment[1:] != segment[:-1]) | (atom[1:] != atom[:-1] + 1), len(atom))
        return SegmentRows(segment[begin], self._edges[atom[begin]], self._edges[atom[begin + size - 1] + 1])


class Uses:
    """Which launches have each atom, as bits: 64 launches in a row of an array [rows, atoms]."""

    def __init__(self, atoms: Atoms, count: int) -> None:
        self._bits = np.zeros((1, len(atoms.rows)), dtype=np.uint64)
        self._first = np.searchsorted(atoms.given.segment, np.arange(count + 1)).tolist()
        self._places = atoms.places

    def of(self, segment: int) -> slice | Column:
        """The atoms of a segment."""
        here = slice(self._first[segment], self._first[segment + 1])
        first, last = (x[here] for x in self._places)
        if len(first) == 1:
            return slice(first[0], last[0])
        begin = np.array(first, dtype=np.int64)
        return np.unique(ranges(begin, np.array(last, dtype=np.int64) - begin))

    def users(self, atoms: slice | Column) -> int:
        """The launches that have any of these, as bits."""
        return int.from_bytes(np.bitwise_or.reduce(self._bits[:, atoms], axis=1).tobytes(), "little")

    def used(self, atoms: slice | Column, launch: int) -> Column:
        """Whether a launch has each of these."""
        return self._bits[launch // 64, atoms] >> np.uint64(launch % 64) & np.uint64(1) > 0

    def add(self, atoms: slice | Column, launch: int) -> None:
        """Add these atoms to a launch."""
        while launch // 64 >= len(self._bits):
            self._bits = np.concatenate([self._bits, np.zeros_like(self._bits)])
        self._bits[launch // 64, atoms] |= np.uint64(1 << launch % 64)


def rows_in(atoms: int, sizes: Sequence[int]) -> int:
    """The number of rows of a set."""
    return sum((atoms & plane).bit_count() << n for n, plane in enumerate(sizes))


def atoms_of(atoms: int) -> Column:
    """The atoms of a set.

    >>> atoms_of(0b1101).tolist()
    [0, 2, 3]
    """
    if not atoms:
        return np.zeros(0, dtype=np.int64)
    down = (atoms & -atoms).bit_length() - 1
    atoms >>= down
    packed = np.frombuffer(atoms.to_bytes(-(-atoms.bit_length() // 8), "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little")) + down


# ---- Queries that share keys
#
# Segments without a mask whose queries share keys, as few segments with the same pairs.
#
# factor_keys      few rectangles, many of them in one launch.
# dedupe_queries   one segment for all queries with the same keys, without repeated queries.
#
#     block-causal, 4 blocks, without the diagonal        factor_keys: b and c have no row in common
#         a . . .         a: block 0 for 1                    b . . .       launch 1: a
#         b b . .         b: blocks 0, 1 for 2                a a . .       launch 2: b, c
#         c c c .         c: blocks 0, 1, 2 for 3             a a c .


Group = tuple[list[int], int]  # Atoms of queries, and the set of atoms of keys that they see.


def factor_keys(segments: Segments) -> Segments:
    """Segments without a mask as few rectangles with the same pairs. Queries that share most of their keys take
    the shared keys together. The remaining keys, and queries that share fewer, are halved, the half with more keys
    first.

    >>> q, k = [(0, 1, 2), (1, 2, 3), (2, 3, 4)], [(0, 0, 1), (1, 0, 2), (2, 0, 3)]
    >>> found = factor_keys(Segments.of_rows(q, k))
    >>> list(found.q.rows()), list(found.k.rows())
    ([(0, 2, 4), (1, 3, 4), (2, 1, 2)], [(0, 0, 2), (1, 2, 3), (2, 0, 1)])
    """
    q, k = Atoms(segments.q), Atoms(segments.k)
    return _as_segments(segments, q, k, list(_rectangles(_groups(segments, q, k), k.sizes)), "factor_keys")


def dedupe_queries(segments: Segments, most: float = math.inf) -> Segments | None:
    """Segments without a mask, merged into one for all queries that see the same keys. None if they have more
    than `most` rows of keys in total.

    >>> q, k = [(0, 1, 2), (1, 1, 2), (2, 2, 3)], [(0, 0, 1), (1, 1, 2), (2, 0, 2)]
    >>> found = dedupe_queries(Segments.of_rows(q, k))
    >>> list(found.q.rows()), list(found.k.rows())
    ([(0, 1, 3)], [(0, 0, 2)])
    """
    q, k = Atoms(segments.q), Atoms(segments.k)
    groups = _groups(segments, q, k)
    if sum(rows_in(its, k.sizes) for _, its in groups) > most:
        return None
    return _as_segments(segments, q, k, groups, "dedupe_queries")


def _groups(segments: Segments, q: Atoms, k: Atoms) -> list[Group]:
    """Groups of queries that see the same keys, by these keys. No two segments share a pair, so the keys of two
    neighbouring atoms of queries differ only by the segments that begin or end between them.
    """
    keys = k.sets(segments)
    changes: dict[int, int] = {}
    for segment, begin, end in zip(segments.q.segment.tolist(), *q.places, strict=True):
        for edge in (begin, end):
            changes[edge] = changes.get(edge, 0) ^ keys[segment]
    by_keys: dict[int, list[int]] = {}
    its, before = 0, 0
    for edge in sorted(changes):
        if its:
            by_keys.setdefault(its, []).extend(range(before, edge))
        its, before = its ^ changes[edge], edge
    return [(by_keys[its], its) for its in sorted(by_keys)]


def _as_segments(segments: Segments, q: Atoms, k: Atoms, found: Sequence[Group], made_by: str) -> Segments:
    """Groups as segments without a mask."""
    area = np.array([segments.area[0]] * len(found))
    queries, keys = q.spans([mine for mine, _ in found]), k.spans([atoms_of(its) for _, its in found])
    return Segments.dense(area, constant(bit_of(made_by), area), queries, keys)


def _rectangles(groups: list[Group], sizes: Sequence[int]) -> Iterator[Group]:
    """Groups of queries, sorted by their keys, as rectangles. sizes: of atoms of keys, see `Atoms.sizes`."""
    pending = [(groups, 0, sizes)]  # Keys are shifted down by a number of atoms: small sets are fast.
    while pending:
        groups, shift, sizes = pending.pop()
        groups = [group for group in groups if group[1]]
        if not groups:
            continue
        common = reduce(and_, (its for _, its in groups))
        if common and 2 * rows_in(common, sizes) >= max(rows_in(its, sizes) for _, its in groups):
            yield [atom for mine, _ in groups for atom in mine], common << shift
            pending.append(([(mine, its & ~common) for mine, its in groups], shift, sizes))
            continue
        parts = _components(groups)
        if len(parts) == 1:
            parts = [groups[len(groups) // 2 :], groups[: len(groups) // 2]]
        for part in reversed(parts):
            every = reduce(or_, (its for _, its in part))
            down = (every & -every).bit_length() - 1
            some = (1 << every.bit_length() - down) - 1
            pending.append(
                ([(mine, its >> down) for mine, its in part], shift + down, [x >> down & some for x in sizes])
            )


def _components(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups joined by common keys, directly or through others; the part of the last group is the last."""
    parts: dict[int, tuple[int, list[Group]]] = {}  # By number: the keys and the groups of a part.
    covered, into = 0, list(range(len(groups)))  # Into: the part that absorbed each part.
    owner = np.zeros(max(its.bit_length() for _, its in groups), dtype=np.int64)  # Of atoms of keys: a part.
    for number, group in enumerate(groups):
        every, some = group[1], [group]
        owner[atoms_of(every & ~covered)] = number
        rest = every & covered
        while rest:
            met = int(owner[(rest & -rest).bit_length() - 1])
            while into[met] != met:
                into[met] = met = into[into[met]]
            keys, others = parts.pop(met)
            into[met] = number
            every, some, rest = every | keys, others + some, rest & ~keys
        parts[number] = every, some
        covered |= every
    return [sorted(part, key=lambda group: group[1]) for _, part in parts.values()]


# ---- Launches without common queries


def areas_meet(tiles: WindowedTiles) -> bool:
    """Whether the queries, or the keys, of two areas may share rows: whether their ranges overlap."""
    if len(tiles) < 2:
        return False
    order = np.argsort(tiles.area, kind="stable")
    area = tiles.area[order]
    begin, _ = runs(area[1:] != area[:-1], len(area))
    for start, stop in ((tiles.q_start, tiles.q_stop), (tiles.k_start, tiles.k_stop)):
        first, last = np.minimum.reduceat(start[order], begin), np.maximum.reduceat(stop[order], begin)
        place = np.argsort(first, kind="stable")
        if bool((first[place][1:] < last[place][:-1]).any()):
            return True
    return False


def split_disjoint(segments: Segments, most: float = math.inf, *, shared_keys: bool = False) -> list[Segments] | None:
    """The segments in launches without repeated rows of queries: large segments first, each in the first launch with
    room. Rows of keys may repeat, up to half the number of queries. To gather them and add their gradients costs less
    than another launch: it would read its queries and merge their results.

    Args:
        most: the most launches; None is returned if more are needed.
        shared_keys: whether any rows of keys may repeat: they cost nothing.

    >>> q, k = [(0, 0, 4), (1, 4, 6), (2, 6, 8)], [(0, 0, 4), (1, 0, 4), (2, 4, 6)]  # two with the same keys
    >>> three = Segments.of_rows(q, k)
    >>> [len(launch) for launch in split_disjoint(three)]
    [2, 1]
    """
    atoms = Atoms(segments.q), Atoms(segments.k)
    mine, its = (Uses(side, len(segments)) for side in atoms)
    size = atoms[1].rows
    rows = [spans.lengths(len(segments)) for spans in (segments.q, segments.k)]
    launches: list[_OpenLaunch] = []
    for n in np.argsort(-rows[0] * rows[1], kind="stable").tolist():
        q, k, own = mine.of(n), its.of(n), int(rows[0][n])
        taken, met = mine.users(q), its.users(k)
        number = -1
        for number in _clear(taken, len(launches)):
            launch = launches[number]
            again = launch.again + (int(size[k][its.used(k, number)].sum()) if met >> number & 1 else 0)
            if shared_keys or 2 * again <= launch.rows + own:
                break
        else:
            number, again = len(launches), 0
            if number == most:
                return None
            launches.append(_OpenLaunch())
        launch = launches[number]
        launch.again, launch.rows = again, launch.rows + own
        launch.segments.append(n)
        mine.add(q, number)
        its.add(k, number)
    return [segments.take(np.array(sorted(launch.segments))) for launch in launches]


@dataclass
class _OpenLaunch:
    """A launch under construction: rows of queries, repeated rows of keys, segments."""

    rows: int = 0
    again: int = 0
    segments: list[int] = field(default_factory=list)


def _clear(bits: int, count: int) -> Iterator[int]:
    """The numbers below `count` whose bits are not set."""
    free = ~bits & ((1 << count) - 1)
    while free:
        yield (free & -free).bit_length() - 1
        free &= free - 1


def layers(segments: Segments) -> Column | None:
    """A number for each segment, from 0: those with the same number have no row of keys in common. None where no two
    have any.

    >>> q, k = [(0, 0, 4), (1, 4, 6), (2, 6, 8)], [(0, 0, 4), (1, 0, 4), (2, 4, 6)]
    >>> layers(Segments.of_rows(q, k)).tolist()
    [0, 1, 0]
    """
    uses = Uses(Atoms(segments.k), len(segments))
    found: list[int] = []
    for n in range(len(segments)):
        keys = uses.of(n)
        taken = uses.users(keys)
        found.append((~taken & (taken + 1)).bit_length() - 1)
        uses.add(keys, found[-1])
    return np.array(found) if any(found) else None
