"""Hypothesis strategies: whole cases that an implementation should be able to run, small and quick to shrink.

Everything is drawn in one `@composite`, simplest choice first, so that a failing case shrinks to one short line of
text. How long sequences are, and how many, is in `batched` and `packed`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from conformance.case import ALIBI, GRADS, PRECISE_FIRST, Case
from conformance.checks.reference import masks
from conformance.problems.capabilities import EVERYTHING, Capabilities
from conformance.problems.features import SCORE_AXES
from cp_ref.problems.arguments import OF_PLACES
from cp_ref.problems.read_problem import check_one_document
from cp_ref.schedules.areas import UNBOUNDED, Areas, WindowRow, crop
from cp_ref.schedules.ownership import divisor
from cp_ref.schedules.problem import Problem, Sequence

__all__ = [
    "CP_SIZES",
    "FEW_SIZES",
    "OFTEN_EXACT",
    "SHAPES",
    "Units",
    "areas",
    "batched",
    "cases",
    "named_areas",
    "packed",
    "problems",
    "tables",
]

# ---- lengths
#
# Hypothesis strategies for the sequences of a problem: lengths, padding, and how many there are.
#
# Most problems have a few sequences of some dozen tokens, which is where nearly every bug shows, and plays in
# milliseconds. The rest have these shapes:
#
#     few     up to 4 sequences, up to some 50 slots together
#     tile    1 or 2 sequences, of 64, 96 or 128 tokens or one more or less: the borders of a kernel's tiles
#     huge    1 sequence of 256 to 768 tokens
#     many    hundreds of sequences of a few tokens each (thousands are among the special cases)
#
# Lengths favour what breaks: nothing at all, one token, one more or less than a chunk or a tile, full of padding.
#
# A few sequences are drawn first, always; the shape comes last and only makes them longer, or repeats them. So a large
# problem that fails shrinks to the small one inside it.


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


# ---- areas
#
# Areas for the strategies: the global score matrix cut again and again, and some of the parts; and named masks.


_CUTS = 6  # of the matrix, at most

Part = tuple[int, int, int, int, int, int]  # a row of `Areas`


@st.composite
def areas(draw: DrawFn, sequences: tuple[Sequence, ...]) -> tuple[WindowRow, ...]:
    """Areas of a packed batch: any that are disjoint, over documents and padding, or a named mask in each document."""
    rows_q, rows_kv = sum(s.slots_q for s in sequences), sum(s.slots_kv for s in sequences)
    itself = all((s.len_q, s.slots_q) == (s.len_kv, s.slots_kv) for s in sequences)
    if itself and draw(st.booleans()):
        return draw(named_areas(sequences))
    parts: list[Part] = [(0, rows_q, 0, rows_kv, -UNBOUNDED, UNBOUNDED)]
    for _ in range(draw(st.integers(1, _CUTS))):
        number = draw(st.integers(0, len(parts) - 1))
        parts[number : number + 1] = draw(_cut(parts[number]))
    kept = _cropped([part for part in parts if draw(st.integers(0, 3))])
    return tuple(zip(*(x.tolist() for x in (*kept.columns[:4], kept.left, kept.right)), strict=True))


@st.composite
def _cut(draw: DrawFn, part: Part) -> list[Part]:
    """A part in two: by query rows, by keys, or along a diagonal."""
    q0, q1, k0, k1, lo, hi = part
    axis = draw(st.sampled_from(["queries", "keys", "diagonal"]))
    if axis == "queries":
        at = draw(st.integers(q0, q1))
        return [(q0, at, k0, k1, lo, hi), (at, q1, k0, k1, lo, hi)]
    if axis == "keys":
        at = draw(st.integers(k0, k1))
        return [(q0, q1, k0, at, lo, hi), (q0, q1, at, k1, lo, hi)]
    at = draw(st.integers(k0 - q1, k1 - q0))
    return [(q0, q1, k0, k1, lo, min(hi, at)), (q0, q1, k0, k1, max(lo, at + 1), hi)]


def _cropped(parts: list[Part]) -> Areas:
    """The parts that see anything, as small as they come: so their windows have sides of at least 0."""
    found = Areas.of_rows(parts)
    found = found.take(found.pairs > 0)
    return Areas(*crop(*found.columns), found.lo, found.hi)


@st.composite
def named_areas(draw: DrawFn, sequences: tuple[Sequence, ...]) -> tuple[WindowRow, ...]:
    """A mask by name in each document."""
    made: list[Any] = []
    starts = np.cumsum([0, *(s.slots_q for s in sequences)])
    for s in sequences:
        made.append(draw(_of_document(s.len_q)) if s.len_q else masks.documents([0]))
    found = masks.packed(made, starts.tolist())
    return tuple(map(tuple, found.tolist()))


@st.composite
def _of_document(draw: DrawFn, length: int) -> Any:
    below, some = st.integers(0, length), st.integers(1, length)
    kind = draw(st.sampled_from(["prefix_lm", "shared_prefix", "tree", "block_causal", "chunked", "first", "dilated"]))
    if kind == "prefix_lm":
        return masks.prefix_lm(draw(below), length)
    if kind == "block_causal":
        return masks.block_causal(length, draw(some))
    if kind == "chunked":
        return masks.chunked(length, draw(some))
    if kind == "first":
        return masks.first_tokens_and_window(length, draw(below), draw(below))
    if kind == "dilated":
        return masks.dilated_blocks(length, draw(st.integers(-(-length // 6), length)), draw(st.integers(1, 3)))
    cuts = sorted(draw(st.lists(below, max_size=4)))
    lengths = np.diff([0, *cuts, length]).tolist()
    if kind == "shared_prefix":
        return masks.shared_prefix(lengths[0], lengths[1:])
    return masks.tree(lengths, [draw(st.integers(-1, n - 1)) for n in range(len(lengths))])


# ---- problems and cases


CP_SIZES = (1, 2, 3, 4, 5, 6, 8)
FEW_SIZES = (2, 3, 4, 8, 1)  # Those of the levels linear and sparse, and their dtypes.
OFTEN_EXACT = ("float64", *PRECISE_FIRST)
_HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (3, 3), (6, 2), (4, 1), (8, 4), (6, 3), (12, 2))  # (h_q, h_kv).
_FEW_HEADS = ((1, 1), (2, 1), (2, 2))
_FEW_ROWS = 250  # Areas are drawn for at most this many queries and keys.
_DIMS = ((8, 8), (8, 16), (16, 8), (24, 16), (5, 5), (1, 3))  # (d_qk, d_v): cheap, and enough for most bugs.
_REAL_DIMS = ((64, 64), (128, 128), (96, 96), (192, 128), (128, 192), (256, 256), (128, 64))  # Those of models.
_ODD_DIMS = ((24, 24), (40, 40), (72, 72), (88, 56), (104, 104), (33, 17), (20, 12), (248, 8))  # Those of no model.


@st.composite
def problems(
    draw: DrawFn,
    capabilities: Capabilities = EVERYTHING,
    *,
    cp_sizes: Seq[int] = CP_SIZES,
    dtypes: Seq[str] = ("float64", "float32"),
) -> Problem:
    """A problem with every feature inside `capabilities`; `dtypes` are further narrowed to what is supported."""
    has = capabilities.has
    # The simplest choice is drawn most, and a failing case shrinks to it: a group of 2 tells more than one of 1.
    cp_size = draw(st.sampled_from(sorted(cp_sizes, key=lambda n: (n == 1, n))))
    comm = draw(_choice(capabilities, "cp_comm_type"))
    layout = draw(_choice(capabilities, "layout"))
    qkv_format = draw(_choice(capabilities, "qkv_format"))
    mask = draw(_choice(capabilities, "attn_mask_type"))
    a2a_size = draw(_a2a_sizes(comm, cp_size))
    dtype = draw(st.sampled_from([d for d in dtypes if has("dtype", d)] or list(capabilities.choices["dtype"])))
    long, cross = dtype in ("bfloat16", "float16"), has("lengths", "cross") and layout != "balanced"
    if layout == "balanced" and qkv_format != "thd" and not mask.startswith("padding"):
        mask = "padding" if mask == "no_mask" else f"padding_{mask}"
    whole = _units(layout, cp_size, uneven=has("lengths", "uneven") and draw(st.booleans()))
    if qkv_format == "thd":
        shape, sequences = draw(packed(whole, cp_size, cross=cross, long=long))
    else:
        padding = mask.startswith("padding")
        shape, sequences = draw(batched(whole, cp_size, padding=padding, cross=cross, long=long))
    big = shape in ("huge", "many")
    heads_q, heads_kv = draw(_heads(a2a_size, has("heads", "grouped"), _FEW_HEADS if big else _HEADS))
    d_qk, d_v = draw(_dims(capabilities, big))
    of_places = any(len(capabilities.choices[name]) > 1 for name in OF_PLACES) and draw(st.booleans())
    problem = Problem(
        cp_size=cp_size,
        sequences=sequences,
        cp_comm_type=comm,
        a2a_size=a2a_size,
        layout=layout,
        qkv_format=qkv_format,
        attn_mask_type=mask,
        window_size=draw(_windows(capabilities, "causal" in mask, _chunk(sequences, cp_size))),
        heads_q=heads_q,
        heads_kv=heads_kv,
        d_qk=d_qk,
        d_v=d_v,
        softmax_scale=draw(st.sampled_from([None, 1.0, 0.25])) if d_qk <= 24 else None,
        dtype=dtype,
        **{
            axis.option: draw(st.sampled_from([x for x in axis.drawn if has(axis.option, axis.choice_of(x))]))
            for axis in SCORE_AXES
            if of_places or axis.option not in OF_PLACES
        },
    )
    few = sum(s.slots_q + s.slots_kv for s in sequences) <= _FEW_ROWS
    if qkv_format == "thd" and few and has("areas", "areas") and draw(st.integers(0, 7)) == 7:
        problem = replace(problem, areas=draw(areas(sequences)), attn_mask_type="causal", window_size=(-1, -1))
        if not _in_documents(problem):
            problem = replace(problem, **OF_PLACES)
    return problem


def _in_documents(problem: Problem) -> bool:
    """Whether no area connects two documents, so that pairs have places."""
    try:
        check_one_document(problem, "a score of places")
    except ValueError:
        return False
    return True


@st.composite
def cases(draw: DrawFn, capabilities: Capabilities = EVERYTHING, **narrowed: Any) -> Case:
    """A case of a problem from `problems`, which takes the other arguments."""
    problem = draw(problems(capabilities, **narrowed))
    tails = st.integers(0, 3).map(lambda part: part * problem.cp_size) if problem.qkv_format == "thd" else st.just(0)
    return_lse = draw(st.booleans())
    has_slopes = "alibi" in capabilities.wishes and _in_documents(problem) and draw(st.booleans())
    return Case(
        problem,
        tail_q=draw(tails),
        tail_kv=draw(tails),
        seed=draw(st.integers(0, 999)),
        magnitude=draw(st.sampled_from([1.0, 1.0, 12.0])) if problem.dtype == "float64" else 1.0,
        return_lse=return_lse,
        return_max_logit=draw(st.booleans()),
        loss=draw(st.sampled_from(["out", "out+lse", "lse"])) if return_lse else "out",
        grads=draw(st.sampled_from(["qkvo"] * 8 + [g for g in GRADS if g != "qkvo"])),
        strided=draw(st.booleans()),
        use_plan=draw(st.booleans()),
        deterministic=draw(st.booleans()),
        alibi=draw(st.sampled_from(ALIBI)) if has_slopes else "",
    )


@st.composite
def tables(draw: DrawFn, slots: Seq[int], cp_size: int) -> tuple[tuple[int, int, int, int], ...]:
    """A layout as a user gives it: every sequence cut anywhere, the parts on any rank, in any order.

    Args:
        slots: of each sequence.
    """
    rows: list[tuple[int, int, int, int]] = []
    for sequence, length in enumerate(slots):
        edges = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=4))})
        rows += [(draw(st.integers(0, cp_size - 1)), sequence, a, b) for a, b in pairwise(edges)]
    return tuple(sorted(draw(st.permutations(rows)), key=lambda row: row[0]))


def _units(layout: str, cp_size: int, *, uneven: bool) -> Units:
    """The divisor of all lengths, if the layout must cut them into equal parts."""
    if uneven or layout == "balanced":
        return Units(1, 1)
    return Units(divisor(layout, cp_size), 1) if layout == "dual_chunk" else Units(1, cp_size)


def _choice(capabilities: Capabilities, axis: str) -> SearchStrategy[str]:
    return st.sampled_from(capabilities.choices[axis])


def _a2a_sizes(comm: str, cp_size: int) -> SearchStrategy[int]:
    if comm == "a2a":
        return st.just(cp_size)
    if comm == "a2a+p2p":
        inner = [n for n in range(2, cp_size) if cp_size % n == 0]  # Two levels, both of several ranks.
        return st.sampled_from([*inner * 2, 1, cp_size])
    return st.just(1)


@st.composite
def _heads(draw: DrawFn, a2a_size: int, grouped: bool, choices: Seq[tuple[int, int]]) -> tuple[int, int]:
    """(h_q, h_kv). With an a2a, h_q is a multiple of its size, and h_kv a multiple or a divisor."""
    heads_q, heads_kv = draw(st.sampled_from([h for h in choices if grouped or h[0] == h[1]]))
    if heads_kv % a2a_size and a2a_size % heads_kv:
        heads_kv = 1
    heads_q = lcm(heads_q, heads_kv, a2a_size)
    return heads_q, heads_kv if grouped else heads_q


@st.composite
def _dims(draw: DrawFn, capabilities: Capabilities, big: bool) -> tuple[int, int]:
    """(d_qk, d_v): mostly small; those of models and odd ones with few tokens."""
    kind = "small" if big else draw(st.sampled_from(["small"] * 5 + ["real", "odd"]))
    choices = {"small": _DIMS[:3] if big else _DIMS, "real": _REAL_DIMS, "odd": _ODD_DIMS}[kind]
    return draw(st.sampled_from([dims for dims in choices if _has_dims(capabilities, *dims)] or [(8, 8)]))


def _has_dims(capabilities: Capabilities, d_qk: int, d_v: int) -> bool:
    needed = {"odd"} if d_qk % 8 or d_v % 8 else set()
    needed |= {"d_v smaller"} if d_v < d_qk else {"d_v larger"} if d_v > d_qk else set()
    return needed <= set(capabilities.choices["dims"])


def _chunk(sequences: tuple[Sequence, ...], cp_size: int) -> int:
    return max((max(s.slots_q, s.slots_kv) for s in sequences), default=0) // (2 * cp_size)


@st.composite
def _windows(draw: DrawFn, capabilities: Capabilities, causal: bool, chunk: int) -> tuple[int, int]:
    """(left, right): unbounded, 0, 1, at the border of a chunk, any size, beyond the sequence."""
    borders = [n for n in (chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk) if n >= 0]
    side = st.one_of(st.just(-1), st.sampled_from([0, 1, 200, *borders]), st.integers(0, 24))
    has = capabilities.has
    if causal:  # The right side is 0 for every argument.
        return (draw(side) if has("window", "left") else -1), draw(st.sampled_from([-1, 0, 5]))
    left = draw(side) if has("window", "left") else -1
    right = draw(side) if has("window", "both" if left >= 0 else "right") else -1
    return left, right
