"""The tiles of a schedule and the owners of its tokens on one plane, before a picture is drawn of them.

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

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cp_ref.schedules.areas import UNBOUNDED, crop, pairs
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Schedule

__all__ = [
    "Block",
    "Box",
    "Owner",
    "PlacedTile",
    "Plane",
    "Point",
    "band_edge",
    "centre",
    "few_colours",
    "plane",
    "staircase",
    "title",
]


def title(problem: Problem, schedule: Schedule) -> str:
    """The problem in a few words."""
    words = [
        schedule.name,
        f"cp_size {problem.cp_size}",
        problem.qkv_format,
        problem.layout_name,
        problem.attn_mask_type if problem.areas is None else f"{len(problem.areas)} areas",
    ]
    if problem.window_size != (-1, -1):
        words.append(f"window {problem.window_size}")
    return ", ".join(words)


Point = tuple[float, float]  # Coordinates: x along the keys, y along the queries.


class Box(NamedTuple):
    """A rectangle with a diagonal band, like a row of `Areas`: queries [q0, q1) x keys [k0, k1), lo <= k - q <= hi.

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


_COLOURS = 8  # that a reader tells apart; more ranks than twice this share colours


@dataclass(frozen=True, slots=True)
class Block:
    """One sequence's score matrix, its first query and key at row `y` and column `x` of the plane."""

    number: int
    sequence: Sequence
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class PlacedTile:
    """A tile where it lies in the plane, computed by whom and when."""

    block: Block
    box: Box
    text: str  # of the tile
    rank: int
    step: int

    @property
    def pairs(self) -> int:
        """How many of its pairs are visible."""
        return self.box.pairs


@dataclass(frozen=True, slots=True)
class Owner:
    """Slots [start, stop) of an axis belong to `rank`; the first `real` of them hold tokens, the rest is padding."""

    start: int
    stop: int
    real: int
    rank: int


@dataclass(frozen=True, slots=True)
class Plane:
    """Everything that is drawn.

    `some_heads`: tiles of some heads only are among it. `ranks_each`: how many ranks each `rank` of a part or an owner
    means; above 1 parts have no steps.
    """

    rows: int
    columns: int
    blocks: tuple[Block, ...]
    parts: tuple[PlacedTile, ...]
    owners_q: tuple[Owner, ...]
    owners_kv: tuple[Owner, ...]
    some_heads: bool = False
    ranks_each: int = 1

    def ranks_of(self, rank: int, ranks: int) -> str:
        """The ranks that a part's or an owner's `rank` means, of all `ranks`: "3", or "24-31"."""
        first, last = rank * self.ranks_each, min((rank + 1) * self.ranks_each, ranks) - 1
        return str(first) if first == last else f"{first}-{last}"

    @property
    def steps(self) -> int:
        """The number of steps up to the last one that computes anything."""
        return 1 + max((p.step for p in self.parts), default=0)


def plane(problem: Problem, schedule: Schedule, sequences: Iterable[int], head: int = 0) -> Plane:
    """The forward tiles of these sequences that hold query head `head`; the sequences lie on the diagonal. With areas,
    which reach from one to another, the whole buffer is one block.
    """
    blocks: dict[int, Block] = {}
    if problem.areas is not None:
        rows, columns = problem.starts_q[-1], problem.starts_kv[-1]
        blocks[0] = Block(0, Sequence(rows, columns, rows, columns), 0, 0)
        places_q, places_kv = (dict(enumerate(problem.starts(side)[:-1])) for side in ("q", "kv"))
    else:
        rows = columns = 0
        for number in sequences:
            sequence = problem.sequences[number]
            blocks[number] = Block(number, sequence, columns, rows)
            rows, columns = rows + sequence.slots_q, columns + sequence.slots_kv
        places_q, places_kv = {n: b.y for n, b in blocks.items()}, {n: b.x for n, b in blocks.items()}
    bands = [(lo, hi) for *_, lo, hi in problem.workload.areas.rows()]
    parts: list[PlacedTile] = []
    some_heads = False
    for direction, rank, number, step in schedule.steps():
        for tile in step.tiles.rows() if direction == "forward" else ():
            n, q0, q1, k0, k1, first, last = tile
            block = blocks.get(0 if problem.areas is not None else bisect_right(problem.starts_q, q0) - 1)
            if block is not None and first <= head < last:
                down, right = block.y - problem.starts_q[block.number], block.x - problem.starts_kv[block.number]
                box = Box(q0, q1, k0, k1, *bands[n]).moved(down, right)
                parts.append(PlacedTile(block, box, schedule.tile_text(tile), rank, number))
                some_heads |= (first, last) != (0, problem.heads_q)
    owners_q, owners_kv = _owners(problem, "q", places_q), _owners(problem, "kv", places_kv)
    return Plane(rows, columns, tuple(blocks.values()), tuple(parts), owners_q, owners_kv, some_heads)


def few_colours(view: Plane, ranks: int) -> Plane:
    """A plane whose parts and owners are those of up to 8 groups of ranks in a row, if there are more than 16 ranks.
    Parts of one group that touch become one.
    """
    if ranks <= 2 * _COLOURS:
        return view
    each = -(-ranks // _COLOURS)
    found: dict[tuple[int, int], list[Box]] = defaultdict(list)  # by block and group
    for part in view.parts:
        found[part.block.number, part.rank // each].append(part.box.cropped())
    blocks = {block.number: block for block in view.blocks}
    parts: list[PlacedTile] = []
    for (number, group), boxes in found.items():
        boxes = _merged(sorted(boxes, key=lambda b: (b.q0, b.q1, b.k0)))
        boxes = _merged(sorted(boxes, key=lambda b: (b.k0, b.q0)))
        parts += [PlacedTile(blocks[number], box, "all steps", group, 0) for box in boxes]
    owners = (_together(side, each) for side in (view.owners_q, view.owners_kv))
    return replace(view, parts=tuple(parts), owners_q=next(owners), owners_kv=next(owners), ranks_each=each)


def _merged(boxes: list[Box]) -> list[Box]:
    """Boxes, each joined with those before it as long as one box has the pairs of both."""
    kept: list[Box] = []
    for box in boxes:
        joined = _joined(kept[-1], box) if kept else None
        kept[-1:] = [joined] if joined is not None else [*kept[-1:], box]
    return kept


def _joined(a: Box, b: Box) -> Box | None:
    """The box with exactly the pairs of two boxes that touch; None where no box has them.

    >>> _joined(Box(2, 4, 0, 2), Box(2, 4, 2, 4, -9, 0))
    Box(q0=2, q1=4, k0=0, k1=4, lo=-9, hi=0)
    """
    beside = (a.q0, a.q1) == (b.q0, b.q1) and a.k1 == b.k0
    if not beside and not (a.q1 == b.q0 and a.k0 == b.k0):
        return None
    edges = min(a.q0, b.q0), max(a.q1, b.q1), min(a.k0, b.k0), max(a.k1, b.k1)
    if a.full and b.full and (beside or a.k1 == b.k1):
        return Box(*edges)
    for band in {(a.lo, a.hi), (b.lo, b.hi)}:
        whole = Box(*edges, *band)
        if whole.pairs == a.pairs + b.pairs and all(whole.within(*x[:4]).pairs == x.pairs for x in (a, b)):
            return whole
    return None


def _together(owners: tuple[Owner, ...], each: int) -> tuple[Owner, ...]:
    """Owners as groups of ranks; those without padding between them are one."""
    kept: list[Owner] = []
    for one in owners:
        last, group = kept[-1] if kept else None, one.rank // each
        if last and (last.rank, last.stop, last.real) == (group, one.start, last.stop - last.start):
            kept[-1] = Owner(last.start, one.stop, last.real + one.real, group)
        else:
            kept.append(replace(one, rank=group))
    return tuple(kept)


def _owners(problem: Problem, side: str, places: dict[int, int]) -> tuple[Owner, ...]:
    """Who owns the slots of these sequences; `places`: where each begins in the plane."""
    owners: list[Owner] = []
    starts, lengths, slots = np.array(problem.starts(side)), problem.lengths.tokens(side), problem.slots.side(side)
    for seq, place in places.items():
        first = int(starts[seq])
        for rank, start, stop, _ in slots.within(starts[seq : seq + 1], starts[seq + 1 : seq + 2]).rows():
            real = max(min(stop - first, lengths[seq]) - (start - first), 0)
            owners.append(Owner(start - first + place, stop - first + place, real, rank))
    return tuple(sorted(owners, key=lambda o: o.start))
