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
from dataclasses import dataclass

import numpy as np

from cp_ref.spec.tables.table import Column, Table, in_blocks

__all__ = ["UNBOUNDED", "AttentionSlices", "crop", "pairs"]

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
    def pairs(self) -> Column:
        """The number of visible pairs of each attention slice."""
        return pairs(*self.columns)

    @property
    def left(self) -> Column:
        """Each diagonal band as the left side of a window that is aligned to the rectangle's last row and last column:
        how many keys before the aligned one are seen; -1 where unbounded. Rectangles that `crop` made have sides >= 0.
        """
        left = (self.k_stop - self.q_stop) - self.lo
        return np.where(self.lo <= -UNBOUNDED, -1, left)

    @property
    def right(self) -> Column:
        """Each diagonal band as the right side of such a window."""
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

    Each row of the result sees, and each column is seen by, at least one other.

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
