"""A problem as columns (see `columns`), and what each unit owns of it."""

from __future__ import annotations

from copy import copy
from functools import cached_property

import numpy as np

from cp_fast.planning.columns import Array, Band, Chunked, Owned, Spanned
from cp_fast.planning.loops import Loops, loops
from cp_ref.spec import Problem

__all__ = ["FAR", "Batch", "Edge", "position_spans"]

Chunk = tuple[int, int]  # a piece of a unit, by the numbers of its first chunk and of the one behind it
Edge = int | Array | None  # one side of the sequences' bands: the same for all, one each, or unbounded

FAR = 2**30  # beyond every position (or 2**60, where positions need 64 bits)


def position_spans(problem: Problem, rank: int) -> tuple[Array, Array]:
    """(first, number) of the positions of a rank's query slots, span by span in the order of its rows; those of one
    sequence in bshd and sbhd, where all have the same.
    """
    spans = Batch(problem).spans("q", problem.cp_size, rank)
    first, count = (np.stack(x, axis=1) for x in zip(*((a, b - a) for a, b in spans), strict=True))
    chosen = slice(None) if problem.qkv_format == "thd" else slice(1)
    return first[chosen].ravel().astype(np.int64), count[chosen].ravel().astype(np.int64)


class Batch:
    """The arrays of one problem. Positions are int32 where that is enough, which halves the time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.unit_size = problem.a2a_size
        self.count = problem.cp_size // problem.a2a_size
        self.dual = problem.layout == "dual_chunk"
        columns = [np.frombuffer(c, dtype=np.int64) if len(c) else _NONE for c in problem.lengths.columns]
        largest = max((int(c.sum()) for c in columns), default=0)
        self.dtype = np.dtype(np.int32 if largest < FAR // 4 else np.int64)
        self.far = FAR if self.dtype == np.int32 else FAR**2
        self.len_q, self.len_kv, self.slots_q, self.slots_kv = (c.astype(self.dtype) for c in columns)
        self.size = len(self.len_q)
        if problem.lengths.len_kv is problem.lengths.len_q:
            self.len_kv = self.len_q
        if problem.lengths.slots_kv is problem.lengths.slots_q:
            self.slots_kv = self.slots_q
        left, right = (min(side, self.far // 4) for side in problem.window_size)
        if problem.causal:
            right = 0
        self.window = (None if left < 0 else left, None if right < 0 else right)
        self.shift: int | Array = self.len_kv - self.len_q if problem.bottom_right and not self.alike else 0
        self.lo: Edge = None if left < 0 else self.shift - left
        self.hi: Edge = None if right < 0 else self.shift + right
        self.windowed = bool(self.size) and left >= 0 and right >= 0
        self.nothing = np.zeros(self.size, dtype=self.dtype)  # not to be written to
        self.numbers: Array | None = None  # of these sequences in the problem; None for all
        self.kept = 8  # units whose tokens are remembered: in a ring, fresh memory for all costs more than asking again
        self.last_reach: tuple[int, Array] | None = None  # see `blocks.reach`; often asked for one unit again and again
        self._owned: dict[tuple[str, int], Owned] = {}
        self._chunk_slots: dict[tuple[str, int], Array] = {}
        self._near: dict[int, Batch] = {}

    @cached_property
    def loops(self) -> Loops:
        """The loops over these sequences."""
        return loops()

    @cached_property
    def alike(self) -> bool:
        """Whether queries and keys of every sequence have the same lengths and slots."""
        return self._same(self.len_q, self.len_kv) and self._same(self.slots_q, self.slots_kv)

    @cached_property
    def band(self) -> Band:
        """The sequences' bands as columns."""
        edges = (-self.far if self.lo is None else self.lo, self.far if self.hi is None else self.hi, self.shift)
        return Band(*(x if isinstance(x, np.ndarray) else np.full(self.size, x, dtype=self.dtype) for x in edges))

    @cached_property
    def chunk_sizes(self) -> tuple[int, int]:
        """The smallest and the largest chunk of a unit's queries; sequences without slots do not count."""
        parts = 1 if self.count == 1 else 2 * self.count if self.dual else self.count
        slots = self.slots_q[self.slots_q > 0]
        return (int(slots.min()) // parts, int(slots.max()) // parts) if len(slots) else (1, 1)

    def of(self, one_each: Array) -> Array:
        """What these sequences have, of an array with one number for each sequence of the problem."""
        return one_each if self.numbers is None else one_each[self.numbers]

    def of_chunks_up_to(self, largest: int) -> Batch:
        """The sequences whose chunks are not larger; their lengths must be cut alike."""
        if largest >= self.chunk_sizes[1]:
            return self
        if largest not in self._near:
            self._near[largest] = self._some(np.flatnonzero(self._chunk("q", self.count) <= largest))
        return self._near[largest]

    def _some(self, numbers: Array) -> Batch:
        """Some sequences of a problem whose sequences are all cut alike."""
        found = copy(self)
        found.numbers, found.size = numbers, len(numbers)
        found.len_q = found.len_kv = self.len_q[numbers]
        found.slots_q = found.slots_kv = self.slots_q[numbers]
        found.nothing, found.last_reach = self.nothing[: len(numbers)], None
        found._owned, found._chunk_slots, found._near = {}, {}, {}
        for cached in ("chunk_sizes", "band"):
            found.__dict__.pop(cached, None)
        return found

    @staticmethod
    def _same(a: Array, b: Array) -> bool:
        return a is b or bool((a == b).all())

    def owned(self, side: str, unit: int) -> Owned:
        """The real tokens of a unit, "q" or "kv"; unit numbers count on and on, modulo the number of units."""
        unit %= self.count
        if side == "kv" and self.alike:
            side = "q"
        found = self._owned.pop((side, unit), None) or self._find(side, unit)
        self._owned[side, unit] = found  # the latest at the end
        if len(self._owned) > self.kept:
            del self._owned[next(iter(self._owned))]
        return found

    def slots(self, side: str) -> Array:
        """Every sequence's slots."""
        return self.slots_q if side == "q" else self.slots_kv

    def lengths(self, side: str) -> Array:
        """Every sequence's real tokens."""
        return self.len_q if side == "q" else self.len_kv

    def _find(self, side: str, unit: int) -> Owned:
        if self.count == 1:
            return self.loops.owned(Spanned(self.nothing, self.lengths(side)))
        return self._part(side, self.count, unit, self.lengths(side))

    def share(self, side: str, parts: int, part: int) -> Owned:
        """The slots of every sequence that one of `parts` equal shares has, as tokens."""
        return self._part(side, parts, part, self.slots(side))

    def _part(self, side: str, parts: int, part: int, lengths: Array) -> Owned:
        chunks = self._chunks(parts, part)
        if chunks is not None:
            numbers = np.array([*chunks[0], *(chunks[1] if len(chunks) > 1 else (-1, -1))], dtype=np.int64)
            return self.loops.owned(Chunked(lengths, self._chunk(side, parts), numbers))
        ((start, end),) = self.spans(side, parts, part)
        return self.loops.owned(Spanned(start, np.maximum(np.minimum(end, lengths), start)))

    def offset(self, owned: Owned, piece: int) -> Array:
        """Where a piece begins on the token axis."""
        return owned.count[0] if piece else self.nothing

    def chunks(self, unit: int) -> tuple[Chunk, ...] | None:
        """The pieces of a unit in chunks; None where sequences are not cut alike."""
        return ((0, 1),) if self.count == 1 else self._chunks(self.count, unit % self.count)

    def _chunks(self, parts: int, part: int) -> tuple[Chunk, ...] | None:
        if self.dual:
            late = 2 * parts - 1 - part
            # the two chunks of the last share touch: they are given as one, and the second as nothing
            return (
                ((part, late + 1), (late + 1, late + 1)) if late == part + 1 else ((part, part + 1), (late, late + 1))
            )
        return None if self.problem.qkv_format == "thd" else ((part, part + 1),)

    def spans(self, side: str, parts: int, part: int) -> list[tuple[Array, Array]]:
        """The slots [start, stop) of every sequence that one of `parts` equal shares has."""
        chunks = self._chunks(parts, part)
        if chunks is not None:
            chunk = self._chunk(side, parts)
            return [(chunk * a, chunk * b) for a, b in chunks]
        slots = self.slots(side)
        ends = np.cumsum(slots, dtype=self.dtype)
        share = int(ends[-1]) // parts if self.size else 0
        starts = ends - slots
        start = np.minimum(np.maximum(part * share - starts, 0), slots)
        return [(start, np.maximum(np.minimum((part + 1) * share - starts, slots), start))]

    def _chunk(self, side: str, parts: int) -> Array:
        """The slots of one chunk of every sequence, of `parts` shares."""
        if (side, parts) not in self._chunk_slots:
            self._chunk_slots[side, parts] = self.slots(side) // (2 * parts if self.dual else parts)
        return self._chunk_slots[side, parts]

    def home_rows(self, side: str, rank: int) -> Array:
        """The row of a rank's buffer where its slots of each sequence begin."""
        sizes = sum(stop - start for start, stop in self.spans(side, self.problem.cp_size, rank))
        assert isinstance(sizes, np.ndarray)
        return np.cumsum(sizes, dtype=self.dtype) - sizes

    def real_rows(self, side: str, rank: int) -> Array:
        """How many real tokens of each sequence a rank has; they lie side by side."""
        lengths = self.lengths(side)
        spans = self.spans(side, self.problem.cp_size, rank)
        counts = [np.maximum(np.minimum(stop, lengths) - start, 0) for start, stop in spans]
        return counts[0] if len(counts) == 1 else counts[0] + counts[1]


_NONE = np.empty(0, dtype=np.int64)
