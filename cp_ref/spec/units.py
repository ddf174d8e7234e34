"""Who sees which keys of whom: the one question that every schedule is planned from.

A unit is what takes one place in a ring: a rank, or, where heads are exchanged inside groups of `a2a_size` ranks, such
a group, whose ranks then hold the rows of all of them for some of the heads. Under dual_chunk the rows of a group are
again a dual chunk:

    cp_size 4, a2a_size 2:    chunk   0 1 2 3 4 5 6 7
                              rank    0 1 2 3 3 2 1 0
                              unit    0 0 1 1 1 1 0 0
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cp_ref.spec.areas import UNBOUNDED, crop
from cp_ref.spec.ownership import Fragments, grouped
from cp_ref.spec.table import Column, Table, joined
from cp_ref.spec.workload import Workload

__all__ = ["Sights", "Spans", "Units", "spans_by"]


@dataclass(frozen=True, eq=False)
class Sights(Table):
    """Cropped rectangles of areas in which units see each other: one for each fragment of queries and of keys."""

    reader: Column  # the unit that has the queries
    owner: Column  # the unit that has the keys
    area: Column
    q_start: Column
    q_stop: Column
    k_start: Column
    k_stop: Column


class Units:
    """The units of a workload, their rows, and what they see of each other."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.areas, self.size = workload, workload.areas, workload.a2a_size
        self.count = workload.cp_size // self.size

    @cached_property
    def queries(self) -> Fragments:
        """The rows of the units' queries, sorted by global row; `rank` is the unit."""
        return self._rows("q")

    @cached_property
    def keys(self) -> Fragments:
        """The rows of the units' keys, sorted by global row; `rank` is the unit."""
        return self.queries if self.workload.ownership.kv is self.workload.ownership.q else self._rows("kv")

    def _rows(self, side: str) -> Fragments:
        fragments = self.workload.ownership.side(side)
        return (fragments if self.size == 1 else grouped(fragments, self.size)).sorted()

    @cached_property
    def sparse(self) -> bool:
        """Whether units see little of most others: an area is bounded on both sides, or lies on some units alone, so
        that a ring would carry its keys by units that see none of them.
        """
        windowed = (self.areas.lo > -UNBOUNDED) & (self.areas.hi < UNBOUNDED)
        return bool(windowed.any()) or self._on_some_units

    @property
    def _on_some_units(self) -> bool:
        """Whether an area has rows on several units, but not on all."""
        areas, holds = self.areas, np.zeros((len(self.areas), self.count), dtype=bool)
        for start, stop, rows in (
            (areas.q_start, areas.q_stop, self.queries),
            (areas.k_start, areas.k_stop, self.keys),
        ):
            area, n = joined(start, stop, rows.start, rows.stop)
            holds[area, rows.rank[n]] = True
        units = holds.sum(axis=1)
        return bool(((units > 1) & (units < self.count)).any())

    def sees(self, unit: int) -> Sights:
        """The rectangles in which the queries of one unit see keys, of any unit."""
        return self._sights(self.queries.take(self.queries.rank == unit), self.keys)

    def seen(self, unit: int) -> Sights:
        """The rectangles in which queries, of any unit, see the keys of one unit."""
        return self._sights(self.queries, self.keys.take(self.keys.rank == unit))

    @cached_property
    def key_areas(self) -> KeyAreas:
        """Who owns which key rows of each area."""
        areas, keys = self.areas, self.keys
        area, k = joined(areas.k_start, areas.k_stop, keys.start, keys.stop)
        start, stop = np.maximum(areas.k_start[area], keys.start[k]), np.minimum(areas.k_stop[area], keys.stop[k])
        return KeyAreas(area, keys.rank[k], start, stop)

    def needed(self, group: Column, readers: Column, last: Column) -> Spans:
        """Of all key rows those that some units see, by group: of row n of `key_areas`, which belongs to `group[n]`,
        what lies between the first and the last key that any of the units readers[0] ... readers[last[n]] sees in its
        area. Groups below 1 and from the number of units on are left out.
        """
        keys, first_key, behind_last_key = self.key_areas, *self._seen_by_each
        last = np.clip(last, 0, self.count - 1)
        start, stop = (
            keys.start,
            np.minimum(keys.stop, np.maximum.accumulate(behind_last_key[:, readers], axis=1)[keys.area, last]),
        )
        if first_key is not None:
            start = np.maximum(start, np.minimum.accumulate(first_key[:, readers], axis=1)[keys.area, last])
        some = np.flatnonzero((start < stop) & (group > 0) & (group < self.count))
        return spans_by(group[some], start[some], stop[some])

    @cached_property
    def _seen_by_each(self) -> tuple[Column | None, Column]:
        """(first key that a unit sees in an area, the one behind the last), [areas, units]; (far, -far) for none. The
        first is None where every area is seen from its first key on.
        """
        areas, far = self.areas, 2 * UNBOUNDED
        behind = np.full((len(areas), self.count), -far, dtype=np.int64)
        area, q = joined(areas.q_start, areas.q_stop, self.queries.start, self.queries.stop)
        unit = self.queries.rank[q]
        cell = area * self.count + unit
        np.maximum.at(behind.ravel(), cell, np.minimum(areas.q_stop[area], self.queries.stop[q]) + areas.hi[area])
        if bool((areas.lo <= -UNBOUNDED).all()):
            return None, behind
        first = np.full_like(behind, far)
        np.minimum.at(first.ravel(), cell, np.maximum(areas.q_start[area], self.queries.start[q]) + areas.lo[area])
        return first, behind

    def _sights(self, queries: Fragments, keys: Fragments) -> Sights:
        areas = self.areas
        area, q = joined(areas.q_start, areas.q_stop, queries.start, queries.stop)
        q0, q1 = np.maximum(areas.q_start[area], queries.start[q]), np.minimum(areas.q_stop[area], queries.stop[q])
        k0 = np.maximum(areas.k_start[area], q0 + areas.lo[area])  # what these rows see lies between the two
        k1 = np.minimum(areas.k_stop[area], q1 + areas.hi[area])
        n, k = joined(k0, k1, keys.start, keys.stop)
        area, reader = area[n], queries.rank[q][n]
        k0, k1 = np.maximum(k0[n], keys.start[k]), np.minimum(k1[n], keys.stop[k])
        q0, q1, k0, k1 = crop(q0[n], q1[n], k0, k1, areas.lo[area], areas.hi[area])
        found = Sights(reader, keys.rank[k], area, q0, q1, k0, k1)
        there = (q0 < q1) & (k0 < k1)
        return found if there.all() else found.take(there)


@dataclass(frozen=True, eq=False)
class KeyAreas(Table):
    """Key rows [start, stop) of an area that one unit owns."""

    area: Column
    owner: Column
    start: Column
    stop: Column


class Spans(NamedTuple):
    """Spans of rows by group: those of group g are number `ends[g]` to `ends[g + 1]`."""

    start: Column
    stop: Column
    ends: Column

    def of(self, group: int) -> tuple[Column, Column]:
        """(start, stop) of one group's spans, sorted and disjoint."""
        if not 0 <= group < len(self.ends) - 1:
            return self.start[:0], self.stop[:0]
        here = slice(int(self.ends[group]), int(self.ends[group + 1]))
        return self.start[here], self.stop[here]


def spans_by(group: Column, start: Column, stop: Column) -> Spans:
    """The rows of each group as few spans.

    >>> spans = spans_by(np.array([0, 0, 2, 0]), np.array([4, 0, 2, 6]), np.array([8, 4, 3, 9]))
    >>> [[x.tolist() for x in spans.of(group)] for group in range(3)]
    [[[0], [9]], [[], []], [[2], [3]]]
    """
    if not bool((group[1:] >= group[:-1]).all()):
        order = np.argsort(group.astype(np.int16), kind="stable")  # sorts by counting
        group, start, stop = group[order], start[order], stop[order]
    meets = (group[1:] == group[:-1]) & (start[1:] <= stop[:-1])
    if meets.any():
        group, start, stop = _merged(group, start, stop)
    largest = int(group[-1]) if len(group) else -1
    return Spans(start, stop, np.searchsorted(group, np.arange(largest + 2)))


def _merged(group: Column, start: Column, stop: Column) -> tuple[Column, Column, Column]:
    """Spans, sorted by group, with those of a group that meet as one; sorted by group and start."""
    side_by_side = group * (int(stop.max()) + 1)  # groups on one axis, with a gap between them
    first, last = start + side_by_side, stop + side_by_side
    if not bool((first[1:] >= first[:-1]).all()):
        order = np.argsort(first, kind="stable")
        group, start, first, last = group[order], start[order], first[order], last[order]
    reach = np.maximum.accumulate(last)
    new = np.append(True, first[1:] > reach[:-1])
    end = reach[np.append(new[1:], True)] - first[new] + start[new]
    return group[new], start[new], end
