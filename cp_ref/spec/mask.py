"""Which keys a query sees: a diagonal band, and what a rectangle of the score matrix holds of it.

Every mask of this project is, inside one sequence, one band of the score matrix (i = query position, j = key position):

    visible(i, j)  iff  lo <= j - i <= hi            lo, hi: int, or None for unbounded

          causal            window (2, 0)       bottom-right causal       window (1, 1)
        lo=None hi=0         lo=-2 hi=0        len_q 3, len_kv 5: hi=2      lo=-1 hi=1
        j 0 1 2 3 4          j 0 1 2 3 4           j 0 1 2 3 4            j 0 1 2 3 4
      i 0 x . . . .        i 0 x . . . .         i 0 x x x . .          i 0 x x . . .
        1 x x . . .          1 x x . . .           1 x x x x .            1 x x x . .
        2 x x x . .          2 x x x . .           2 x x x x x            2 . x x x .
        3 x x x x .          3 . x x x .                                  3 . . x x x
        4 x x x x x          4 . . x x x                                  4 . . . x x

A padding mask adds nothing but lengths: positions past a sequence's length are in no rectangle.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Band", "Rect"]


@dataclass(frozen=True, slots=True, order=True)
class Rect:
    """Query positions [q0, q1) against key positions [k0, k1) of one sequence.

    >>> Rect(0, 4, 2, 5).area
    12
    >>> Rect(0, 4, 2, 5) & Rect(3, 9, 0, 3)
    Rect(q0=3, q1=4, k0=2, k1=3)
    """

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def area(self) -> int:
        """How many (query, key) pairs it has; 0 when either side is empty."""
        return max(self.q1 - self.q0, 0) * max(self.k1 - self.k0, 0)

    def __and__(self, other: Rect) -> Rect:
        """The rectangle of the positions that both hold."""
        return Rect(max(self.q0, other.q0), min(self.q1, other.q1), max(self.k0, other.k0), min(self.k1, other.k1))


@dataclass(frozen=True, slots=True)
class Band:
    """The visible pairs of one sequence: lo <= j - i <= hi, None for unbounded.

    >>> Band(None, 0).visible(3, 3), Band(None, 0).visible(3, 4)
    (True, False)
    """

    lo: int | None
    hi: int | None

    def visible(self, i: int, j: int) -> bool:
        """Whether query i sees key j."""
        return (self.lo is None or j - i >= self.lo) and (self.hi is None or j - i <= self.hi)

    def row(self, i: int, k0: int, k1: int) -> tuple[int, int]:
        """The keys of [k0, k1) that query i sees, as a span [start, stop); empty when stop <= start.

        >>> Band(-2, 0).row(4, 0, 8)
        (2, 5)
        """
        start = k0 if self.lo is None else max(k0, i + self.lo)
        stop = k1 if self.hi is None else min(k1, i + self.hi + 1)
        return start, stop

    def crop(self, rect: Rect) -> Rect | None:
        """The smallest rectangle that holds every visible pair of `rect`; None when there is none.

        Each row and each column of the result sees, or is seen by, at least one position.

        >>> Band(None, 0).crop(Rect(0, 4, 2, 8))    # rows 0 and 1 see nothing, columns 4 to 7 are seen by nobody
        Rect(q0=2, q1=4, k0=2, k1=4)
        >>> Band(-1, 0).crop(Rect(4, 8, 0, 2)) is None
        True
        """
        q0, q1, k0, k1 = rect.q0, rect.q1, rect.k0, rect.k1
        if rect.area == 0 or (self.lo is not None and self.hi is not None and self.lo > self.hi):
            return None
        if self.hi is not None:  # row i sees nothing right of i + hi; column j is seen by nobody above j - hi
            q0, k1 = max(q0, k0 - self.hi), min(k1, q1 + self.hi)
        if self.lo is not None:  # row i sees nothing left of i + lo; column j is seen by nobody below j - lo
            q1, k0 = min(q1, k1 - self.lo), max(k0, q0 + self.lo)
            if self.hi is not None:  # cutting one side may free the other
                q0, k1 = max(q0, k0 - self.hi), min(k1, q1 + self.hi)
        cropped = Rect(q0, q1, k0, k1)
        return cropped if cropped.area > 0 else None

    def full(self, rect: Rect) -> bool:
        """Whether every pair of `rect` is visible, so that a kernel needs no mask.

        >>> Band(None, 0).full(Rect(4, 8, 0, 4)), Band(None, 0).full(Rect(4, 8, 0, 6))
        (True, False)
        """
        return (self.hi is None or (rect.k1 - 1) - rect.q0 <= self.hi) and (
            self.lo is None or rect.k0 - (rect.q1 - 1) >= self.lo
        )

    def count(self, rect: Rect) -> int:
        """How many pairs of `rect` are visible, by arithmetic series, whatever its size.

        >>> Band(None, 0).count(Rect(0, 4, 0, 4)), Band(-1, 1).count(Rect(0, 5, 0, 5))
        (10, 13)
        """
        cropped = self.crop(rect)
        if cropped is None:
            return 0
        q0, q1, k0, k1 = cropped.q0, cropped.q1, cropped.k0, cropped.k1
        hidden = 0
        if self.hi is not None:  # row i hides k1 - (i + hi + 1) keys on its right, while that is positive
            hidden += _triangle(k1 - q0 - self.hi - 1, q1 - q0)
        if self.lo is not None:  # row i hides (i + lo) - k0 keys on its left; counted from the last row up
            hidden += _triangle(q1 - 1 + self.lo - k0, q1 - q0)
        return cropped.area - hidden


def _triangle(first: int, rows: int) -> int:
    """The sum of max(first - n, 0) for n in range(rows).

    >>> _triangle(3, 2), _triangle(3, 10), _triangle(-1, 4)
    (5, 6, 0)
    """
    terms = min(rows, max(first, 0))
    return terms * first - terms * (terms - 1) // 2
