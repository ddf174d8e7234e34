"""Who sees which keys of whom, by ring member: every schedule is planned from this.

Planners ask `Visibility` for

    sees, seen          the rectangles in which one ring member's queries see keys, or its keys are seen
    whole_tiles         the tiles of one ring member's queries with all keys that they see, whoever has them
    gathers             the parts of these whose keys others have
    rows_seen_by        one ring member's key rows that some others see: what has to travel
    sends_directly      whether keys go straight to those that see them, and not round the ring
    rows_lent           how many rows then go from one to another at the most
    arriving            how many rows each ring member gets, and what it computes without them
    at_home, exchanged  the same for some areas alone: those that one rank can attend to by itself, and all others

A ring member takes one place in a ring. (All_gather has no ring; its ring members are the ranks.) It is a rank, or a
group of `a2a_size` ranks where these exchange heads: each of them then holds the rows of the whole group for some of
the heads. Under dual_chunk the rows of a group are two chunks again:

    cp_size 4, a2a_size 2:    chunk          0 1 2 3 4 5 6 7
                              rank           0 1 2 3 3 2 1 0
                              ring member    0 0 1 1 1 1 0 0
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cp_ref.schedules.areas import UNBOUNDED, Areas, crop, pairs
from cp_ref.schedules.ownership import Fragments, grouped
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import Heads, Tiles
from cp_ref.schedules.table import Column, Spans, Table, constant, in_blocks, ordered_by, starts_of

__all__ = [
    "ROW_PAIRS",
    "SeenTiles",
    "Visibility",
    "spans_by",
]


@dataclass(frozen=True, eq=False)
class SeenTiles(Table):
    """Cropped rectangles of areas in which two ring members see each other: one for each fragment of queries and of
    keys.
    """

    peer: Column  # The other ring member: the keys' in `sees`, the queries' in `seen`.
    area: Column
    q_start: Column
    q_stop: Column
    k_start: Column
    k_stop: Column

    def tiles(self, heads: Heads) -> Tiles:
        """The rectangles as tiles, for these query heads."""
        edges = (constant(head, self.area) for head in heads)
        return Tiles(self.area, self.q_start, self.q_stop, self.k_start, self.k_stop, *edges)

    @property
    def queries(self) -> Spans:
        """The rows of queries."""
        return Spans(self.q_start, self.q_stop)

    @property
    def keys(self) -> Spans:
        """The rows of keys."""
        return Spans(self.k_start, self.k_stop)


@dataclass(frozen=True, eq=False)
class OwnedRows(Table):
    """Rows [start, stop) of an area, queries or keys, that one ring member has."""

    area: Column
    member: Column
    start: Column
    stop: Column

    @staticmethod
    def of(spans: Spans, rows: Fragments) -> OwnedRows:
        """The owners of the rows of each area; `rows` are sorted by global row."""
        area, n, first, last = spans.overlaps(rows.spans)
        return OwnedRows(area, rows.rank[n], first, last)


ROW_PAIRS = 1000  # Attention to this number of keys takes about the time of a row's exchange (two H100s, both passes).
_LEAST_SAVED_AT_HOME = 0.03  # Of the time, by areas that stay at home: their launch takes some time, too.
_MOST_LIMITS = 256  # Of those compared. Each limits the pairs that ranks keep at home.
_MOST_BOUNDS = 4  # One rank of a ring asks for this many tables of `KeyBounds`. They are large.


class KeyBounds(NamedTuple):
    """The keys that ring members see of each area, [ring members, areas]: the first, and the one after the last.
    Without `start`, every area is seen from its first key on.
    """

    start: Column | None
    stop: Column


class Visibility:
    """Which keys the ring members of a workload see of each other, and the rows that each one has.

    Args:
        some: the numbers of the areas that count, sorted; all of them if left out.
        key_block: the keys of `whole_tiles` begin at a multiple of so many rows of their area. A kernel whose blocks of
            keys fill so many rows then meets the same blocks as in attention to the whole area.
    """

    def __init__(self, workload: Workload, some: Column | None = None, *, key_block: int = 1) -> None:
        self.workload, self.a2a_size, self.some, self.key_block = workload, workload.a2a_size, some, key_block
        self.areas = workload.areas if some is None else workload.areas.take(some)
        self.member_count = workload.cp_size // self.a2a_size
        self._bounds: dict[tuple[int, int], KeyBounds] = {}

    def sees(self, member: int, bucket_of: Column) -> list[SeenTiles]:
        """The rectangles in which the queries of one ring member see keys, sorted into buckets by the ring member that
        has the keys: a table for bucket 0, for bucket 1, ...; `bucket_of[n]` is the bucket of ring member n.
        """
        found = _seen_tiles(self.areas, self.queries.take(self.queries.rank == member), self.keys, bucket_of)
        return found if self.some is None else [replace(tiles, area=self.some[tiles.area]) for tiles in found]

    def seen(self, member: int, bucket_of: Column) -> list[SeenTiles]:
        """The rectangles in which queries see the keys of one ring member, sorted into buckets by the ring member that
        has the queries.
        """
        a, own = self.areas, self.keys.take(self.keys.rank == member)
        transposed = Areas(a.k_start, a.k_stop, a.q_start, a.q_stop, -a.hi, -a.lo)
        found = _seen_tiles(transposed, own, self.queries, bucket_of)
        return [SeenTiles(s.peer, s.area, s.k_start, s.k_stop, s.q_start, s.q_stop) for s in found]

    def whole_tiles(self, member: int, heads: Heads) -> Tiles:
        """One ring member's queries with all keys that they see, whoever has them, as tiles for these query heads: one
        for each area and each consecutive span of its rows.
        """
        found = self._whole_tiles
        return found.take(found.peer == member).tiles(heads)

    def gathers(self, member: int) -> tuple[SeenTiles, SeenTiles]:
        """The parts of one ring member's `whole_tiles` whose keys others have, and the parts of those of others whose
        keys it has; `peer` is the other one.
        """
        tiles, keys = self._whole_tiles, self.keys
        own, others = tiles.take(tiles.peer == member), tiles.take(tiles.peer != member)
        theirs, mine = keys.take(keys.rank != member), keys.take(keys.rank == member)
        n, owner, *k = own.keys.overlaps(theirs.spans)
        found = own.take(n)
        received = SeenTiles(theirs.rank[owner], found.area, found.q_start, found.q_stop, *k)
        n, _, *k = others.keys.overlaps(mine.spans)
        found = others.take(n)
        return received, SeenTiles(found.peer, found.area, found.q_start, found.q_stop, *k)

    def rows_seen_by(self, owner: int, members: range) -> Spans:
        """The key rows of one ring member that some others see: in each area all rows from the first to the last key
        seen. (Rows in between travel too, if nobody sees them.) Ring members are counted modulo their number. Calls
        share the work if their ranges differ in length alone.
        """
        bounds, last = self._bounds_from(members.start % self.member_count, members.step), len(members) - 1
        rows = self._key_rows_of[owner % self.member_count]
        start, stop = rows.start, np.minimum(rows.stop, bounds.stop[last][rows.area])
        if bounds.start is not None:
            start = np.maximum(start, bounds.start[last][rows.area])
        some = start < stop
        return (Spans(start, stop) if some.all() else Spans(start[some], stop[some])).merged()

    @cached_property
    def sends_directly(self) -> bool:
        """Whether keys go straight from their owner to those that see them. That is so where ring members see little of
        most others: an area is bounded on both sides, or lies on some ring members alone. A ring would carry its keys
        past ring members that see none of them.
        """
        if bool(((self.areas.lo > -UNBOUNDED) & (self.areas.hi < UNBOUNDED)).any()):
            return True
        queries, keys = self._rows_held
        members = ((queries > 0) | (keys > 0)).sum(axis=0)
        return bool(((members > 1) & (members < self.member_count)).any())

    @property
    def rows_lent(self) -> Column:
        """An upper bound of the key rows of each ring member that each other one sees, [owner, reader]. It counts all
        rows of the owner in areas in which the reader has queries.
        """
        queries, keys = self._rows_held
        return keys @ (queries > 0).T

    @property
    def arriving(self) -> tuple[Column, Column]:
        """For each ring member, the key rows that it sees of others, and the visible pairs in areas of which it sees
        its own keys alone. Rows that it sees in several areas count more than once.
        """
        areas, (start, stop) = self.areas, self._bounds_of_each
        first = areas.k_start[None] if start is None else np.maximum(start, areas.k_start)
        first, last = np.broadcast_arrays(first, np.minimum(stop, areas.k_stop))
        rows, seen = self.key_rows, np.zeros((self.member_count, *first.shape), dtype=np.int64)
        for member in range(self.member_count):
            size = np.minimum(rows.stop, last[member, rows.area]) - np.maximum(rows.start, first[member, rows.area])
            np.add.at(seen[member], (rows.member, rows.area), np.maximum(size, 0))
        everybody = np.arange(self.member_count)
        all_rows, own = seen.sum(axis=1), seen[everybody, everybody]
        q, computed = self.query_rows, np.zeros(first.shape, dtype=np.int64)
        band = areas.k_start[q.area], areas.k_stop[q.area], areas.lo[q.area], areas.hi[q.area]
        np.add.at(computed, (q.member, q.area), pairs(q.start, q.stop, *band))
        return (all_rows - own).sum(axis=1), np.where(all_rows == own, computed, 0).sum(axis=1)

    @cached_property
    def at_home(self) -> Visibility:
        """The ranks as ring members, for the areas that need no exchange of heads."""
        return Visibility(replace(self.workload, a2a_size=1), np.flatnonzero(self._stays_home))

    @cached_property
    def exchanged(self) -> Visibility:
        """The same ring members, for all other areas."""
        return Visibility(self.workload, np.flatnonzero(~self._stays_home)) if self._stays_home.any() else self

    # ---- how it is found: whole columns at a time

    @cached_property
    def _stays_home(self) -> Column:
        """Whether each area stays at home: one rank has all its rows, and they are in no area that is exchanged. Each
        rank keeps its smallest areas, up to a limit on their pairs. The limit is the one of the least time: more areas
        at home are fewer rows to exchange, but their pairs are not shared equally.
        """
        areas, owned, ranks = self.areas, self.workload.ownership, range(self.workload.cp_size)
        rank, stays = _only_owner(areas.queries, owned.q)
        if owned.kv is not owned.q or not all(map(np.array_equal, areas.queries, areas.keys)):
            other, too = _only_owner(areas.keys, owned.kv)
            stays &= too & (rank == other)
        stays = _separate(areas, stays)
        if not stays.any():
            return stays
        work, rows = areas.pairs, np.bincount(owned.q.rank, owned.q.stop - owned.q.start, minlength=len(ranks))
        of_rank = [np.flatnonzero(stays & (rank == n)) for n in ranks]
        of_rank = [some[np.argsort(work[some], kind="stable")] for some in of_rank]  # the smallest first
        sums = [starts_of(work[some]) for some in of_rank]
        limits = np.unique(np.concatenate(sums))
        limits = limits[:: -(-len(limits) // _MOST_LIMITS)]
        counts = [np.searchsorted(total, limits, side="right") - 1 for total in sums]  # [limits], of each rank
        home_work = np.stack([total[n] for total, n in zip(sums, counts, strict=True)])
        left = np.stack([rows[r] - starts_of(areas.queries.size[of_rank[r]])[counts[r]] for r in ranks])
        times = home_work.max(0) + (work.sum() - home_work.sum(0)) / len(ranks) + ROW_PAIRS * left.max(0)
        best = int(times.argmin())
        if times[best] > (1 - _LEAST_SAVED_AT_HOME) * times[0]:
            return np.zeros_like(stays)
        for some, n in zip(of_rank, counts, strict=True):
            stays[some[n[best] :]] = False
        return _separate(areas, stays)

    @cached_property
    def _whole_tiles(self) -> SeenTiles:
        """`whole_tiles` of all ring members; `peer` has the queries."""
        a, q = self.areas, self.queries
        apart = np.append(True, (q.rank[1:] != q.rank[:-1]) | (q.start[1:] != q.stop[:-1]))[: len(q)]
        begin = np.flatnonzero(apart)
        area, n, q_start, q_stop = a.queries.overlaps(Spans(q.start[begin], q.stop[np.append(begin, len(q))[1:] - 1]))
        first = a.k_start[area]
        q0, q1, k0, k1 = crop(q_start, q_stop, first, a.k_stop[area], a.lo[area], a.hi[area])
        there = (q0 < q1) & (k0 < k1)
        numbers = area if self.some is None else self.some[area]
        found = SeenTiles(q.rank[begin][n], numbers, q0, q1, k0 - (k0 - first) % self.key_block, k1)
        return found if there.all() else found.take(there)

    @cached_property
    def queries(self) -> Fragments:
        """The rows of the ring members' queries, sorted by global row; `rank` is the ring member."""
        return self._rows("q")

    @cached_property
    def keys(self) -> Fragments:
        """The rows of the ring members' keys, sorted by global row; `rank` is the ring member."""
        return self.queries if self.workload.ownership.kv is self.workload.ownership.q else self._rows("kv")

    def _rows(self, side: str) -> Fragments:
        fragments = self.workload.ownership.side(side)
        return (fragments if self.a2a_size == 1 else grouped(fragments, self.a2a_size)).sorted()

    @cached_property
    def _rows_held(self) -> tuple[Column, Column]:
        """How many query rows and how many key rows each ring member has of each area, [ring members, areas]."""
        shape = self.member_count, len(self.areas)

        def count(rows: OwnedRows) -> Column:
            cells = rows.member * shape[1] + rows.area
            return np.bincount(cells, rows.stop - rows.start, shape[0] * shape[1]).astype(np.int64).reshape(shape)

        queries = count(self.query_rows)
        return queries, queries if self.key_rows is self.query_rows else count(self.key_rows)

    @cached_property
    def query_rows(self) -> OwnedRows:
        """The owners of the query rows of each area."""
        return OwnedRows.of(self.areas.queries, self.queries)

    @cached_property
    def key_rows(self) -> OwnedRows:
        """The owners of the key rows of each area."""
        a = self.areas
        if self.keys is self.queries and np.array_equal(a.q_start, a.k_start) and np.array_equal(a.q_stop, a.k_stop):
            return self.query_rows
        return OwnedRows.of(a.keys, self.keys)

    @cached_property
    def _key_rows_of(self) -> list[OwnedRows]:
        """The key rows of each area that each ring member has."""
        order, ends = ordered_by(self.key_rows.member, self.member_count)
        rows = self.key_rows.take(order)
        return [rows.take(slice(a, b)) for a, b in pairwise(ends)]

    def _bounds_from(self, first: int, way: int) -> KeyBounds:
        """The keys that this ring member sees, it and the next one this way together, they and the one after, ..."""
        if (first, way) not in self._bounds:
            start, stop = self._bounds_of_each
            members = np.arange(first, first + way * self.member_count, way) % self.member_count
            if len(self._bounds) == _MOST_BOUNDS:
                del self._bounds[next(iter(self._bounds))]
            self._bounds[first, way] = KeyBounds(
                None if start is None else np.minimum.accumulate(start[members]), np.maximum.accumulate(stop[members])
            )
        return self._bounds[first, way]

    @cached_property
    def _bounds_of_each(self) -> KeyBounds:
        """The keys that each ring member sees alone."""
        areas, rows, far = self.areas, self.query_rows, 2 * UNBOUNDED
        cell = rows.member * len(areas) + rows.area
        stop = np.full((self.member_count, len(areas)), -far, dtype=np.int64)
        np.maximum.at(stop.ravel(), cell, rows.stop + areas.hi[rows.area])
        if bool((areas.lo <= -UNBOUNDED).all()):
            return KeyBounds(None, stop)
        start = np.full_like(stop, far)
        np.minimum.at(start.ravel(), cell, rows.start + areas.lo[rows.area])
        return KeyBounds(start, stop)


def _only_owner(spans: Spans, rows: Fragments) -> tuple[Column, Column]:
    """The rank that owns the first row of each span, and whether it owns all rows."""
    rows = rows.sorted()
    changes = np.append(0, np.cumsum(rows.rank[1:] != rows.rank[:-1]))
    first, last = (np.searchsorted(rows.start, n, side="right") - 1 for n in (spans.start, spans.stop - 1))
    return rows.rank[first], changes[first] == changes[last]


def _separate(areas: Areas, some: Column) -> Column:
    """Which of some areas share no row with one of the others."""
    while some.any():
        others = areas.take(~some)
        meets = np.zeros(len(some), dtype=bool)
        meets[areas.queries.meeting(others.queries.merged())[0]] = True
        meets[areas.keys.meeting(others.keys.merged())[0]] = True
        if not (some & meets).any():
            break
        some = some & ~meets
    return some


def _seen_tiles(areas: Areas, queries: Fragments, keys: Fragments, bucket_of: Column) -> list[SeenTiles]:
    """The rectangles in which these queries see these keys, by bucket of the ring member that has the keys."""
    area, _, q0, q1 = areas.queries.overlaps(queries.spans)
    lo, hi = areas.lo[area], areas.hi[area]
    k0, k1 = np.maximum(areas.k_start[area], q0 + lo), np.minimum(areas.k_stop[area], q1 + hi)  # the keys that they see
    n, k = Spans(k0, k1).meeting(keys.spans)
    peer, count = keys.rank[k], int(bucket_of.max()) + 1
    order, ends = ordered_by(bucket_of[peer], count)
    n, k, peer = n[order], k[order], peer[order]

    def rectangles(n: Column, k: Column) -> tuple[Column, ...]:
        start, stop = np.maximum(k0[n], keys.start[k]), np.minimum(k1[n], keys.stop[k])
        return area[n], *crop(q0[n], q1[n], start, stop, lo[n], hi[n])

    found = SeenTiles(peer, *in_blocks(rectangles)(n, k))
    there = (found.q_start < found.q_stop) & (found.k_start < found.k_stop)
    if not there.all():
        found = found.take(there)
        _, ends = ordered_by(bucket_of[found.peer], count)
    return [found.take(slice(a, b)) for a, b in pairwise(ends)]


def spans_by(bucket: Column, spans: Spans, count: int) -> list[Spans]:
    """The rows of buckets 0 to count - 1, each as few spans; span n is in bucket[n].

    >>> spans = spans_by(np.array([0, 0, 2, 0]), Spans(np.array([4, 0, 2, 6]), np.array([8, 4, 3, 9])), 3)
    >>> [[x.tolist() for x in own] for own in spans]
    [[[0], [9]], [[], []], [[2], [3]]]
    """
    order, ends = ordered_by(bucket, count)
    start, stop = spans.start[order], spans.stop[order]
    return [Spans(start[a:b], stop[a:b]).merged() for a, b in pairwise(ends)]
