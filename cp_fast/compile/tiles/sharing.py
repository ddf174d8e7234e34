"""Segments of areas that have rows in common: few of them, in few launches.

A launch adds its results by rows, so no two of its segments may have a query row in common; nor a key row, but where
the gradients of keys are added up layer by layer. Areas of one mask often have: the blocks before each block, a prompt
before its answers.

staircases   segments without a mask: few rectangles instead, of which many go into one launch
alike        segments without a mask: one for all queries that see the same keys, which has each query once
behind       the segment of a causal area, with the keys that its queries see before it: one segment
apart        segments in launches, each where there is room
layers       a launch's segments by what may be added up at once

    block-causal, 4 blocks, without the diagonal        staircases: b and c have no row in common
        a . . .         a: block 0 for 1                    b . . .       launch 1: a
        b b . .         b: blocks 0, 1 for 2                a a . .       launch 2: b, c
        c c c .         c: blocks 0, 1, 2 for 3             a a c .
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import and_, or_

import numpy as np

from cp_fast.compile.tiles.joins import Segments, SegmentSpans
from cp_fast.compile.tiles.windows import BandTiles
from cp_ref.spec import Column
from cp_ref.spec.table import ranges, runs

__all__ = ["alike", "apart", "areas_meet", "behind", "layers", "staircases"]

Group = tuple[list[int], int]  # atoms of queries, and the set of atoms of keys that these see
Rows = tuple[tuple[int, int], ...]


def areas_meet(tiles: BandTiles) -> bool:
    """Whether the queries, or the keys, of two areas may have rows in common: whether the stretches around them do."""
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


def staircases(segments: Segments) -> Segments:
    """Segments without a mask as few rectangles with the same pairs: queries that have most of their keys in common
    take these together; what is left, and queries that have less in common, are halved, the richer half first.

    >>> q, k = [(0, 1, 2), (1, 2, 3), (2, 3, 4)], [(0, 0, 1), (1, 0, 2), (2, 0, 3)]
    >>> found = staircases(Segments(*np.array([[0, 1, 2], [-1] * 3, [-1] * 3]), *map(SegmentSpans.of_rows, (q, k))))
    >>> list(found.q.rows()), list(found.k.rows())
    ([(0, 2, 4), (1, 3, 4), (2, 1, 2)], [(0, 0, 2), (1, 2, 3), (2, 0, 1)])
    """
    q, k = _Atoms(segments.q), _Atoms(segments.k)
    return _as_segments(segments, q, k, list(_rectangles(_groups(segments, q, k), k.sizes)))


def alike(segments: Segments, most: float = math.inf) -> Segments | None:
    """Segments without a mask as one for all queries that see the same keys; None where they have more rows of keys
    than `most`, all together.

    >>> q, k = [(0, 1, 2), (1, 1, 2), (2, 2, 3)], [(0, 0, 1), (1, 1, 2), (2, 0, 2)]
    >>> found = alike(Segments(*np.array([[0, 1, 2], [-1] * 3, [-1] * 3]), *map(SegmentSpans.of_rows, (q, k))))
    >>> list(found.q.rows()), list(found.k.rows())
    ([(0, 1, 3)], [(0, 0, 2)])
    """
    q, k = _Atoms(segments.q), _Atoms(segments.k)
    groups = _groups(segments, q, k)
    if sum(_rows(its, k.sizes) for _, its in groups) > most:
        return None
    return _as_segments(segments, q, k, groups)


def _groups(segments: Segments, q: _Atoms, k: _Atoms) -> list[Group]:
    """Groups of queries that see the same keys, by these keys. As no two segments have a pair in common, the keys of
    the next atom of queries are those of the last one, but for segments that begin or end there.
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


def _as_segments(segments: Segments, q: _Atoms, k: _Atoms, found: Sequence[Group]) -> Segments:
    """Groups as segments without a mask."""
    area = np.array([segments.area[0]] * len(found))
    none = np.full(len(found), -1)
    return Segments(area, none, none, q.spans([mine for mine, _ in found]), k.spans([_atoms(its) for _, its in found]))


def _rectangles(groups: list[Group], sizes: Sequence[int]) -> Iterator[Group]:
    """Groups of queries, sorted by what they see, as rectangles. sizes: of atoms of keys, see `_Atoms.sizes`."""
    pending = [(groups, 0, sizes)]  # keys are moved down by so many atoms: small sets are quick to work with
    while pending:
        groups, shift, sizes = pending.pop()
        groups = [group for group in groups if group[1]]
        if not groups:
            continue
        common = reduce(and_, (its for _, its in groups))
        if common and 2 * _rows(common, sizes) >= max(_rows(its, sizes) for _, its in groups):
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
    """Groups that see keys in common, directly or through others, together; the part of the last group is the last."""
    parts: dict[int, tuple[int, list[Group]]] = {}  # by number: the keys and the groups of a part
    covered, into = 0, list(range(len(groups)))  # into: the part that took in each part
    owner = np.zeros(max(its.bit_length() for _, its in groups), dtype=np.int64)  # of atoms of keys: a part
    for number, group in enumerate(groups):
        every, some = group[1], [group]
        owner[_atoms(every & ~covered)] = number
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


def behind(segments: Segments) -> Segments:
    """Segments without a mask, and causal ones with the same queries, as one: the keys of the former come first, so
    that the window, which is aligned to the last key and unbounded to the left, hides none of them.

    >>> two = Segments(
    ...     np.array([0, 1]), np.array([-1, -1]), np.array([-1, 0]),
    ...     SegmentSpans.of_rows([(0, 4, 8), (1, 4, 8)]), SegmentSpans.of_rows([(0, 0, 2), (1, 4, 8)]),
    ... )
    >>> one = behind(two)
    >>> len(one), one.right.tolist(), list(one.q.rows()), list(one.k.rows())
    (1, [0], [(0, 4, 8)], [(0, 0, 2), (0, 4, 8)])
    """
    by_queries: dict[Rows, dict[bool, list[int]]] = {}
    queries = _rows_of(segments.q, len(segments))
    for n in np.flatnonzero(segments.left < 0).tolist():
        by_queries.setdefault(queries[n], {}).setdefault(bool(segments.right[n] >= 0), []).append(n)
    own = np.arange(len(segments))
    into = own.copy()
    for same in by_queries.values():
        if len(same.get(True, ())) == 1:
            into[same.get(False, [])] = same[True][0]
    kept = np.flatnonzero(into == own)
    number = np.searchsorted(kept, into[segments.k.segment])
    order = np.lexsort((segments.right[segments.k.segment], number))  # first those without a mask, whose right is -1
    keys = SegmentSpans(number[order], segments.k.start[order], segments.k.stop[order])
    return Segments(segments.area[kept], segments.left[kept], segments.right[kept], segments.take(kept).q, keys)


def apart(segments: Segments, most: float = math.inf) -> list[Segments] | None:
    """The segments in launches that have each row of queries once: large segments first, each in the first launch that
    has room. A row of keys may be there again, as long as all such rows are at most half as many as the queries: to
    gather them, and to add up their gradients, costs less than a launch does, which reads its queries and merges their
    results.

    Args:
        most: None is returned where it takes more launches.

    >>> q, k = [(0, 0, 4), (1, 4, 6), (2, 6, 8)], [(0, 0, 4), (1, 0, 4), (2, 4, 6)]  # two with the same keys
    >>> three = Segments(*np.array([[0, 1, 2], [-1] * 3, [-1] * 3]), *map(SegmentSpans.of_rows, (q, k)))
    >>> [len(launch) for launch in apart(three)]
    [2, 1]
    """
    atoms = _Atoms(segments.q), _Atoms(segments.k)
    mine, its = (_Uses(side, len(segments)) for side in atoms)
    size = atoms[1].rows
    rows = [spans.lengths(len(segments)) for spans in (segments.q, segments.k)]
    launches: list[_Room] = []
    for n in np.argsort(-rows[0] * rows[1], kind="stable").tolist():
        q, k, own = mine.of(n), its.of(n), int(rows[0][n])
        taken, met = mine.users(q), its.users(k)
        number = -1
        for number in _clear(taken, len(launches)):
            launch = launches[number]
            again = launch.again + (int(size[k][its.used(k, number)].sum()) if met >> number & 1 else 0)
            if 2 * again <= launch.rows + own:
                break
        else:
            number, again = len(launches), 0
            if number == most:
                return None
            launches.append(_Room())
        launch = launches[number]
        launch.again, launch.rows = again, launch.rows + own
        launch.segments.append(n)
        mine.add(q, number)
        its.add(k, number)
    return [segments.take(np.array(sorted(launch.segments))) for launch in launches]


@dataclass
class _Room:
    """A launch while it is filled: rows of queries, rows of keys that are there again, segments."""

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
    >>> layers(Segments(*np.array([[0, 1, 2], [-1] * 3, [-1] * 3]), *map(SegmentSpans.of_rows, (q, k)))).tolist()
    [0, 1, 0]
    """
    uses = _Uses(_Atoms(segments.k), len(segments))
    found: list[int] = []
    for n in range(len(segments)):
        keys = uses.of(n)
        taken = uses.users(keys)
        found.append((~taken & (taken + 1)).bit_length() - 1)
        uses.add(keys, found[-1])
    return np.array(found) if any(found) else None


class _Atoms:
    """Rows that are in the same spans, as one atom. A set of atoms is an integer, whose bit n is there for atom n."""

    def __init__(self, spans: SegmentSpans) -> None:
        self.given = spans
        self._edges = np.unique(np.concatenate([spans.start, spans.stop]))
        self.rows = np.diff(self._edges)  # of each
        first, last = (np.searchsorted(self._edges, x) for x in (spans.start, spans.stop))
        self.places: tuple[list[int], list[int]] = first.tolist(), last.tolist()  # of each span, in atoms

    @cached_property
    def sizes(self) -> list[int]:
        """The atoms whose number of rows has bit 0, those that have bit 1, ...: `_rows` counts with these."""
        planes = range(int(self.rows.max(initial=0)).bit_length())
        return [int.from_bytes(np.packbits(self.rows >> n & 1, bitorder="little").tobytes(), "little") for n in planes]

    def sets(self, segments: Segments) -> list[int]:
        """The atoms of each segment."""
        found = [0] * len(segments)
        for segment, begin, end in zip(self.given.segment.tolist(), *self.places, strict=True):
            found[segment] |= (1 << end) - (1 << begin)
        return found

    def spans(self, sets: Sequence[Sequence[int] | Column]) -> SegmentSpans:
        """The rows of each set, given as its atoms, as few spans."""
        count = np.array([len(atoms) for atoms in sets], dtype=np.int64)
        atom = np.concatenate([np.zeros(0, dtype=np.int64), *(np.sort(np.asarray(x, dtype=np.int64)) for x in sets)])
        segment = np.repeat(np.arange(len(sets)), count)
        begin, size = runs((segment[1:] != segment[:-1]) | (atom[1:] != atom[:-1] + 1), len(atom))
        return SegmentSpans(segment[begin], self._edges[atom[begin]], self._edges[atom[begin + size - 1] + 1])


class _Uses:
    """Which launches have each atom, as bits: 64 launches in a row of an array [rows, atoms]."""

    def __init__(self, atoms: _Atoms, count: int) -> None:
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
        """A launch has these too."""
        while launch // 64 >= len(self._bits):
            self._bits = np.concatenate([self._bits, np.zeros_like(self._bits)])
        self._bits[launch // 64, atoms] |= np.uint64(1 << launch % 64)


def _rows_of(spans: SegmentSpans, count: int) -> list[Rows]:
    """The rows of each of so many segments: its spans, sorted, those that touch as one."""
    order = np.lexsort((spans.start, spans.segment))
    segment, start, stop = spans.segment[order], spans.start[order], spans.stop[order]
    begin, size = runs((segment[1:] != segment[:-1]) | (start[1:] != stop[:-1]), len(segment))
    found: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for n, a, b in zip(segment[begin].tolist(), start[begin].tolist(), stop[begin + size - 1].tolist(), strict=True):
        found[n].append((a, b))
    return [tuple(rows) for rows in found]


def _rows(atoms: int, sizes: Sequence[int]) -> int:
    """The number of rows of a set."""
    return sum((atoms & plane).bit_count() << n for n, plane in enumerate(sizes))


def _atoms(atoms: int) -> Column:
    """The atoms of a set.

    >>> _atoms(0b1101).tolist()
    [0, 2, 3]
    """
    if not atoms:
        return np.zeros(0, dtype=np.int64)
    down = (atoms & -atoms).bit_length() - 1
    atoms >>= down
    packed = np.frombuffer(atoms.to_bytes(-(-atoms.bit_length() // 8), "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little")) + down
