"""Hypothesis strategies for the sequences of a problem: lengths, padding, and how many there are.

Most problems have a few sequences of some dozen tokens, which is where nearly every bug shows, and plays in
milliseconds. The rest have these shapes:

    few     up to 4 sequences, up to some 50 slots together
    tile    1 or 2 sequences, at or beside 64, 96, 128 tokens: the borders of a kernel's tiles
    huge    1 sequence of 256 to 768 tokens
    many    hundreds of sequences of a few tokens each (thousands are among the special cases)

Lengths favour what breaks: nothing at all, one token, one more or less than a chunk or a tile, full of padding.

A few sequences are drawn first, always; the shape comes last and only makes them longer, or repeats them. So a large
problem that fails shrinks to the small one inside it.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from cp_ref.schedules.problem import Sequence

__all__ = ["SHAPES", "Units", "batched", "packed"]

SHAPES = ("few", "tile", "huge", "many")
_MOST_SLOTS = 48  # of one sequence, roughly: a chunk at least
_TILES = (64, 128, 96)
_HUGE = (256, 384, 511, 512, 513, 768)
_MANY = (60, 129, 257, 400, 600)

_OFF_BY_ONE = st.sampled_from((0, -1, 1))

Side = list[tuple[int, int]]  # (length, slots) of every sequence


class Units(NamedTuple):
    """The divisors of each sequence's slots, and of all slots together."""

    each: int
    total: int


@st.composite
def batched(
    draw: DrawFn, units: Units, cp_size: int, *, padding: bool, cross: bool, long: bool = False
) -> tuple[str, tuple[Sequence, ...]]:
    """(shape, sequences) for bshd and sbhd: one number of slots for the whole batch.

    long: more tiles, for low precision, where errors in short rows say little.
    """
    unit = units.each * units.total
    batch_size = draw(st.integers(1, 3))
    sides = [draw(_few_slots(unit, batch_size))]
    sides.append(draw(_few_slots(unit, batch_size)) if cross and draw(st.booleans()) else sides[0])
    same = sides[0] == sides[1] and (not cross or draw(st.booleans()))
    shape = draw(_shapes(long))
    if shape in ("tile", "huge"):
        batch_size = 1
        one = draw(_target(shape, unit))
        sides = [one, one if sides[0] == sides[1] else draw(_target(shape, unit))]
    slots_q, slots_kv = sides
    drawn = [Sequence(slots_q, slots_kv, slots_q, slots_kv)] * batch_size
    for n in range(batch_size if padding else 0):
        len_q = draw(_lengths(slots_q, slots_q // (2 * cp_size)))
        len_kv = len_q if same else draw(_lengths(slots_kv, slots_kv // (2 * cp_size)))
        drawn[n] = Sequence(len_q, len_kv, slots_q, slots_kv)
    if shape == "many":
        drawn = (drawn * 40)[:40]
    return shape, tuple(drawn)


@st.composite
def packed(
    draw: DrawFn, units: Units, cp_size: int, *, cross: bool, long: bool = False
) -> tuple[str, tuple[Sequence, ...]]:
    """(shape, sequences) for thd: every sequence has its own number of slots, and its own padding. long: as above."""
    count = 0 if draw(_rarely()) else draw(st.integers(1, 4))
    sides = [draw(_few_packed(units, cp_size, count))]
    sides.append(draw(_few_packed(units, cp_size, count)) if cross and draw(st.booleans()) else sides[0])
    shape = draw(_shapes(long)) if count else "few"
    if shape in ("tile", "huge"):
        different = sides[:1] if sides[0] is sides[1] else sides
        longer = [draw(_longer(side, shape, units)) for side in different]
        sides = [longer[0], longer[-1]]
    elif shape == "many":
        times = draw(st.sampled_from(_MANY))
        sides = [(side * times)[:times] for side in sides]
    found = [_divisible(side, units.total) for side in sides]
    return shape, tuple(Sequence(q[0], kv[0], q[1], kv[1]) for q, kv in zip(*found, strict=True))


def _shapes(long: bool) -> SearchStrategy[str]:
    """Most are few, and the expensive ones are rare. Shrinks to few."""
    return st.sampled_from(["few"] * 42 + ["tile"] * (36 if long else 6) + ["huge", "many"])


def _rarely() -> SearchStrategy[bool]:
    """One time in eight; what it guards is left out when a case shrinks."""
    return st.sampled_from([*[False] * 7, True])


def _lengths(slots: int, chunk: int) -> SearchStrategy[int]:
    """Real tokens in `slots` slots: full, empty, one, or at the border of a chunk or a tile."""
    borders = {n * chunk + off for n in range(min(slots // chunk, 16) + 1) for off in (-1, 0, 1)} if chunk else set()
    borders |= {tile + off for tile in _TILES for off in (-1, 0, 1)}
    special = sorted(n for n in borders | {0, 1, slots - 1} if 0 <= n <= slots)
    return st.one_of(st.just(slots), st.integers(0, slots), st.sampled_from(special))


@st.composite
def _few_slots(draw: DrawFn, unit: int, batch_size: int) -> int:
    most = max(1, _MOST_SLOTS // (unit * batch_size))
    return 0 if draw(_rarely()) else unit * draw(st.integers(1, most))


@st.composite
def _target(draw: DrawFn, shape: str, unit: int) -> int:
    """The length of a long sequence, up to the next multiple of `unit`."""
    length = draw(st.sampled_from(_HUGE)) if shape == "huge" else draw(st.sampled_from(_TILES)) + draw(_OFF_BY_ONE)
    return -(-length // unit) * unit


@st.composite
def _few_packed(draw: DrawFn, units: Units, cp_size: int, count: int) -> Side:
    padded = draw(st.booleans())
    return [draw(_few_packed_sequence(units, cp_size, count, padded=padded)) for _ in range(count)]


@st.composite
def _few_packed_sequence(draw: DrawFn, units: Units, cp_size: int, count: int, *, padded: bool) -> tuple[int, int]:
    """(length, slots)."""
    if (unit := units.each) > 1:
        slots = 0 if draw(_rarely()) else unit * draw(st.integers(1, max(1, _MOST_SLOTS // (unit * count))))
        return (draw(_lengths(slots, slots // unit)) if padded else slots), slots
    # sequences begin and end anywhere, also in the middle of a rank
    most = 2 * _MOST_SLOTS // count
    length = draw(st.one_of(st.integers(0, most), st.sampled_from([0, 1, cp_size, cp_size + 1])))
    return length, length + (draw(st.integers(0, 3)) if padded else 0)


@st.composite
def _longer(draw: DrawFn, side: Side, shape: str, units: Units) -> Side:
    """One sequence of hundreds, or up to two at the border of a tile; with padding where there was some."""
    found: Side = []
    for length, slots in side[: 1 if shape == "huge" else 2]:
        target = draw(_target(shape, 1))
        room = -(-target // units.each) * units.each
        found.append((target if length < slots else room, room))
    return found


def _divisible(side: Side, total: int) -> Side:
    """The last sequence as much longer as the whole buffer needs to divide."""
    rest = -sum(slots for _, slots in side) % total
    if not side or not rest:
        return side
    length, slots = side[-1]
    return [*side[:-1], (length if length < slots else length + rest, slots + rest)]
