"""What a picture of a schedule shows, before it is drawn: the tiles on one plane, each as an exact polygon.

The plane has a unit square for every (query, key) pair, queries downwards and keys to the right. Several sequences lie
on its diagonal, as they lie in a packed buffer:

         keys of 0     keys of 1
        .-----------.
    q   |  .        |
    0   |     .     |
        '-----------.-------.
    q               | .     |
    1               |    .  |
                    '-------'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cp_ref.spec.layout import Fragment, kv_fragments, q_fragments
from cp_ref.spec.mask import Band, Rect
from cp_ref.spec.problem import Problem, Sequence
from cp_ref.spec.schedule import Schedule, Tile

__all__ = ["Block", "Owner", "Part", "Plane", "Point", "area", "band_edge", "centre", "plane", "staircase"]

Point = tuple[float, float]  # x along the keys, y along the queries


@dataclass(frozen=True, slots=True)
class Block:
    """One sequence's score matrix, its first query and key at row `y` and column `x` of the plane."""

    number: int
    sequence: Sequence
    band: Band
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Part:
    """A tile where it lies: in which block, computed by whom and when."""

    block: Block
    tile: Tile
    rank: int
    step: int

    @property
    def rect(self) -> Rect:
        """The tile's rectangle in the plane."""
        r, y, x = self.tile.rect, self.block.y, self.block.x
        return Rect(r.q0 + y, r.q1 + y, r.k0 + x, r.k1 + x)

    @property
    def plane_band(self) -> Band:
        """The tile's band in the plane."""
        shift = self.block.x - self.block.y
        return Band(*(None if edge is None else edge + shift for edge in (self.block.band.lo, self.block.band.hi)))

    @property
    def pairs(self) -> int:
        """How many of its pairs are visible."""
        return self.block.band.count(self.tile.rect)


@dataclass(frozen=True, slots=True)
class Owner:
    """Slots [start, stop) of an axis belong to `rank`; the first `real` of them hold tokens, the rest is padding."""

    start: int
    stop: int
    real: int
    rank: int


@dataclass(frozen=True, slots=True)
class Plane:
    """Everything that is drawn."""

    rows: int
    columns: int
    blocks: tuple[Block, ...]
    parts: tuple[Part, ...]
    owners_q: tuple[Owner, ...]
    owners_kv: tuple[Owner, ...]

    @property
    def steps(self) -> int:
        """How many steps it takes until nothing is computed any more."""
        return 1 + max((p.step for p in self.parts), default=0)


def plane(problem: Problem, schedule: Schedule, sequences: Iterable[int], head: int = 0) -> Plane:
    """The forward tiles of these sequences that hold query head `head`; the sequences lie on the diagonal."""
    blocks: dict[int, Block] = {}
    rows = columns = 0
    for number in sequences:
        sequence = problem.sequences[number]
        blocks[number] = Block(number, sequence, problem.band(sequence), columns, rows)
        rows, columns = rows + sequence.slots_q, columns + sequence.slots_kv
    parts = [
        Part(blocks[tile.seq], tile, rank, n)
        for rank, program in enumerate(schedule.forward)
        for n, step in enumerate(program)
        for tile in step.tiles
        if tile.seq in blocks and (tile.heads is None or tile.heads[0] <= head < tile.heads[1])
    ]
    owners_q = _owners(problem, q_fragments, {n: (b.y, b.sequence.len_q) for n, b in blocks.items()})
    owners_kv = _owners(problem, kv_fragments, {n: (b.x, b.sequence.len_kv) for n, b in blocks.items()})
    return Plane(rows, columns, tuple(blocks.values()), tuple(parts), owners_q, owners_kv)


def _owners(
    problem: Problem, fragments: Callable[[Problem, int], tuple[Fragment, ...]], where: dict[int, tuple[int, int]]
) -> tuple[Owner, ...]:
    owners: list[Owner] = []
    for rank in range(problem.cp_size):
        for f in fragments(problem, rank):
            if f.seq in where:
                offset, length = where[f.seq]
                real = max(min(f.stop, length) - f.start, 0)
                owners.append(Owner(f.start + offset, f.stop + offset, real, rank))
    return tuple(sorted(owners, key=lambda o: o.start))


def staircase(band: Band, rect: Rect) -> list[Point]:
    """The outline of the visible pairs of a cropped rectangle, square by square: exact, where a pair is large enough.

    >>> staircase(Band(None, 0), Rect(0, 2, 0, 2))
    [(1, 0), (1, 1), (2, 1), (2, 2), (0, 2), (0, 0)]
    """
    right: list[Point] = []
    left: list[Point] = []
    for i in range(rect.q0, rect.q1):
        start, stop = band.row(i, rect.k0, rect.k1)
        right += [(stop, i), (stop, i + 1)]
        left += [(start, i), (start, i + 1)]
    return _without_middles(right + left[::-1])


def band_edge(band: Band, rect: Rect) -> list[Point]:
    """The same outline with the steps smoothed to straight lines: the rectangle clipped to the band.

    The lines run through the middles of the steps' edges, half a pair outside the middles of the outermost visible
    pairs, so that the area is right to 1/8 of a pair for every corner that is cut.

    >>> band_edge(Band(None, 0), Rect(0, 4, 0, 4))
    [(0, 0), (0.5, 0.0), (4.0, 3.5), (4, 4), (0, 4)]
    """
    outline: list[Point] = [(rect.k0, rect.q0), (rect.k1, rect.q0), (rect.k1, rect.q1), (rect.k0, rect.q1)]
    if band.full(rect):
        return outline
    if band.hi is not None:
        hi = band.hi + 0.5
        outline = _clip(outline, lambda x, y: hi - (x - y))
    if band.lo is not None:
        lo = band.lo - 0.5
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
    # where an edge passes right through a corner, the corner and the cut are one point
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


def area(outline: list[Point]) -> float:
    """The area of a polygon.

    >>> area([(0, 0), (2, 0), (2, 3), (0, 3)])
    6.0
    """
    edges = zip(outline, outline[1:] + outline[:1], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in edges)) / 2


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
