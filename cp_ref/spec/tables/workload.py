"""A problem as two tables, attention slices and ownership: all that planners, `verify` and executors know of its
sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ref.spec.masks.read_areas import areas_of_rows
from cp_ref.spec.tables.attention_slices import UNBOUNDED, AttentionSlices, crop
from cp_ref.spec.tables.ownership import Fragments, Ownership
from cp_ref.spec.tables.problem import Problem
from cp_ref.spec.tables.table import Column, overlaps, starts_of

__all__ = ["Workload", "areas_of", "workload_of"]


@dataclass(frozen=True)
class Workload:
    """Attention slices, ownership of real tokens (padding is nobody's), heads, and how many ranks exchange heads for
    sequence.
    """

    areas: AttentionSlices
    ownership: Ownership
    heads_q: int = 1
    heads_kv: int = 1
    a2a_size: int = 1

    @property
    def cp_size(self) -> int:
        """How many ranks there are."""
        return self.ownership.cp_size

    @property
    def group_size(self) -> int:
        """How many query heads share a kv head."""
        return self.heads_q // self.heads_kv


def workload_of(problem: Problem) -> Workload:
    """The tables of a problem.

    >>> from cp_ref.spec.tables.problem import Sequence
    >>> tables = workload_of(Problem(2, (Sequence(7, 7, 8, 8),), attn_mask_type="padding_causal"))
    >>> print(str(tables.areas) + str(tables.ownership), end="")
    area q[0:7] k[0:7] band *:0
    ownership cp_size 2
    rank 0 q[0:2] row 0
    rank 0 q[6:7] row 2
    rank 1 q[2:4] row 0
    rank 1 q[4:6] row 2
    rank 0 kv[0:2] row 0
    rank 0 kv[6:7] row 2
    rank 1 kv[2:4] row 0
    rank 1 kv[4:6] row 2
    """
    heads = problem.heads_q, problem.heads_kv
    return Workload(areas_of(problem), _ownership_of(problem), *heads, problem.a2a_size)


def areas_of(problem: Problem) -> AttentionSlices:
    """The attention slices: those that the user gave, or one per sequence, for its mask and window. They cover real
    tokens alone and are cut down to the rows and columns that see anything; a sequence without a visible pair has no
    attention slice.
    """
    if problem.areas is not None:
        return _between_tokens(areas_of_rows(problem.areas), problem)
    (q_start, q_len), (k_start, k_len) = _tokens(problem, "q"), _tokens(problem, "kv")
    left, right = problem.window_size
    diagonal = k_start - q_start + (k_len - q_len if problem.bottom_right else 0)  # of the mask, in global rows
    right = 0 if problem.causal else right
    lo = np.full_like(diagonal, -UNBOUNDED) if left < 0 else diagonal - min(left, UNBOUNDED // 2)
    hi = np.full_like(diagonal, UNBOUNDED) if right < 0 else diagonal + min(right, UNBOUNDED // 2)
    q0, q1, k0, k1 = crop(q_start, q_start + q_len, k_start, k_start + k_len, lo, hi)
    there = (q0 < q1) & (k0 < k1) & (q_len > 0) & (k_len > 0) & (lo <= hi)
    areas = AttentionSlices(q0, q1, k0, k1, lo, hi)
    return areas if there.all() else areas.take(there)


def _between_tokens(areas: AttentionSlices, problem: Problem) -> AttentionSlices:
    """The pairs of real tokens: attention slices are cut where they reach over padding."""
    area, _, q0, q1 = overlaps(areas.q_start, areas.q_stop, *_stretches(problem, "q"))
    part, _, k0, k1 = overlaps(areas.k_start[area], areas.k_stop[area], *_stretches(problem, "kv"))
    area = area[part]
    lo, hi = areas.lo[area], areas.hi[area]
    q0, q1, k0, k1 = crop(q0[part], q1[part], k0, k1, lo, hi)
    return AttentionSlices(q0, q1, k0, k1, lo, hi).take((q0 < q1) & (k0 < k1))


def _stretches(problem: Problem, side: str) -> tuple[Column, Column]:
    """The real tokens of one side as few spans: (start, stop)."""
    start, length = _tokens(problem, side)
    start, stop = start[length > 0], (start + length)[length > 0]
    apart = start[1:] != stop[:-1]
    return start[np.append(True, apart)[: len(start)]], stop[np.append(apart, True)[: len(stop)]]


def _ownership_of(problem: Problem) -> Ownership:
    lengths, q = problem.lengths, _real(problem, "q")
    same = lengths.len_q == lengths.len_kv and lengths.slots_q == lengths.slots_kv
    return Ownership(problem.cp_size, q, q if same else _real(problem, "kv"))


def _real(problem: Problem, side: str) -> Fragments:
    """The owners of the real tokens."""
    slots, (start, length) = problem.slots.side(side), _tokens(problem, side)
    padded = bool((start + length < starts_of(problem.lengths.slots(side))[1:]).any())
    return slots.within(start, start + length) if padded else slots


def _tokens(problem: Problem, side: str) -> tuple[Column, Column]:
    """Where the real tokens of each sequence begin in the global buffer, and how many there are."""
    lengths = problem.lengths
    return starts_of(lengths.slots(side))[:-1], np.array(lengths.tokens(side), dtype=np.int64)
