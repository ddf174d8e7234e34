"""A rectangle of pairs with a diagonal band, and the outline of its visible pairs as a polygon."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cp_ref.spec.tables.attention_slices import UNBOUNDED, crop, pairs

__all__ = ["Box", "Point", "band_edge", "centre", "staircase"]

Point = tuple[float, float]  # Coordinates: x along the keys, y along the queries.


class Box(NamedTuple):
    """A rectangle with a diagonal band, like a row of `AttentionSlices`: queries [q0, q1) x keys [k0, k1), lo <= k - q
    <= hi.

    >>> causal = Box(0, 4, 0, 4, -UNBOUNDED, 0)
    >>> causal.pairs, causal.size, causal.full, causal.row(2)
    (10, 16, False, (0, 3))
    """

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED

    @property
    def size(self) -> int:
        """How many pairs it has, visible or not; 0 when either side is empty."""
        return max(self.q1 - self.q0, 0) * max(self.k1 - self.k0, 0)

    @property
    def pairs(self) -> int:
        """How many of its pairs are visible."""
        return int(pairs(*(np.array([x]) for x in self))[0])

    @property
    def full(self) -> bool:
        """Whether all of them are."""
        return self.k1 - 1 - self.q0 <= self.hi and self.k0 - (self.q1 - 1) >= self.lo

    def row(self, i: int) -> tuple[int, int]:
        """The keys that query i sees, as a span [start, stop); empty when stop <= start."""
        return max(self.k0, i + self.lo), min(self.k1, i + self.hi + 1)

    def cropped(self) -> Box:
        """The smallest box that holds every visible pair; of size 0 if no pair is visible."""
        q0, q1, k0, k1 = (int(x[0]) for x in crop(*(np.array([x]) for x in self)))
        return Box(q0, q1, k0, k1, self.lo, self.hi)

    def within(self, q0: int, q1: int, k0: int, k1: int) -> Box:
        """The box's pairs that lie in a rectangle too."""
        edges = max(self.q0, q0), min(self.q1, q1), max(self.k0, k0), min(self.k1, k1)
        return Box(*edges, self.lo, self.hi)

    def moved(self, down: int, right: int) -> Box:
        """The box moved in the plane, with the same pairs visible."""
        rows = self.q0 + down, self.q1 + down, self.k0 + right, self.k1 + right
        return Box(*rows, *(x if abs(x) >= UNBOUNDED else x + right - down for x in (self.lo, self.hi)))


def staircase(box: Box) -> list[Point]:
    """The outline of the visible pairs of a cropped box, square by square: exact, where a pair is large enough.

    >>> staircase(Box(0, 2, 0, 2, -UNBOUNDED, 0))
    [(1, 0), (1, 1), (2, 1), (2, 2), (0, 2), (0, 0)]
    """
    right: list[Point] = []
    left: list[Point] = []
    for i in range(box.q0, box.q1):
        start, stop = box.row(i)
        right += [(stop, i), (stop, i + 1)]
        left += [(start, i), (start, i + 1)]
    return _without_middles(right + left[::-1])


def band_edge(box: Box) -> list[Point]:
    """A tile's outline with the steps smoothed to straight lines: the rectangle clipped to the diagonal band.

    The lines run through the middles of the steps' edges, half a pair outside the middles of the outermost visible
    pairs, so that its area is right to 1/8 of a pair for every corner that is cut.

    >>> band_edge(Box(0, 4, 0, 4, -UNBOUNDED, 0))
    [(0, 0), (0.5, 0.0), (4.0, 3.5), (4, 4), (0, 4)]
    """
    outline: list[Point] = [(box.k0, box.q0), (box.k1, box.q0), (box.k1, box.q1), (box.k0, box.q1)]
    if box.full:
        return outline
    if box.hi < UNBOUNDED:
        hi = box.hi + 0.5
        outline = _clip(outline, lambda x, y: hi - (x - y))
    if box.lo > -UNBOUNDED:
        lo = box.lo - 0.5
        outline = _clip(outline, lambda x, y: (x - y) - lo)
    return outline


def _clip(outline: list[Point], inside: Callable[[float, float], float]) -> list[Point]:
    """The part of a convex polygon where the linear function `inside` is not negative (Sutherland, Hodgman 1974)."""
    kept: list[Point] = []
    for n, (x, y) in enumerate(outline):
        px, py = outline[n - 1]
        before, now = inside(px, py), inside(x, y)
        if (before < 0) != (now < 0):
            t = before / (before - now)
            kept.append((px + t * (x - px), py + t * (y - py)))
        if now >= 0:
            kept.append((x, y))
    # Where an edge passes right through a corner, the corner and the cut are one point.
    return [p for n, p in enumerate(kept) if p != kept[n - 1]]


def _without_middles(outline: list[Point]) -> list[Point]:
    """Drop the points that lie on a straight line between their neighbours, and repeated ones."""
    kept: list[Point] = []
    for point in outline:
        if kept and point == kept[-1]:
            continue
        while len(kept) >= 2 and (kept[-2][0] == kept[-1][0] == point[0] or kept[-2][1] == kept[-1][1] == point[1]):
            kept.pop()
        kept.append(point)
    return kept


def centre(outline: list[Point]) -> Point:
    """The centre of mass of a polygon.

    >>> centre([(0, 0), (2, 0), (2, 2), (0, 2)])
    (1.0, 1.0)
    """
    x = y = twice = 0.0
    x_ref, y_ref = outline[0]  # near the polygon, so that nothing cancels
    for (x0, y0), (x1, y1) in zip(outline, outline[1:] + outline[:1], strict=True):
        cross = (x0 - x_ref) * (y1 - y_ref) - (x1 - x_ref) * (y0 - y_ref)
        x += (x0 + x1 - 2 * x_ref) * cross
        y += (y0 + y1 - 2 * y_ref) * cross
        twice += cross
    return (x_ref + x / (3 * twice), y_ref + y / (3 * twice)) if twice else (x_ref, y_ref)
