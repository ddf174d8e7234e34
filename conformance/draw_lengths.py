"""Hypothesis strategies for the sequences of a problem: lengths, padding, and how many there are.

Most problems have a few sequences of some dozen tokens, which is where nearly every bug shows, and plays in
milliseconds. The rest have a shape of their own:

    few     up to 4 sequences, up to some 50 slots together
    tile    1 or 2 sequences, at or beside 64, 96, 128 tokens: the borders of a kernel's tiles
    huge    1 sequence of 256 to 768 tokens
    many    hundreds of sequences of a few tokens each (thousands are among the special cases)

Lengths favour what breaks: nothing at all, one token, one more or less than a chunk or a tile, full of padding.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from cp_ref.spec import Sequence, divisor

__all__ = ["SHAPES", "batched", "packed", "rarely", "shapes"]

SHAPES = ("few", "tile", "huge", "many")
_MOST_SLOTS = 48  # of one sequence, roughly: a chunk at least
_TILES = (64, 128, 96)
_HUGE = (256, 384, 511, 512, 513, 768)
_MANY = (60, 129, 257, 400, 600)

Side = list[tuple[int, int]]  # (length, slots) of every sequence


def shapes(*, long: bool = False) -> SearchStrategy[str]:
    """A shape: most are few, and the expensive ones are rare. Shrinks to few.

    long: more tiles, for low precision, where errors in short rows say little.
    """
    return st.sampled_from(["few"] * 42 + ["tile"] * (36 if long else 6) + ["huge", "many"])


def rarely() -> SearchStrategy[bool]:
    """One time in eight; what it guards is left out when a case shrinks."""
    return st.sampled_from([*[False] * 7, True])


@st.composite
def batched(draw: DrawFn, shape: str, layout: str, cp_size: int, *, padding: bool, cross: bool) -> tuple[Sequence, ...]:
    """bshd and sbhd: one number of slots for the whole batch."""
    unit = divisor(layout, cp_size)
    batch_size = draw(st.integers(1, 3)) if shape == "few" else 40 if shape == "many" else 1
    slots_q = draw(_batched_slots(shape, unit, batch_size))
    slots_kv = slots_q
    if cross and draw(st.booleans()):
        slots_kv = draw(_batched_slots("few" if shape == "many" else shape, unit, batch_size))
    if not padding:
        return (Sequence(slots_q, slots_kv, slots_q, slots_kv),) * batch_size
    same = slots_kv == slots_q and (not cross or draw(st.booleans()))
    drawn: list[Sequence] = []
    for _ in range(min(batch_size, 4)):
        len_q = draw(_lengths(slots_q, slots_q // (2 * cp_size)))
        len_kv = len_q if same else draw(_lengths(slots_kv, slots_kv // (2 * cp_size)))
        drawn.append(Sequence(len_q, len_kv, slots_q, slots_kv))
    return tuple(drawn[n % len(drawn)] for n in range(batch_size))


@st.composite
def packed(draw: DrawFn, shape: str, layout: str, cp_size: int, *, cross: bool) -> tuple[Sequence, ...]:
    """thd: every sequence has its own number of slots, and its own padding."""
    if shape == "many":
        count = draw(st.sampled_from(_MANY))
    elif shape == "few":
        count = 0 if draw(rarely()) else draw(st.integers(1, 4))
    else:
        count = draw(st.integers(1, 2)) if shape == "tile" else 1
    same = not cross or draw(st.booleans())
    sides = [draw(_packed_side(shape, layout, cp_size, count)) for _ in range(1 if same else 2)]
    return tuple(Sequence(q[0], kv[0], q[1], kv[1]) for q, kv in zip(sides[0], sides[-1], strict=True))


def _lengths(slots: int, chunk: int) -> SearchStrategy[int]:
    """Real tokens in `slots` slots: full, empty, one, or at the border of a chunk or a tile."""
    borders = {n * chunk + off for n in range(min(slots // chunk, 16) + 1) for off in (-1, 0, 1)} if chunk else set()
    borders |= {tile + off for tile in _TILES for off in (-1, 0, 1)}
    special = sorted(n for n in borders | {0, 1, slots - 1} if 0 <= n <= slots)
    return st.one_of(st.just(slots), st.integers(0, slots), st.sampled_from(special))


def _targets(shape: str) -> SearchStrategy[int]:
    """How long a sequence of the shape tile or huge is meant to be."""
    if shape == "huge":
        return st.sampled_from(_HUGE)
    return st.tuples(st.sampled_from(_TILES), st.sampled_from((0, -1, 1))).map(sum)


@st.composite
def _batched_slots(draw: DrawFn, shape: str, unit: int, batch_size: int) -> int:
    if shape in ("tile", "huge"):
        return -(-draw(_targets(shape)) // unit) * unit
    most = max(1, _MOST_SLOTS // (unit * batch_size))
    return 0 if draw(rarely()) else unit * draw(st.integers(1, most))


@st.composite
def _packed_side(draw: DrawFn, shape: str, layout: str, cp_size: int, count: int) -> Side:
    padded = draw(st.booleans())
    drawn: Side = [
        draw(_packed_sequence(shape, layout, cp_size, count, padded=padded))
        for _ in range(min(count, 5 if shape == "many" else count))
    ]
    found = [drawn[n % len(drawn)] for n in range(count)]  # thousands of sequences repeat a few
    if layout == "contiguous" and found:
        rest = -sum(slots for _, slots in found) % cp_size
        length, slots = found[-1]
        found[-1] = (length if padded else length + rest, slots + rest)
    return found


@st.composite
def _packed_sequence(
    draw: DrawFn, shape: str, layout: str, cp_size: int, count: int, *, padded: bool
) -> tuple[int, int]:
    """(length, slots)."""
    if layout == "dual_chunk":
        unit = 2 * cp_size
        if shape in ("tile", "huge"):
            length = draw(_targets(shape))
            slots = -(-length // unit) * unit
            return (length if padded else slots), slots
        most = 2 if shape == "many" else max(1, _MOST_SLOTS // (unit * count))
        slots = 0 if draw(rarely()) else unit * draw(st.integers(1, most))
        return (draw(_lengths(slots, slots // unit)) if padded else slots), slots
    # only the whole buffer has to divide: sequences begin and end anywhere, also in the middle of a rank
    if shape in ("tile", "huge"):
        length = draw(_targets(shape))
    else:
        most = 6 if shape == "many" else 2 * _MOST_SLOTS // count
        length = draw(st.one_of(st.integers(0, most), st.sampled_from([0, 1, cp_size, cp_size + 1])))
    return length, length + (draw(st.integers(0, 3)) if padded else 0)
