"""Which keys of its sequence a query sees: those in a diagonal band.

Every mask of this project is, inside one sequence, one diagonal band of the score matrix (i = query position, j = key
position):

    visible(i, j)  iff  lo <= j - i <= hi            lo, hi: int, or None for unbounded

          causal            window (2, 0)       bottom-right causal       window (1, 1)
        lo=None hi=0         lo=-2 hi=0        len_q 3, len_kv 5: hi=2      lo=-1 hi=1
        j 0 1 2 3 4          j 0 1 2 3 4           j 0 1 2 3 4            j 0 1 2 3 4
      i 0 x . . . .        i 0 x . . . .         i 0 x x x . .          i 0 x x . . .
        1 x x . . .          1 x x . . .           1 x x x x .            1 x x x . .
        2 x x x . .          2 x x x . .           2 x x x x x            2 . x x x .
        3 x x x x .          3 . x x x .                                  3 . . x x x
        4 x x x x x          4 . . x x x                                  4 . . . x x

A padding mask adds only lengths: positions past them see nothing and are not seen.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DiagonalBand"]


class DiagonalBand(NamedTuple):
    """The visible pairs of one sequence: lo <= j - i <= hi, None for unbounded."""

    lo: int | None
    hi: int | None

    def row(self, i: int, k0: int, k1: int) -> tuple[int, int]:
        """The keys of [k0, k1) that query i sees, as a span [start, stop); empty when stop <= start.

        >>> DiagonalBand(-2, 0).row(4, 0, 8)
        (2, 5)
        """
        start = k0 if self.lo is None else max(k0, i + self.lo)
        stop = k1 if self.hi is None else min(k1, i + self.hi + 1)
        return start, stop
