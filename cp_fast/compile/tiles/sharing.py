"""Attention slices with common rows, as few segments in few launches.

A launch adds its results by rows, so no two of its segments may share a query row. They may share a key row only if the
gradients of keys are added layer by layer. Attention slices of one mask often share rows: the blocks before each block,
a prompt before its answers.

prepend_keys     the segment of a causal attention slice, with the earlier keys of its queries before its own.
split_disjoint   segments in launches with room.
layers           a launch's segments in groups whose gradients may be added at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from cp_fast.compile.pass_table import bit_of
from cp_fast.compile.tiles.atoms import Atoms, Uses
from cp_fast.compile.tiles.segments import LaunchSegments, SegmentSpans
from cp_fast.compile.tiles.windows import BandTiles
from cp_ref.schedules.table import Column, runs

__all__ = ["areas_meet", "layers", "prepend_keys", "split_disjoint"]

_PREPEND = bit_of("prepend_keys")

Rows = tuple[tuple[int, int], ...]


def areas_meet(tiles: BandTiles) -> bool:
    """Whether the queries, or the keys, of two attention slices may share rows: whether their ranges overlap."""
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


def prepend_keys(segments: LaunchSegments) -> LaunchSegments:
    """Merge segments without a mask and causal ones with the same queries. The keys of the former come first: the
    window is aligned to the last key and unbounded to the left, so it hides none of them.

    >>> two = LaunchSegments(
    ...     np.array([0, 1]), np.array([-1, -1]), np.array([-1, 0]), np.array([0, 0]),
    ...     SegmentSpans.of_rows([(0, 4, 8), (1, 4, 8)]), SegmentSpans.of_rows([(0, 0, 2), (1, 4, 8)]),
    ... )
    >>> one = prepend_keys(two)
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
    order = np.lexsort((segments.right[segments.k.segment], number))  # First those without a mask: their right is -1.
    keys = SegmentSpans(number[order], segments.k.start[order], segments.k.stop[order])
    gained = np.bincount(into, minlength=len(own))[kept] > 1
    found = segments.take(kept)
    return replace(found, made_by=np.where(gained, _PREPEND, found.made_by), k=keys)


def split_disjoint(
    segments: LaunchSegments, most: float = math.inf, *, keys_repeat: bool = False
) -> list[LaunchSegments] | None:
    """The segments in launches without repeated rows of queries: large segments first, each in the first launch with
    room. Rows of keys may repeat, up to half the number of queries. To gather them and add their gradients costs less
    than another launch: it would read its queries and merge their results.

    Args:
        most: the most launches; None is returned if more are needed.
        keys_repeat: whether any rows of keys may repeat: they cost nothing.

    >>> q, k = [(0, 0, 4), (1, 4, 6), (2, 6, 8)], [(0, 0, 4), (1, 0, 4), (2, 4, 6)]  # two with the same keys
    >>> three = LaunchSegments.of_rows(q, k)
    >>> [len(launch) for launch in split_disjoint(three)]
    [2, 1]
    """
    atoms = Atoms(segments.q), Atoms(segments.k)
    mine, its = (Uses(side, len(segments)) for side in atoms)
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
            if keys_repeat or 2 * again <= launch.rows + own:
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


def layers(segments: LaunchSegments) -> Column | None:
    """A number for each segment, from 0: those with the same number have no row of keys in common. None where no two
    have any.

    >>> q, k = [(0, 0, 4), (1, 4, 6), (2, 6, 8)], [(0, 0, 4), (1, 0, 4), (2, 4, 6)]
    >>> layers(LaunchSegments.of_rows(q, k)).tolist()
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


def _rows_of(spans: SegmentSpans, count: int) -> list[Rows]:
    """The rows of each of `count` segments: its spans, sorted, with touching ones joined."""
    order = np.lexsort((spans.start, spans.segment))
    segment, start, stop = spans.segment[order], spans.start[order], spans.stop[order]
    begin, size = runs((segment[1:] != segment[:-1]) | (start[1:] != stop[:-1]), len(segment))
    found: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for n, a, b in zip(segment[begin].tolist(), start[begin].tolist(), stop[begin + size - 1].tolist(), strict=True):
        found[n].append((a, b))
    return [tuple(rows) for rows in found]
