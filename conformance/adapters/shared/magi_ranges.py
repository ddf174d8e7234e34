"""Attention slices as MagiAttention has them: pairs of ranges, whose diagonals begin and end in their corners."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from cp_ref.schedules.attention_slices import AttentionSlices

__all__ = ["MagiRange", "magi_ranges"]


class MagiRange(NamedTuple):
    """Query rows, key rows, and "full", "causal" (aligned to the last row and key), "inv_causal" (to the first ones) or
    "bi_causal" (both).
    """

    q_range: tuple[int, int]
    k_range: tuple[int, int]
    mask_type: str


def magi_ranges(slices: AttentionSlices) -> list[MagiRange]:
    """The same visible pairs. An attention slice is cut where an edge of its diagonal band meets a side of its
    rectangle: then each part's edge of the band goes through a corner, or hides nothing.

    >>> for part in magi_ranges(AttentionSlices.parse("area q[0:4] k[0:3] band 0:1")):
    ...     print(*part)
    (0, 2) (0, 3) bi_causal
    (2, 3) (2, 3) inv_causal
    """
    return [part for row in slices.rows() for part in _parts(*row)]


def _parts(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> list[MagiRange]:
    """Query row i sees keys from max(k0, i + lo) to min(k1, i + hi + 1)."""
    begin, end = max(q0, k0 - hi), min(q1, k1 - lo)  # the rows that see a key
    if begin >= end or k0 >= k1:
        return []
    cuts = sorted({begin, end, *(cut for cut in (k0 - lo, k1 - hi) if begin < cut < end)})
    found = []
    for a, b in pairwise(cuts):
        below, above = a + lo >= k0, b + hi <= k1
        keys = (a + lo if below else k0, b + hi if above else k1)
        found.append(MagiRange((a, b), keys, _TYPES[below, above]))
    return found


_TYPES = {
    (False, False): "full",
    (False, True): "causal",
    (True, False): "inv_causal",
    (True, True): "bi_causal",
}
