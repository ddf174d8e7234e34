"""A context-parallel attention problem as integers: what is computed, with no tensor and no device in sight.

A `Problem` decides the visible pairs, the owners and the messages; two ranks that hold equal problems make equal
schedules. It has one canonical text, so a failing case can be printed, mailed and replayed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple, overload

import numpy as np

from cp_ref.schedules.areas import UNBOUNDED, Areas, WindowRow, areas_of_windows, crop
from cp_ref.schedules.balanced import balanced
from cp_ref.schedules.ownership import (
    Fragments,
    LayoutTable,
    Ownership,
    padded_to_cut,
    slots_of_lengths,
    slots_of_table,
)
from cp_ref.schedules.table import Column, Spans, starts_of
from cp_ref.schedules.values import parse_call
from cp_ref.schedules.words import canonical_layout

__all__ = [
    "Problem",
    "ScoreSpec",
    "Sequence",
    "Sequences",
    "Workload",
    "areas_of",
    "row_positions",
    "slice_rows",
    "slots_of",
    "table_of",
    "workload_of",
]


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: real tokens, and the slots it occupies (real tokens first, then its padding).

    In bshd and sbhd the slots are the tensor's sequence length; in thd they are the differences of
    `cu_seqlens_*_padded`.
    """

    len_q: int
    len_kv: int
    slots_q: int
    slots_kv: int


class Sequences(Seq[Sequence]):
    """A tuple of `Sequence` kept as four columns: each `Sequence` is made when it is read.

    Planning reads the columns, which are made in a millisecond for ten thousand sequences.

    Attributes:
        len_q, len_kv, slots_q, slots_kv: signed 64-bit integers, one a sequence; not to be written to.

    >>> two = Sequences([3, 4], [3, 4], [4, 4], [4, 4])
    >>> two[1], len(two), two == (Sequence(3, 3, 4, 4), Sequence(4, 4, 4, 4)), two.len_q.tolist()
    (Sequence(len_q=4, len_kv=4, slots_q=4, slots_kv=4), 2, True, [3, 4])
    """

    def __init__(
        self, len_q: Iterable[int], len_kv: Iterable[int], slots_q: Iterable[int], slots_kv: Iterable[int]
    ) -> None:
        self.len_q = array("q", len_q)
        self.len_kv = self.len_q if len_kv is len_q else array("q", len_kv)
        self.slots_q = self.len_q if slots_q is len_q else array("q", slots_q)
        self.slots_kv = self.slots_q if slots_kv is slots_q else array("q", slots_kv)

    @staticmethod
    def of(sequences: Seq[Sequence]) -> Sequences:
        """These sequences as columns."""
        if isinstance(sequences, Sequences):
            return sequences
        columns = ([s.len_q for s in sequences], [s.len_kv for s in sequences])
        return Sequences(*columns, [s.slots_q for s in sequences], [s.slots_kv for s in sequences])

    @property
    def columns(self) -> tuple[array[int], array[int], array[int], array[int]]:
        """len_q, len_kv, slots_q, slots_kv."""
        return self.len_q, self.len_kv, self.slots_q, self.slots_kv

    def tokens(self, side: str) -> array[int]:
        """The real tokens of each sequence on one side, "q" or "kv"."""
        return self.len_q if side == "q" else self.len_kv

    def slots(self, side: str) -> array[int]:
        """The slots of each sequence on one side, padding included."""
        return self.slots_q if side == "q" else self.slots_kv

    @cached_property
    def _sequences(self) -> tuple[Sequence, ...]:
        return tuple(map(Sequence, *self.columns))

    def __len__(self) -> int:
        return len(self.len_q)

    @overload
    def __getitem__(self, index: int) -> Sequence: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Sequence, ...]: ...
    def __getitem__(self, index: int | slice) -> Sequence | tuple[Sequence, ...]:
        return self._sequences[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequences):
            return self.columns == other.columns
        return self._sequences == other

    def __hash__(self) -> int:
        return hash(self._sequences)  # equal to a tuple, so its hash too

    def __repr__(self) -> str:
        return repr(self._sequences)


class ScoreSpec(NamedTuple):
    """How a score is made of a query and a key: s = scale * q.k, then softcap * tanh(s / softcap) if softcap > 0.
    `cp_ref.calls.scores` has what follows: ALiBi, score_mod, dropout.
    """

    scale: float
    softcap: float = 0.0  # 0 for none
    score_mod: str = ""  # the digest of a function; "" for none
    dropout_p: float = 0.0  # 0 for none


@dataclass(frozen=True)
class Problem:
    """One attention call over all ranks. Lengths in tokens, global (before sharding).

    `window_size` is (left, right) with -1 for unbounded, as the user gave it. `areas`, as the user gave them, replace
    mask and window, which then have their defaults and mean nothing. `a2a_size` is the size of the inner group of
    "a2a+p2p"; it is `cp_size` for "a2a" and 1 for the others. `layout` is one of `LAYOUTS` ("zigzag" becomes
    "dual_chunk"), or a table: rows (rank, sequence, start, stop), in the order of each rank's buffer. `score_mod` is
    the digest of a function (`cp_ref.calls.scores`), "" for none.

    >>> p = Problem(cp_size=2, sequences=(Sequence(7, 7, 8, 8),), attn_mask_type="padding_causal")
    >>> p.pairs
    28
    >>> Problem.parse(str(p)) == p
    True
    """

    cp_size: int
    sequences: Seq[Sequence]
    cp_comm_type: str = "p2p"
    a2a_size: int = 1
    layout: str | LayoutTable = "dual_chunk"
    qkv_format: str = "bshd"
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] = (-1, -1)
    areas: tuple[WindowRow, ...] | None = None
    heads_q: int = 1
    heads_kv: int = 1
    d_qk: int = 8
    d_v: int = 8
    softmax_scale: float | None = None
    softcap: float = 0.0
    softmax_type: str = "vanilla"
    score_mod: str = ""
    dropout_p: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", canonical_layout(self.layout))

    @property
    def causal(self) -> bool:
        """Whether a query never sees a later key than its own (aligned) position."""
        return self.areas is None and "causal" in self.attn_mask_type

    @property
    def position_free_scores(self) -> bool:
        """Whether a score depends on its query, its key and a slope of its head alone, and no pair is dropped. If not,
        a kernel needs the number of each row's document and of each head.
        """
        return not self.score_mod and self.dropout_p == 0

    @property
    def bottom_right(self) -> bool:
        """Whether the diagonal is aligned to the last query and the last key."""
        return self.areas is None and self.attn_mask_type.endswith("bottom_right")

    @property
    def scale(self) -> float:
        """The factor of q.k: `softmax_scale`, or d_qk ** -0.5."""
        return self.d_qk**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def scores(self) -> ScoreSpec:
        """The options of scores, for the place where scores are computed."""
        return ScoreSpec(self.scale, self.softcap, self.score_mod, self.dropout_p)

    @property
    def heads_per_kv(self) -> int:
        """How many query heads share a kv head."""
        return self.heads_q // self.heads_kv

    @cached_property
    def lengths(self) -> Sequences:
        """The sequences as columns of integers."""
        return Sequences.of(self.sequences)

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal for equal problems, and for no others; made from the columns in a millisecond."""
        digest = blake2b(repr([getattr(self, f.name) for f in fields(self) if f.name != "sequences"]).encode())
        columns = self.lengths.columns
        for number, column in enumerate(columns):  # of equal ones, ten thousand long, the first: of others its number
            same = next(n for n, other in enumerate(columns) if other is column or other == column)
            digest.update(bytes([same]))
            if same == number:
                digest.update(column.tobytes())
        return digest.digest()[:32]

    @cached_property
    def workload(self) -> Workload:
        """The problem as tables: areas and ownership."""
        return workload_of(self)

    @cached_property
    def slots(self) -> Ownership:
        """The owner of each slot, padding included: the layout."""
        return slots_of(self)

    @property
    def layout_name(self) -> str:
        """The layout in a word: "given" for a table."""
        return self.layout if isinstance(self.layout, str) else "given"

    @cached_property
    def starts_q(self) -> tuple[int, ...]:
        """Where each sequence's query slots begin in the packed global buffer, and their total:
        `cu_seqlens_q_padded`.
        """
        return tuple(accumulate(self.lengths.slots_q, initial=0))

    @cached_property
    def starts_kv(self) -> tuple[int, ...]:
        """The first slot of each sequence's keys in the global buffer, and the end: `cu_seqlens_kv_padded`."""
        return tuple(accumulate(self.lengths.slots_kv, initial=0))

    def starts(self, side: str) -> tuple[int, ...]:
        """`starts_q` or `starts_kv`; `side` is "q" or "kv"."""
        return self.starts_q if side == "q" else self.starts_kv

    @cached_property
    def pairs(self) -> int:
        """How many (query, key) pairs are visible, over all sequences; for each query head."""
        return int(self.workload.areas.pairs.sum())

    def __str__(self) -> str:
        """The canonical text, one line: every field that differs from its default. `parse` reads it back."""
        words: list[str] = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "sequences":
                value = [(s.len_q, s.len_kv, s.slots_q, s.slots_kv) for s in value]
            elif value == f.default:
                continue
            words.append(f"{f.name}={value!r}")
        return f"Problem({', '.join(words)})"

    @staticmethod
    def parse(text: str) -> Problem:
        """The problem that `str` printed. Raises ValueError on anything else."""
        try:
            _, unnamed, values = parse_call(text, ["Problem"])
            if unnamed:
                raise ValueError("every field has to be named")
            if "sequences" not in values:
                raise ValueError("sequences is missing")
            values["sequences"] = tuple(Sequence(*lengths) for lengths in values["sequences"])
            return Problem(**values)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"cannot read a problem from {text!r}: {error}") from error


def row_positions(problem: Problem, side: str, rows: Column) -> tuple[Column, Column]:
    """The sequence that each row of the global buffer belongs to, and which of its slots the row is.

    Args:
        side: "q" or "kv".
        rows: int64 [n], rows of sequences, padding included.

    >>> p = Problem(2, (Sequence(8, 8, 8, 8), Sequence(0, 0, 0, 0), Sequence(4, 4, 4, 4)), qkv_format="thd")
    >>> sequence, slot = row_positions(p, "q", np.array([0, 7, 8, 11]))
    >>> sequence.tolist(), slot.tolist()
    ([0, 0, 2, 2], [0, 7, 0, 3])
    """
    starts = np.array(problem.starts(side), dtype=np.int64)
    sequence = np.searchsorted(starts[:-1], rows, side="right") - 1
    return sequence, rows - starts[sequence]


# ---- the problem as tables: all that planners, `verify` and executors know of its sequences


@dataclass(frozen=True)
class Workload:
    """Areas, ownership of real tokens (padding is nobody's), heads, and how many ranks exchange heads for sequence."""

    areas: Areas
    ownership: Ownership
    heads_q: int = 1
    heads_kv: int = 1
    a2a_size: int = 1

    @property
    def cp_size(self) -> int:
        """How many ranks there are."""
        return self.ownership.cp_size

    @property
    def heads_per_kv(self) -> int:
        """How many query heads share a kv head."""
        return self.heads_q // self.heads_kv


def workload_of(problem: Problem) -> Workload:
    """The tables of a problem.

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


def areas_of(problem: Problem) -> Areas:
    """The areas: those that the user gave, or one per sequence, for its mask and window. They cover real tokens alone
    and are cut down to the rows and columns that see anything; a sequence without a visible pair has no area.
    """
    if problem.areas is not None:
        return _between_tokens(areas_of_windows(problem.areas), problem)
    (q_start, q_len), (k_start, k_len) = _tokens(problem, "q"), _tokens(problem, "kv")
    left, right = problem.window_size
    diagonal = k_start - q_start + (k_len - q_len if problem.bottom_right else 0)  # of the mask, in global rows
    right = 0 if problem.causal else right
    lo = np.full_like(diagonal, -UNBOUNDED) if left < 0 else diagonal - min(left, UNBOUNDED // 2)
    hi = np.full_like(diagonal, UNBOUNDED) if right < 0 else diagonal + min(right, UNBOUNDED // 2)
    q0, q1, k0, k1 = crop(q_start, q_start + q_len, k_start, k_start + k_len, lo, hi)
    there = (q0 < q1) & (k0 < k1) & (q_len > 0) & (k_len > 0) & (lo <= hi)
    areas = Areas(q0, q1, k0, k1, lo, hi)
    return areas if there.all() else areas.take(there)


def _between_tokens(areas: Areas, problem: Problem) -> Areas:
    """The pairs of real tokens: areas are cut where they reach over padding."""
    area, _, q0, q1 = areas.queries.overlaps(_stretches(problem, "q"))
    part, _, k0, k1 = areas.take(area).keys.overlaps(_stretches(problem, "kv"))
    area = area[part]
    lo, hi = areas.lo[area], areas.hi[area]
    q0, q1, k0, k1 = crop(q0[part], q1[part], k0, k1, lo, hi)
    return Areas(q0, q1, k0, k1, lo, hi).take((q0 < q1) & (k0 < k1))


def _stretches(problem: Problem, side: str) -> Spans:
    """The real tokens of one side as few spans."""
    start, length = _tokens(problem, side)
    some = length > 0
    return Spans(start[some], (start + length)[some]).merged()


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


# ---- the layout of a problem


def slice_rows(problem: Problem, side: str) -> int:
    """Rows of the sequence axis of every rank's slice of one side ("q" or "kv"): a share of the rows, rounded up."""
    lengths = problem.lengths.slots(side)
    held = problem.slots.side(side) if not isinstance(problem.layout, str) else None
    most = int((held.row + held.stop - held.start).max(initial=0)) if held is not None else 0
    if problem.qkv_format == "thd":
        return max(most, -(-sum(lengths) // problem.cp_size))
    share = padded_to_cut(max(lengths, default=0), problem.layout, problem.cp_size) // problem.cp_size
    return max(share, -(-most // max(len(lengths), 1)))


def slots_of(problem: Problem) -> Ownership:
    """The slots that each rank holds."""
    starts, layout, cp_size = starts_of(problem.lengths.slots_q), problem.layout, problem.cp_size
    if isinstance(layout, str) and layout != "balanced":
        packed, same = problem.qkv_format == "thd", problem.lengths.slots_q == problem.lengths.slots_kv
        q = slots_of_lengths(layout, starts, packed, cp_size)
        kv = q if same else slots_of_lengths(layout, starts_of(problem.lengths.slots_kv), packed, cp_size)
        return Ownership(cp_size, q, kv)
    if layout == "balanced":
        tokens = np.array(problem.lengths.len_q, dtype=np.int64)
        own = balanced(starts, tokens, areas_of(problem), cp_size)
    else:
        own = slots_of_table(layout, starts)
    return Ownership(cp_size, own, own)


def table_of(problem: Problem) -> Problem:
    """The same problem, its layout as a table.

    >>> even = Problem(2, Sequences([4, 2], [4, 2], [4, 2], [4, 2]), layout="contiguous", qkv_format="thd")
    >>> table_of(even).layout
    ((0, 0, 0, 3), (1, 0, 3, 4), (1, 1, 0, 2))
    """
    starts = starts_of(problem.lengths.slots_q)
    held = problem.slots.q.within(starts[:-1], starts[1:])
    sequence = np.searchsorted(starts, held.start, side="right") - 1
    columns = held.rank, sequence, held.start - starts[sequence], held.stop - starts[sequence]
    return replace(problem, layout=tuple(zip(*(column.tolist() for column in columns), strict=True)))
