"""Which rank owns which positions of which sequence, and at which row of its local buffer.

dual_chunk, cp_size 2, two sequences of 8 and 4 slots (each is cut in 2 * cp_size equal chunks):

    sequence 0:  | 0 1 | 2 3 | 4 5 | 6 7 |       sequence 1:  | 0 | 1 | 2 | 3 |
    owner           0     1     1     0                         0   1   1   0
    rank 0 holds, row by row:   0[0:2] 0[6:8] 1[0:1] 1[3:4]
    rank 1 holds:               0[2:4] 0[4:6] 1[1:2] 1[2:3]

A rank that owns an early chunk, which sees little under a causal mask, also owns the late chunk that sees much: chunk c
sees c and a half chunks of keys, so chunks r and 2 * cp_size - 1 - r together see 2 * cp_size, on every rank.

contiguous cuts the whole into cp_size equal parts: the packed buffer in thd, every sequence in bshd and sbhd.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from cp_ref.spec.problem import Problem

__all__ = ["Fragment", "check_divides", "divisor", "kv_fragments", "local_slots", "ownership", "q_fragments"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Positions [start, stop) of a sequence's slots, held by a rank at local rows [row, row + stop - start)."""

    seq: int
    start: int
    stop: int
    row: int


def divisor(layout: str, cp_size: int) -> int:
    """What a length has to divide by: 2 * cp_size for dual_chunk, cp_size for contiguous."""
    return 2 * cp_size if layout == "dual_chunk" else cp_size


def ownership(slots: Seq[int], layout: str, per_sequence: bool, cp_size: int, rank: int) -> tuple[Fragment, ...]:
    """The fragments that `rank` holds, in the order of its local rows.

    Args:
        slots: every sequence's number of slots (real tokens and padding).
        layout: "dual_chunk" or "contiguous".
        per_sequence: whether "contiguous" cuts every sequence (bshd, sbhd), or the packed buffer as a whole (thd).
        cp_size, rank: the group's size and the rank in it.

    Raises:
        ValueError: a length does not divide, naming the sequence, its length and the divisor.

    >>> ownership([8, 4], "dual_chunk", False, 2, 0)[:2]
    (Fragment(seq=0, start=0, stop=2, row=0), Fragment(seq=0, start=6, stop=8, row=2))
    >>> ownership([8, 4], "contiguous", False, 2, 1)
    (Fragment(seq=0, start=6, stop=8, row=0), Fragment(seq=1, start=0, stop=4, row=2))
    """
    check_divides(slots, layout, per_sequence, cp_size)
    if layout == "dual_chunk":
        spans = _dual_chunk_spans(slots, cp_size, rank)
    elif per_sequence:
        spans = [(s, *_part(n, cp_size, rank)) for s, n in enumerate(slots)]
    else:
        spans = _packed_part(slots, cp_size, rank)
    fragments: list[Fragment] = []
    row = 0
    for seq, start, stop in spans:
        if stop > start:
            fragments.append(Fragment(seq, start, stop, row))
            row += stop - start
    return tuple(fragments)


def check_divides(slots: Seq[int], layout: str, per_sequence: bool, cp_size: int) -> None:
    """Raise ValueError where a length cannot be cut evenly; the arguments are those of `ownership`."""
    unit = divisor(layout, cp_size)
    if layout == "dual_chunk":
        if gcd(*slots) % unit:  # of all of them at once
            seq, length = next((n, length) for n, length in enumerate(slots) if length % unit)
            raise ValueError(
                f"sequence {seq} has length {length}, padding included, but layout 'dual_chunk' at cp_size {cp_size} "
                f"needs a multiple of 2 * cp_size = {unit}"
            )
        return
    parts = [(f"sequence {n}", length) for n, length in enumerate(slots)] if per_sequence else []
    for what, length in parts or [("the packed buffer", sum(slots))]:
        if length % unit:
            raise ValueError(
                f"{what} has length {length}, padding included, but layout 'contiguous' at cp_size {cp_size} "
                f"needs a multiple of cp_size = {unit}"
            )


def _dual_chunk_spans(slots: Seq[int], cp_size: int, rank: int) -> list[tuple[int, int, int]]:
    spans: list[tuple[int, int, int]] = []
    late = 2 * cp_size - 1 - rank
    for seq, length in enumerate(slots):
        chunk = length // (2 * cp_size)
        spans += [(seq, rank * chunk, (rank + 1) * chunk), (seq, late * chunk, (late + 1) * chunk)]
    return spans


def _packed_part(slots: Seq[int], cp_size: int, rank: int) -> list[tuple[int, int, int]]:
    begin, end = _part(sum(slots), cp_size, rank)
    spans: list[tuple[int, int, int]] = []
    offset = 0
    for seq, length in enumerate(slots):
        spans.append((seq, max(begin - offset, 0), min(end - offset, length)))
        offset += length
    return spans


def _part(length: int, cp_size: int, rank: int) -> tuple[int, int]:
    part = length // cp_size
    return rank * part, (rank + 1) * part


@lru_cache(maxsize=512)
def q_fragments(problem: Problem, rank: int) -> tuple[Fragment, ...]:
    """The query positions that `rank` owns, padding slots included."""
    return ownership(problem.lengths.slots_q, problem.layout, problem.qkv_format != "thd", problem.cp_size, rank)


@lru_cache(maxsize=512)
def kv_fragments(problem: Problem, rank: int) -> tuple[Fragment, ...]:
    """The key positions that `rank` owns, padding slots included."""
    return ownership(problem.lengths.slots_kv, problem.layout, problem.qkv_format != "thd", problem.cp_size, rank)


def local_slots(fragments: Seq[Fragment]) -> int:
    """How many local rows the fragments fill."""
    return sum(f.stop - f.start for f in fragments)
