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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import and_, or_

import numpy as np

from cp_fast.compile.tiles.joins import Segments, SegmentSpans
from cp_fast.compile.tiles.windows import BandTiles
from cp_ref.spec import Column
from cp_ref.spec.table import runs

__all__ = ["alike", "apart", "areas_meet", "behind", "layers", "staircases"]

Group = tuple[int, int]  # queries and keys, each a set of atoms: bit n is there for atom n


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
    return _as_rectangles(segments, _rectangles)


def alike(segments: Segments) -> Segments:
    """Segments without a mask as one for all queries that see the same keys.

    >>> q, k = [(0, 1, 2), (1, 1, 2), (2, 2, 3)], [(0, 0, 1), (1, 1, 2), (2, 0, 2)]
    >>> found = alike(Segments(*np.array([[0, 1, 2], [-1] * 3, [-1] * 3]), *map(SegmentSpans.of_rows, (q, k))))
    >>> list(found.q.rows()), list(found.k.rows())
    ([(0, 1, 3)], [(0, 0, 2)])
    """
    return _as_rectangles(segments, lambda groups, _: groups)


def _as_rectangles(
    segments: Segments, cut: Callable[[Sequence[Group], Callable[[int], int]], Iterable[Group]]
) -> Segments:
    """What `cut` makes of the groups of queries that see the same keys, and of a function from keys to their number."""
    q, k = _Atoms(segments.q), _Atoms(segments.k)
    queries, keys = q.sets(segments), k.sets(segments)
    seen: dict[int, int] = {}  # by atom of queries, the keys
    for mine, its in zip(queries, keys, strict=True):
        for atom in _members(mine):
            seen[atom] = seen.get(atom, 0) | its
    groups = [
        (reduce(or_, (1 << atom for atom, _ in some)), its)
        for its, some in groupby(sorted(seen.items(), key=lambda item: item[1]), key=lambda item: item[1])
    ]
    found = list(cut(groups, k.rows))
    area = np.array([segments.area[0]] * len(found))
    none = np.full(len(found), -1)
    return Segments(area, none, none, q.spans([mine for mine, _ in found]), k.spans([its for _, its in found]))


def _rectangles(groups: Sequence[Group], rows: Callable[[int], int]) -> Iterator[Group]:
    """Groups of queries, sorted by what they see, as rectangles. rows: the number of rows of a set of keys."""
    groups = [group for group in groups if group[1]]
    if not groups:
        return
    common = reduce(and_, (its for _, its in groups))
    if 2 * rows(common) >= max(rows(its) for _, its in groups):
        yield reduce(or_, (mine for mine, _ in groups)), common
        yield from _rectangles([(mine, its & ~common) for mine, its in groups], rows)
        return
    parts = _components(groups)
    if len(parts) == 1:
        parts = [groups[len(groups) // 2 :], groups[: len(groups) // 2]]
    for part in parts:
        yield from _rectangles(part, rows)


def _components(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that see keys in common, directly or through others, together."""
    parts: list[tuple[int, list[Group]]] = []
    for group in groups:
        meets = [part for part in parts if part[0] & group[1]]
        parts = [part for part in parts if not part[0] & group[1]]
        its = reduce(or_, (part[0] for part in meets), group[1])
        parts.append((its, [*(one for part in meets for one in part[1]), group]))
    return [sorted(part, key=lambda group: group[1]) for _, part in parts]


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
    by_queries: dict[int, dict[bool, list[int]]] = {}
    queries = _Atoms(segments.q).sets(segments)
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


def apart(segments: Segments) -> list[Segments]:
    """The segments in launches that have each row of queries once: large segments first, each in the first launch that
    has room. A row of keys may be there again, as long as all such rows are at most half as many as the queries: to
    gather them, and to add up their gradients, costs less than a launch does, which reads its queries and merges their
    results.

    >>> q, k = [(0, 0, 4), (1, 4, 6), (2, 6, 8)], [(0, 0, 4), (1, 0, 4), (2, 4, 6)]  # two with the same keys
    >>> three = Segments(*np.array([[0, 1, 2], [-1] * 3, [-1] * 3]), *map(SegmentSpans.of_rows, (q, k)))
    >>> [len(launch) for launch in apart(three)]
    [2, 1]
    """
    atoms = _Atoms(segments.q), _Atoms(segments.k)
    sides = [of_side.sets(segments) for of_side in atoms]
    rows = [spans.lengths(len(segments)) for spans in (segments.q, segments.k)]
    launches: list[_Room] = []
    for n in np.argsort(-rows[0] * rows[1], kind="stable").tolist():
        q, k = sides[0][n], sides[1][n]
        for launch in launches:
            again = launch.again + (atoms[1].rows(launch.keys & k) if launch.keys & k else 0)
            if not launch.queries & q and 2 * again <= launch.rows + int(rows[0][n]):
                break
        else:
            launch, again = _Room(), 0
            launches.append(launch)
        launch.queries, launch.keys, launch.again = launch.queries | q, launch.keys | k, again
        launch.rows += int(rows[0][n])
        launch.segments.append(n)
    return [segments.take(np.array(sorted(launch.segments))) for launch in launches]


@dataclass
class _Room:
    """A launch while it is filled: sets of atoms, rows of queries, rows of keys that are there again, segments."""

    queries: int = 0
    keys: int = 0
    rows: int = 0
    again: int = 0
    segments: list[int] = field(default_factory=list)


def layers(segments: Segments) -> Column | None:
    """A number for each segment, from 0: those with the same number have no row of keys in common. None where no two
    have any.

    >>> q, k = [(0, 0, 4), (1, 4, 6), (2, 6, 8)], [(0, 0, 4), (1, 0, 4), (2, 4, 6)]
    >>> layers(Segments(*np.array([[0, 1, 2], [-1] * 3, [-1] * 3]), *map(SegmentSpans.of_rows, (q, k)))).tolist()
    [0, 1, 0]
    """
    taken: list[int] = []
    found: list[int] = []
    for keys in _Atoms(segments.k).sets(segments):
        layer = next((n for n, its in enumerate(taken) if not its & keys), len(taken))
        taken[layer : layer + 1] = [(taken[layer] if layer < len(taken) else 0) | keys]
        found.append(layer)
    return np.array(found) if len(taken) > 1 else None


class _Atoms:
    """Rows that are in the same spans, as one bit of a set."""

    def __init__(self, spans: SegmentSpans) -> None:
        self._given = spans
        self._edges = np.unique(np.concatenate([spans.start, spans.stop]))

    def sets(self, segments: Segments) -> list[int]:
        """The atoms of each segment."""
        first, last = (np.searchsorted(self._edges, x).tolist() for x in (self._given.start, self._given.stop))
        found = [0] * len(segments)
        for segment, begin, end in zip(self._given.segment.tolist(), first, last, strict=True):
            found[segment] |= (1 << end) - (1 << begin)
        return found

    def rows(self, atoms: int) -> int:
        """The number of rows of a set."""
        return sum(int(self._edges[end] - self._edges[begin]) for begin, end in _runs(atoms))

    def spans(self, sets: Iterable[int]) -> SegmentSpans:
        """The rows of each set as few spans."""
        rows = [
            (n, int(self._edges[begin]), int(self._edges[end]))
            for n, atoms in enumerate(sets)
            for begin, end in _runs(atoms)
        ]
        return SegmentSpans.of_rows(rows)


def _members(atoms: int) -> Iterator[int]:
    for begin, end in _runs(atoms):
        yield from range(begin, end)


def _runs(atoms: int) -> Iterator[tuple[int, int]]:
    """The bits that are set, as runs [begin, end).

    >>> list(_runs(0b1101))
    [(0, 1), (2, 4)]
    """
    begin = 0
    while atoms:
        skipped = (atoms & -atoms).bit_length() - 1
        begin, atoms = begin + skipped, atoms >> skipped
        size = (~atoms & (atoms + 1)).bit_length() - 1
        yield begin, begin + size
        begin, atoms = begin + size, atoms >> size
