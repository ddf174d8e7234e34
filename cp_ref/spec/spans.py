"""A set of integers as disjoint half-open spans."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator

__all__ = ["Spans"]


class Spans:
    """Positions that are there. Adding merges what touches.

    >>> s = Spans()
    >>> s.add(0, 4); s.add(8, 12); s.add(4, 6)
    >>> list(s), s.cover(1, 6), s.cover(5, 9), s.cover(7, 7)
    ([(0, 6), (8, 12)], True, False, True)
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._spans)

    def __len__(self) -> int:
        """How many positions there are, not how many spans."""
        return sum(stop - start for start, stop in self._spans)

    def add(self, start: int, stop: int) -> None:
        """Add [start, stop)."""
        if start >= stop:
            return
        kept: list[tuple[int, int]] = []
        for a, b in self._spans:
            if b < start or stop < a:
                kept.append((a, b))
            else:
                start, stop = min(a, start), max(b, stop)
        self._spans = kept
        insort(self._spans, (start, stop))

    def cover(self, start: int, stop: int) -> bool:
        """Whether all of [start, stop) is there."""
        if start >= stop:
            return True
        n = bisect_right(self._spans, (start, float("inf"))) - 1
        return n >= 0 and self._spans[n][1] >= stop
