"""Attention slices for the strategies: the global score matrix cut again and again, and some of the parts; and named
masks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from conformance.judge.reference import masks
from cp_ref.schedules.attention_slices import UNBOUNDED, AttentionSliceRow, AttentionSlices, crop
from cp_ref.schedules.problem import Sequence

__all__ = ["areas"]

_CUTS = 6  # of the matrix, at most

Part = tuple[int, int, int, int, int, int]  # a row of `AttentionSlices`


@st.composite
def areas(draw: DrawFn, sequences: tuple[Sequence, ...]) -> tuple[AttentionSliceRow, ...]:
    """Attention slices of a packed batch: any that are disjoint, over documents and padding, or a named mask in each
    document.
    """
    rows_q, rows_kv = sum(s.slots_q for s in sequences), sum(s.slots_kv for s in sequences)
    itself = all((s.len_q, s.slots_q) == (s.len_kv, s.slots_kv) for s in sequences)
    if itself and draw(st.booleans()):
        return draw(_named(sequences))
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


def _cropped(parts: list[Part]) -> AttentionSlices:
    """The parts that see anything, as small as they come: so their windows have sides of at least 0."""
    found = AttentionSlices.of_rows(parts)
    found = found.take(found.pairs > 0)
    return AttentionSlices(*crop(*found.columns), found.lo, found.hi)


@st.composite
def _named(draw: DrawFn, sequences: tuple[Sequence, ...]) -> tuple[AttentionSliceRow, ...]:
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
