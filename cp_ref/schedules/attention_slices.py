"""Attention slices: who may see whom. The first of the three tables (attention slices, ownership, schedule).

An attention slice is a rectangle of the global score matrix, crossed by a diagonal band. Its rows are rows of the
packed global q buffer, its columns rows of the packed global k buffer (padding included, sequence after sequence). So
every format, mask, window, alignment and padding is just a maker of attention slices:

    visible(i, j)  iff  q_start <= i < q_stop  and  k_start <= j < k_stop  and  lo <= j - i <= hi

    two causal sequences, 3 and 2 tokens         the same with 3 and 2 tokens in 4 and 2 slots
          j 0 1 2 3 4                                  j 0 1 2 3 4 5
        i 0 x . . . .       area q[0:3] k[0:3]       i 0 x . . . . .       area q[0:3] k[0:3]
          1 x x . . .       band *:0                   1 x x . . . .       band *:0
          2 x x x . .       area q[3:5] k[3:5]         2 x x x . . .       area q[4:6] k[4:6]
          3 . . . x .       band *:0                   3 . . . . . .       band *:0
          4 . . . x x                                  4 . . . . x .
                                                       5 . . . . x x

Attention slices are disjoint as sets of pairs. The text of an attention slice, which reads back, has "*" for an edge
without a bound.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from cp_ref.schedules.table import Column, Spans, Table, in_blocks
from cp_ref.schedules.values import FURTHEST, check_data

__all__ = [
    "UNBOUNDED",
    "AttentionSlices",
    "WindowRow",
    "common_pair",
    "crop",
    "pairs",
    "read_areas",
    "slices_of_windows",
]

UNBOUNDED = 2**40  # An edge of a diagonal band beyond every row.


@dataclass(frozen=True, eq=False)
class AttentionSlices(Table):
    """Rectangles [q_start, q_stop) x [k_start, k_stop), each with the diagonal band lo <= k - q <= hi. Rows and edges
    are those of the global packed buffers; -UNBOUNDED and UNBOUNDED are edges that hide nothing.

    >>> areas = AttentionSlices.parse("area q[0:4] k[0:4] band *:0")
    >>> areas.pairs.tolist(), str(areas).strip()
    ([10], 'area q[0:4] k[0:4] band *:0')
    """

    q_start: Column
    q_stop: Column
    k_start: Column
    k_stop: Column
    lo: Column
    hi: Column

    @property
    def queries(self) -> Spans:
        """The query rows of each attention slice."""
        return Spans(self.q_start, self.q_stop)

    @property
    def keys(self) -> Spans:
        """The key rows of each attention slice."""
        return Spans(self.k_start, self.k_stop)

    @property
    def pairs(self) -> Column:
        """The number of visible pairs of each attention slice."""
        return pairs(*self.columns)

    @property
    def left(self) -> Column:
        """The left side of each window: how many keys before its aligned one a query sees, -1 where unbounded. Each
        rectangle's last row is aligned to its last column. Of rectangles that `crop` made, no bounded side is below 0.
        """
        left = (self.k_stop - self.q_stop) - self.lo
        return np.where(self.lo <= -UNBOUNDED, -1, left)

    @property
    def right(self) -> Column:
        """The right side of each window: how many keys behind its aligned one a query sees, -1 where unbounded."""
        right = self.hi - (self.k_stop - self.q_stop)
        return np.where(self.hi >= UNBOUNDED, -1, right)

    def __str__(self) -> str:
        return "".join(
            f"area q[{q0}:{q1}] k[{k0}:{k1}] band {_edge(lo)}:{_edge(hi)}\n" for q0, q1, k0, k1, lo, hi in self.rows()
        )

    @staticmethod
    def parse(text: str) -> AttentionSlices:
        """The attention slices that `str` printed. Raises ValueError naming the first line that is not understood."""
        rows: list[tuple[int, ...]] = []
        for line in filter(None, map(str.strip, text.splitlines())):
            if (found := _LINE.fullmatch(line)) is None:
                raise ValueError(f"{line!r} is no area, which has the form 'area q[0:4] k[0:4] band *:0'")
            edges = [found[n] if found[n] != "*" else sign * UNBOUNDED for n, sign in ((5, -1), (6, 1))]
            rows.append((*(int(found[n]) for n in (1, 2, 3, 4)), *map(int, edges)))
        return AttentionSlices.of_rows(rows)


_LINE = re.compile(r"area q\[(\d+):(\d+)\] k\[(\d+):(\d+)\] band (\*|-?\d+):(\*|-?\d+)")


def _edge(edge: int) -> str:
    return "*" if abs(edge) >= UNBOUNDED else str(edge)


@in_blocks
def crop(
    q_start: Column, q_stop: Column, k_start: Column, k_stop: Column, lo: Column, hi: Column
) -> tuple[Column, Column, Column, Column]:
    """The smallest rectangles that hold every visible pair of these; empty (start >= stop) if no pair is visible.

    Every row that is left sees a column, and every column that is left is seen.

    >>> cropped = crop(*(np.array([x]) for x in (0, 4, 2, 8, -UNBOUNDED, 0)))  # rows 0 and 1 see nothing
    >>> [x.tolist() for x in cropped]
    [[2], [4], [2], [4]]
    """
    # Row i sees nothing right of i + hi and left of i + lo; column j is seen by nobody outside j - hi ... j - lo.
    q0, k1 = np.maximum(q_start, k_start - hi), np.minimum(k_stop, q_stop + hi)
    q1, k0 = np.minimum(q_stop, k1 - lo), np.maximum(k_start, q0 + lo)
    q0, k1 = np.maximum(q0, k0 - hi), np.minimum(k1, q1 + hi)  # Cutting one side may free the other.
    return q0, q1, k0, k1


def pairs(q_start: Column, q_stop: Column, k_start: Column, k_stop: Column, lo: Column, hi: Column) -> Column:
    """The number of visible pairs of each rectangle, by arithmetic series, whatever its size.

    >>> pairs(*(np.array([x]) for x in (0, 5, 0, 5, -1, 1))).tolist()
    [13]
    """
    q0, q1, k0, k1 = crop(q_start, q_stop, k_start, k_stop, lo, hi)
    rows, columns = np.maximum(q1 - q0, 0), np.maximum(k1 - k0, 0)
    # Row i hides k1 - (i + hi + 1) keys on its right while that is positive, and (i + lo) - k0 keys on its left.
    hidden = _triangle(k1 - q0 - hi - 1, rows) + _triangle(q1 - 1 + lo - k0, rows)
    return np.where((rows > 0) & (columns > 0) & (lo <= hi), rows * columns - hidden, 0)


def _triangle(first: Column, rows: Column) -> Column:
    """The sum of max(first - n, 0) for n in range(rows).

    >>> _triangle(np.array([3, 3, -1]), np.array([2, 10, 4])).tolist()
    [5, 6, 0]
    """
    terms = np.minimum(rows, np.maximum(first, 0))
    return terms * first - terms * (terms - 1) // 2


# ---- reading what a user gives
#
# The argument `areas`: rectangles with windows, as users give them, checked and read.
#
# A `WindowRow` is (q_start, q_stop, k_start, k_stop, left, right): no row of `AttentionSlices`, which has the edges lo
# and hi of a diagonal band. Inside its rectangle the window has the meaning that it has for a sequence, aligned to the
# last row and the last column ("bottom-right"), -1 for unbounded:
#
#     i = q_start ... q_stop - 1 sees j = k_start ... k_stop - 1      iff      left < 0   or  j >= i + d - left
#     d = k_stop - q_stop                                             and      right < 0  or  j <= i + d + right


WindowRow = tuple[int, int, int, int, int, int]  # q_start, q_stop, k_start, k_stop, left, right

_AT_ONCE = 2**16  # pairs of attention slices that are compared at a time
_ROUNDS = 4  # of cuts
_FORM = "an int32 or int64 tensor [n, 6]: q_start, q_stop, k_start, k_stop, left, right"


def read_areas(areas: Any, rows_q: int, rows_kv: int) -> tuple[WindowRow, ...]:
    """The rows of a tensor of attention slices.

    Args:
        rows_q, rows_kv: of the global buffers, padding included: attention slices lie inside.

    Raises:
        TypeError, ValueError: it is no such tensor, or a row has no meaning, sees nothing, reaches outside the buffers,
        or has a pair of another row too. (Where there is a rectangle its last row sees its last column.)
    """
    if not str(getattr(areas, "dtype", "")).startswith("torch."):
        raise TypeError(f"areas is a {type(areas).__name__}; it must be {_FORM}")
    if str(areas.dtype).removeprefix("torch.") not in ("int32", "int64"):
        raise TypeError(f"areas has dtype {areas.dtype}; it must be {_FORM}")
    check_data("areas", areas)
    if len(areas.shape) != 2 or areas.shape[1] != 6:
        raise ValueError(f"areas has shape {list(areas.shape)}; it must be {_FORM}")
    table = areas.cpu().numpy().astype(np.int64)
    for first, last, side, size in ((0, 1, "q", rows_q), (2, 3, "k", rows_kv)):
        start, stop = table[:, first], table[:, last]
        name = f"{side}_start, {side}_stop"
        _refuse(table, start >= stop, f"{name} are its first row and the one behind its last; it sees nothing")
        outside = (start < 0) | (stop > size)
        _refuse(table, outside, f"{name} must lie within the {size} rows of the global buffer, padding included")
    sides = table[:, 4:]
    wrong = ((sides < -1) | (sides > FURTHEST)).any(axis=1)
    _refuse(table, wrong, f"left and right must be -1 (unbounded) or from 0 to {FURTHEST}")
    if (shared := common_pair(slices_of_windows(table))) is not None:
        one, other, q, k = shared
        raise ValueError(
            f"areas[{one}] = {table[one].tolist()} and areas[{other}] = {table[other].tolist()} both have query row "
            f"{q} and key row {k}; areas must be disjoint"
        )
    return tuple(zip(*table.T.tolist(), strict=True))


def slices_of_windows(rows: tuple[WindowRow, ...] | Column) -> AttentionSlices:
    """Rectangles with windows as `AttentionSlices`, cut down to the queries and keys that see anything.

    >>> print(slices_of_windows(((0, 4, 0, 6, 1, 0), (4, 6, 0, 6, -1, -1))), end="")
    area q[0:4] k[1:6] band 1:2
    area q[4:6] k[0:6] band *:*
    """
    q0, q1, k0, k1, left, right = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    corner = k1 - q1
    lo = np.where(left < 0, -UNBOUNDED, corner - np.minimum(left, UNBOUNDED // 2))
    hi = np.where(right < 0, UNBOUNDED, corner + np.minimum(right, UNBOUNDED // 2))
    q0, q1, k0, k1 = crop(q0, q1, k0, k1, lo, hi)
    return AttentionSlices(q0, q1, k0, k1, lo, hi)


def common_pair(areas: AttentionSlices) -> tuple[int, int, int, int] | None:
    """Two attention slices that have a visible pair in common, and the pair: (number, number, query row, key row); None
    where all are disjoint.

    >>> common_pair(slices_of_windows(((0, 4, 0, 4, -1, 0), (1, 4, 2, 5, -1, -1))))
    (0, 1, 2, 2)
    >>> common_pair(slices_of_windows(((0, 4, 0, 4, -1, 0), (0, 3, 1, 4, 0, -1)))) is None  # beside the diagonal
    True
    """
    some = _inseparable(areas)
    pairs_beside = _neighbours(areas.take(some))
    while len(found := np.array(list(islice(pairs_beside, _AT_ONCE)), dtype=np.int64).reshape(-1, 2)):
        if (shared := _first_shared(areas, np.sort(some[found], axis=1).T)) is not None:
            return shared
    return None


def _first_shared(areas: AttentionSlices, twos: Column) -> tuple[int, int, int, int] | None:
    """The first two of these attention slices [2, n] that have a visible pair in common, and the pair; None where none
    have.
    """
    one, other = areas.take(twos[0]), areas.take(twos[1])
    shared = AttentionSlices(
        *(
            (np.minimum if name in ("q_stop", "k_stop", "hi") else np.maximum)(vars(one)[name], vars(other)[name])
            for name in vars(one)
        )
    )
    if not len(found := np.flatnonzero(shared.pairs)):
        return None
    n = found[np.lexsort(twos[::-1, found])[0]]
    pair = shared.take(np.array([n]))
    q, _, k, _ = (int(edge[0]) for edge in crop(*pair.columns))
    return int(twos[0, n]), int(twos[1, n]), q, max(k, q + int(pair.lo[0]))


def _inseparable(areas: AttentionSlices) -> Column:
    """The numbers of attention slices that straight cuts do not set apart from all others. One that is set apart has no
    pair in common with another. Cuts go between queries, between keys, and along the diagonals; then again inside the
    parts. The attention slices of most masks are set apart by few rounds of cuts.

        a a | b b       between keys                   a b b b       along a diagonal: a causal attention slice and
        a a | b b                                      a a b b       what lies above it
    """
    sides = [
        (areas.q_start, areas.q_stop),
        (areas.k_start, areas.k_stop),
        (
            np.maximum(areas.lo, areas.k_start - areas.q_stop + 1),
            np.minimum(areas.hi, areas.k_stop - 1 - areas.q_start) + 1,
        ),
    ]
    part, left = np.zeros(len(areas), dtype=np.int64), np.arange(len(areas))
    for start, stop in sides * _ROUNDS:
        part = _cut(part, start[left], stop[left])
        together = np.bincount(part)[part] > 1
        part, left = part[together], left[together]
    return left


def _cut(part: Column, start: Column, stop: Column) -> Column:
    """The number of the part that each span is in when parts are cut wherever no span of theirs is."""
    if not len(part):
        return part
    least, most = int(start.min()), int(stop.max())
    if (most - least) * (int(part.max()) + 1) > FURTHEST:  # Then places among all edges are small numbers.
        edges = np.unique(np.concatenate([start, stop]))
        least, most, start, stop = 0, len(edges), np.searchsorted(edges, start), np.searchsorted(edges, stop)
    shift = part * (most - least)  # Parts follow one another.
    start, stop = start + shift, stop + shift
    if not bool((start[1:] >= start[:-1]).all()):
        order = np.argsort(start)
        start, stop = start[order], stop[order]
    else:
        order = slice(None)
    found = np.empty_like(part)
    found[order] = np.cumsum(np.append(False, start[1:] >= np.maximum.accumulate(stop)[:-1]))
    return found


def _neighbours(areas: AttentionSlices) -> Iterator[tuple[int, int]]:
    """The pairs of attention slices that become neighbours in the order of their keys, as rows begin and end: few of
    all pairs of attention slices. If any two attention slices have a pair in common, two of these have.

    Each attention slice sees one stretch of keys in each row from its first to its last; from row to row, each end of
    the stretch stays or moves on by one. So no stretch can pass another without meeting it. Up to the first row in
    which two meet, all keep their order, and those two are neighbours.

        a a a . b b b .       a and b are neighbours, b and c; a and c, if apart from b, are from each other
        . a a a . b b c
    """
    k_start, lo = areas.k_start.tolist(), areas.lo.tolist()
    row = np.append(areas.q_stop, areas.q_start)  # Leave before a row, then enter with it.
    order: list[int] = []
    count, events = len(areas), np.argsort(row, kind="stable")
    for event, at in zip(events.tolist(), row[events].tolist(), strict=True):
        begins, area = divmod(event, count)
        here = at - 1 + begins

        def first(n: int, here: int = here) -> int:
            """The first key that an attention slice sees in this row."""
            return max(k_start[n], here + lo[n])

        place = bisect_left(order, first(area), key=first)
        if begins:
            yield from ((area, other) for other in order[max(place - 1, 0) : place + 1])
            order.insert(place, area)
            continue
        if order[place : place + 1] != [area]:  # Where two have met, their order means nothing.
            place = order.index(area)
        del order[place]
        if 0 < place < len(order):
            yield order[place - 1], order[place]


def _refuse(table: Column, wrong: Any, rule: str) -> None:
    """Raise ValueError for the first row that is wrong; `wrong` is bool [n]."""
    if wrong.any():
        n = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"areas[{n}] is {table[n].tolist()}; {rule}")
