"""Areas: who may see whom. The first of the three tables (areas, ownership, schedule).

An area is a rectangle of the global score matrix, crossed by a diagonal band. Its rows are rows of the packed global q
buffer, its columns rows of the packed global k buffer (padding included, sequence after sequence). So every format,
mask, window, alignment and padding is just a maker of areas:

    visible(i, j)  iff  q_start <= i < q_stop  and  k_start <= j < k_stop  and  lo <= j - i <= hi

    two causal sequences, 3 and 2 tokens         the same with 3 and 2 tokens in 4 and 2 slots
          j 0 1 2 3 4                                  j 0 1 2 3 4 5
        i 0 x . . . .       area q[0:3] k[0:3]       i 0 x . . . . .       area q[0:3] k[0:3]
          1 x x . . .       band *:0                   1 x x . . . .       band *:0
          2 x x x . .       area q[3:5] k[3:5]         2 x x x . . .       area q[4:6] k[4:6]
          3 . . . x .       band *:0                   3 . . . . . .       band *:0
          4 . . . x x                                  4 . . . . x .
                                                       5 . . . . x x

Areas are disjoint as sets of pairs. The text of an area, which reads back, has "*" for an edge without a bound.
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
from cp_ref.schedules.values import FURTHEST, check_dtype, check_tensor

__all__ = [
    "UNBOUNDED",
    "Areas",
    "WindowRow",
    "areas_of_windows",
    "common_pair",
    "crop",
    "pairs",
    "read_areas",
]

UNBOUNDED = 2**40  # An edge of a diagonal band beyond every row.


@dataclass(frozen=True, eq=False)
class Areas(Table):
    """Rectangles [q_start, q_stop) x [k_start, k_stop), each with the diagonal band lo <= k - q <= hi. Rows and edges
    are those of the global packed buffers; -UNBOUNDED and UNBOUNDED are edges that hide nothing.

    >>> areas = Areas.parse("area q[0:4] k[0:4] band *:0")
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
        """The query rows of each area."""
        return Spans(self.q_start, self.q_stop)

    @property
    def keys(self) -> Spans:
        """The key rows of each area."""
        return Spans(self.k_start, self.k_stop)

    @property
    def pairs(self) -> Column:
        """The number of visible pairs of each area."""
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

    @property
    def first_pair(self) -> tuple[int, int]:
        """The first query row of the first one that sees anything, and the first key row that it sees."""
        q, _, k, _ = (int(edge[0]) for edge in crop(*self.columns))
        return q, max(k, q + int(self.lo[0]))

    def common(self, other: Areas) -> Areas:
        """The pairs that each area shares with the area of `other` in its place."""
        later, earlier = np.maximum, np.minimum
        return Areas(
            later(self.q_start, other.q_start),
            earlier(self.q_stop, other.q_stop),
            later(self.k_start, other.k_start),
            earlier(self.k_stop, other.k_stop),
            later(self.lo, other.lo),
            earlier(self.hi, other.hi),
        )

    def __str__(self) -> str:
        return "".join(
            f"area q[{q0}:{q1}] k[{k0}:{k1}] band {_edge(lo)}:{_edge(hi)}\n" for q0, q1, k0, k1, lo, hi in self.rows()
        )

    @staticmethod
    def parse(text: str) -> Areas:
        """The areas that `str` printed. Raises ValueError naming the first line that is not understood."""
        rows: list[tuple[int, ...]] = []
        for line in filter(None, map(str.strip, text.splitlines())):
            if (found := _LINE.fullmatch(line)) is None:
                raise ValueError(f"{line!r} is no area, which has the form 'area q[0:4] k[0:4] band *:0'")
            edges = [found[n] if found[n] != "*" else sign * UNBOUNDED for n, sign in ((5, -1), (6, 1))]
            rows.append((*(int(found[n]) for n in (1, 2, 3, 4)), *map(int, edges)))
        return Areas.of_rows(rows)


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
# A `WindowRow` is (q_start, q_stop, k_start, k_stop, left, right); a row of `Areas` has the edges lo and hi of a
# diagonal band in place of left and right. Inside its rectangle the window has the meaning that it has for a sequence,
# aligned to the last row and the last column ("bottom-right"), -1 for unbounded:
#
#     i = q_start ... q_stop - 1 sees j = k_start ... k_stop - 1      iff      left < 0   or  j >= i + d - left
#     d = k_stop - q_stop                                             and      right < 0  or  j <= i + d + right


WindowRow = tuple[int, int, int, int, int, int]  # q_start, q_stop, k_start, k_stop, left, right

_FORM = "an int32 or int64 tensor [n, 6]: q_start, q_stop, k_start, k_stop, left, right"


def read_areas(areas: Any, rows_q: int, rows_kv: int) -> tuple[WindowRow, ...]:
    """The rows of a tensor of areas.

    Args:
        rows_q, rows_kv: of the global buffers, padding included: areas lie inside.

    Raises:
        TypeError, ValueError: it is no such tensor, or a row has no meaning, sees nothing, reaches outside the buffers,
        or has a pair of another row too. (Where there is a rectangle its last row sees its last column.)
    """
    check_tensor("areas", areas, _FORM)
    check_dtype("areas", areas, "int32", "int64")
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
    if (shared := common_pair(areas_of_windows(table))) is not None:
        one, other, q, k = shared
        raise ValueError(
            f"areas[{one}] = {table[one].tolist()} and areas[{other}] = {table[other].tolist()} both have query row "
            f"{q} and key row {k}; areas must be disjoint"
        )
    return tuple(zip(*table.T.tolist(), strict=True))


def areas_of_windows(rows: tuple[WindowRow, ...] | Column) -> Areas:
    """Rectangles with windows as `Areas`, cut down to the queries and keys that see anything.

    >>> print(areas_of_windows(((0, 4, 0, 6, 1, 0), (4, 6, 0, 6, -1, -1))), end="")
    area q[0:4] k[1:6] band 1:2
    area q[4:6] k[0:6] band *:*
    """
    q0, q1, k0, k1, left, right = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    corner = k1 - q1
    lo = np.where(left < 0, -UNBOUNDED, corner - np.minimum(left, UNBOUNDED // 2))
    hi = np.where(right < 0, UNBOUNDED, corner + np.minimum(right, UNBOUNDED // 2))
    q0, q1, k0, k1 = crop(q0, q1, k0, k1, lo, hi)
    return Areas(q0, q1, k0, k1, lo, hi)


def _refuse(table: Column, wrong: Any, rule: str) -> None:
    """Raise ValueError for the first row that is wrong; `wrong` is bool [n]."""
    if wrong.any():
        n = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"areas[{n}] is {table[n].tolist()}; {rule}")


# ---- areas that overlap
#
# Two areas overlap where a query sees a key in both. The common pairs of two areas are an area too, from the later
# start to the earlier stop on each side (`Areas.common`). So two areas overlap if, and only if, that area has a visible
# pair.
#
# A million areas make half a million million couples, so `common_pair` asks this of a few. Straight cuts set most areas
# apart from all others (`_not_set_apart`). Of the rest, those that meet first lie side by side (`_side_by_side`).


_AT_ONCE = 2**16  # couples of areas that are compared at a time
_ROUNDS = 4  # of cuts


def common_pair(areas: Areas) -> tuple[int, int, int, int] | None:
    """Two areas that overlap, and a pair that both have: (number, number, query row, key row); None where
    no two overlap.

    >>> common_pair(areas_of_windows(((0, 4, 0, 4, -1, 0), (1, 4, 2, 5, -1, -1))))
    (0, 1, 2, 2)
    >>> common_pair(areas_of_windows(((0, 4, 0, 4, -1, 0), (0, 3, 1, 4, 0, -1)))) is None  # beside the diagonal
    True
    """
    rest = _not_set_apart(areas)
    couples = _side_by_side(areas.take(rest))
    while some := list(islice(couples, _AT_ONCE)):
        one, other = np.sort(rest[np.array(some)], axis=1).T
        common = areas.take(one).common(areas.take(other))
        overlap = np.flatnonzero(common.pairs)
        if len(overlap):
            first = overlap[np.lexsort((other[overlap], one[overlap]))[:1]]
            return int(one[first[0]]), int(other[first[0]]), *common.take(first).first_pair
    return None


def _not_set_apart(areas: Areas) -> Column:
    """The numbers of areas that straight cuts do not set apart from all others. Cuts go between queries, between keys,
    and along the diagonals; then again inside the parts that they leave.

        a a | b b       between keys                   a b b b       along a diagonal: a causal area and
        a a | b b                                      a a b b       what lies above it
    """
    diagonals = Spans(
        np.maximum(areas.lo, areas.k_start - areas.q_stop + 1),
        np.minimum(areas.hi, areas.k_stop - 1 - areas.q_start) + 1,
    )
    rest, part = np.arange(len(areas)), np.zeros(len(areas), dtype=np.int64)
    for spans in (areas.queries, areas.keys, diagonals) * _ROUNDS:
        part = _cut(part, Spans(spans.start[rest], spans.stop[rest]))
        several = np.bincount(part)[part] > 1
        rest, part = rest[several], part[several]
    return rest


def _cut(part: Column, spans: Spans) -> Column:
    """The number of each span's part. Parts are cut at every gap between their spans.

    >>> _cut(np.array([0, 0, 0, 1]), Spans(np.array([0, 5, 2, 0]), np.array([3, 7, 4, 9]))).tolist()
    [0, 1, 0, 2]
    """
    start, stop = spans
    if not len(part):
        return part
    least, most = int(start.min()), int(stop.max())
    if (most - least) * (int(part.max()) + 1) > FURTHEST:  # then the numbers of the edges, which are small
        edges = np.unique(np.concatenate([start, stop]))
        least, most, start, stop = 0, len(edges), np.searchsorted(edges, start), np.searchsorted(edges, stop)
    after_the_last = part * (most - least)
    start, stop = start + after_the_last, stop + after_the_last
    order = slice(None) if bool((start[1:] >= start[:-1]).all()) else np.argsort(start)
    reached = np.maximum.accumulate(stop[order])
    found = np.empty_like(part)
    found[order] = np.cumsum(np.append(False, start[order][1:] >= reached[:-1]))
    return found


def _side_by_side(areas: Areas) -> Iterator[tuple[int, int]]:
    """The couples that lie side by side in some row. A line sweeps over the rows, and knows the areas that it crosses,
    in the order of their keys.

    In each row an area sees one stretch of keys. From row to row each end of it stays or moves on by one. So no stretch
    can pass another without meeting it: until two meet, the order never changes, and the two that meet first are side
    by side. They were so since one of them began, or since what lay between them ended.

        a a a . b b b .       a and b are side by side, b and c; a and c are not, as b sets them apart
        . a a a . b b c
    """
    k_start, lo = areas.k_start.tolist(), areas.lo.tolist()

    def first_key(number: int, row: int) -> int:
        return max(k_start[number], row + lo[number])

    crossed: list[int] = []
    for row, begins, number in _ends(areas.queries):
        at = bisect_left(crossed, first_key(number, row), key=lambda other, row=row: first_key(other, row))
        if begins:
            yield from ((number, other) for other in crossed[max(at - 1, 0) : at + 1])
            crossed.insert(at, number)
            continue
        if crossed[at : at + 1] != [number]:  # two have met, and their order means nothing any more
            at = crossed.index(number)
        del crossed[at]
        if 0 < at < len(crossed):
            yield crossed[at - 1], crossed[at]


def _ends(spans: Spans) -> Iterator[tuple[int, bool, int]]:
    """The ends of spans in the order of the rows: (row, whether it is the first or the last of a span, which span).
    One that ends before a row comes before those that begin there.
    """
    count = len(spans)
    ends = np.argsort(np.concatenate([spans.stop, spans.start]), kind="stable")
    begins, number = ends >= count, ends % count
    row = np.where(begins, spans.start[number], spans.stop[number] - 1)
    return zip(row.tolist(), begins.tolist(), number.tolist(), strict=True)
