"""The loops in C++: csrc/cpu/plan_*.cpp, of the native kernels for the CPU.

A call of a loop takes a microsecond or two, so it must not cost more than that to make one: arrays go as the Python
objects that they are, and C++ asks for their memory by the buffer protocol, whose functions it is given here. The GIL
is held (`PyDLL`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from copy import copy
from functools import lru_cache, partial
from typing import Any

import numpy as np

from cp_fast import build
from cp_fast.kernels import native
from cp_fast.planning.columns import (
    Array,
    Arrived,
    Band,
    Chunked,
    Cut,
    Owned,
    OwnedColumns,
    Pieces,
    Range,
    Slot,
    Spans,
)
from cp_fast.planning.loops.base import Loops, Ring, RingStep, Sight, Tiles
from cp_fast.planning.loops.memory import Memory
from cp_fast.planning.loops.written import (
    SPARE,
    Facts,
    is_wide,
    new_columns,
    new_sums,
    ring_step,
    step_arrays,
    tiles_of,
    zeros,
)

__all__ = ["ByNative", "load"]

_OWN = Cut._fields.index("own")


@lru_cache
def load() -> ByNative:
    """The native loops, built if they have to be.

    Raises:
        cp_fast.build.Unavailable, cp_fast.build.BuildError: as `cp_fast.kernels.native.load`.
    """
    native.load("cpu")  # PyTorch's libraries, which this one is linked to, are there
    library = ctypes.PyDLL(str(build.library("cpu")))
    api = ctypes.pythonapi
    given = (api.PyObject_GetBuffer, api.PyBuffer_Release, api.PyTuple_Size, api.PyTuple_GetItem, api.PyErr_SetString)
    functions = [ctypes.cast(function, ctypes.c_void_p) for function in given]
    library.cp_plan_python(*functions, ctypes.py_object(AssertionError))
    return ByNative(library)


class ByNative(Loops):
    """One pass over the sequences each, or two where the first says how large the result is."""

    name = "native"

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._said = np.zeros(3, dtype=np.int64)
        self._memory = Memory()
        call = partial(_function, library)
        self._columns = call("columns", "oo")
        self._ends = call("ends", "oon")
        self._below = call("below", "ooo")
        self._seen = call("seen", "oonnoo")
        self._packed_one = call("packed_one", "oo")
        self._packed_two = call("packed_two", "ooo")
        self._ring = call("ring", "onnn")
        self._ring_step = call("ring_step", "oonnnnnnooo")
        self._plain = call("plain", "oonon")
        self._crossings = call("crossings", "ooonn")
        self._cut = call("cut", "onooonnoo")
        self._windows = call("windows", "oooonn")
        self._meet = call("meet", "o")
        self._count_tiles = call("count_tiles", "o")
        self._tiles = call("tiles", "onooooo")
        self._look = call("look", "ooo")
        self._drop_empty = call("drop_empty", "onoo")
        self._cumulative = call("cumulative", "oo")
        self._same = call("same", "oo")
        self._longest = call("longest", "o")
        self._tokens = call("tokens", "oo")
        self._rows = call("rows", "onoo")
        self._count_exchanged = call("count_exchanged", "onoo")
        self._exchanged = call("exchanged", "onoonoo")
        self._count_pieces = call("count_pieces", "onoo")
        self._pieces = call("pieces", "oonnoo")
        self._most_gathered = call("most_gathered", "oo")
        self._gathered = call("gathered", "ononoono")
        self._count_whole = call("count_whole", "oonoo")
        self._whole = call("whole", "ononoooo")

    def for_one_plan(self) -> ByNative:
        """The same with memory of its own: plans may be made by several threads at once."""
        found = copy(self)
        found._memory, found._said = Memory(), np.zeros(3, dtype=np.int64)
        return found

    def _kept(self, like: Array, number: int, size: int) -> tuple[Array, ...]:
        """Columns, not yet written, that are kept until the plan is made."""
        return tuple(self._memory.array(size, like.dtype) for _ in range(number))

    # ---- which tokens a unit has, and which of them are seen

    def chunked(self, tokens: Chunked) -> OwnedColumns:
        pieces = 1 if tokens.numbers[2] < 0 else 2
        out = new_columns(tokens.lengths, 3 if pieces == 1 else 7)
        self._columns(is_wide(tokens.lengths), len(tokens.lengths), out, tokens)
        return out[:pieces], out[pieces : 2 * pieces], out[2 * pieces : 3 * pieces], out[-1]

    def ends(self, owned: Owned, far: int) -> Array:
        out = np.empty_like(owned.tokens[0])
        self._ends(is_wide(out), len(out), out, owned.tokens, far)
        return out

    def below(self, owned: Owned, position: Array) -> Array:
        out = np.empty_like(position)
        self._below(is_wide(out), len(out), out, owned.tokens, position)
        return out

    def seen(self, queries: Owned, how: Sequence[int | Sight], band: Band, keys: Owned) -> tuple[Range, ...]:
        nothing = Range(zeros(band.lo), zeros(band.lo))
        ranges = tuple([nothing if sight is Sight.NOTHING else Range(*new_columns(band.lo, 2)) for sight in how])
        numbers = [sight.value if isinstance(sight, Sight) else sight for sight in how]
        self._seen(
            is_wide(band.lo), len(band.lo), ranges, queries.tokens, numbers[0], numbers[-1], band, keys.tokens
        )  # fmt: skip
        return ranges

    def packed(self, ranges: tuple[Range, ...]) -> tuple[tuple[Array, ...], int]:
        start = ranges[0].start
        out = new_columns(start, len(ranges))
        if len(ranges) == 1:
            return out, self._packed_one(is_wide(start), len(start), *out, *ranges)
        return out, self._packed_two(is_wide(start), len(start), out, *ranges)

    def ring(self, ring: Ring) -> Iterator[RingStep] | None:
        like, count, bounded = ring.q_anchor, len(ring.tokens), ring.hi is not None
        n, wide, said = len(like), is_wide(like), np.zeros(len(Facts._fields), dtype=np.int64)
        tokens = [owned.tokens for owned in ring.tokens]
        numbers = np.concatenate([x.numbers for x in tokens if isinstance(x, Chunked)])
        lengths, chunk, *_ = tokens[0]
        given = (lengths, chunk, numbers, *self._kept(like, 2, count * n))  # how far units reach together
        self._ring(wide, n, given, count, ring.unit, ring.hi or 0)
        arrays = step_arrays(like)
        for s, tile in enumerate(ring.pieces):
            pieces = (-2, -2) if tile is None else (-1 if x is None else x for x in tile)
            step = (given, count, ring.unit, s, *pieces, bounded)
            self._ring_step(wide, n, said, *step, arrays, ring.q_anchor, ring.own_anchor)
            yield ring_step(Facts(*said.tolist()), arrays, s, count)

    # ---- tiles

    def plain(self, queries: Owned, piece: int | None, keys: Owned, other: int | None) -> Slot:
        lengths = queries.tokens[0]
        out = new_columns(lengths, 4)
        which, whose = (-1 if n is None else n for n in (piece, other))
        self._plain(is_wide(lengths), len(lengths), out, queries.tokens, which, keys.tokens, whose)
        q, rows, k, columns = out
        return Slot(q, rows, k, columns, piece or 0)

    def cut(
        self, q: Range, k: Range, band: Band, bounded: bool, large: int, offsets: tuple[Array, Array], piece: int
    ) -> Cut:
        n, wide, given = len(q.start), is_wide(q.start), (q, k, band, bounded, large)
        there = self._crossings(wide, n, *given)
        found: list[Slot | None] = [None] * len(Cut._fields)
        for kind in range(len(found)):
            if there >> kind & 1:
                out = new_columns(q.start, 4)
                self._cut(wide, n, out, kind, *given, *offsets)
                q_tile, rows, k_tile, columns = out
                found[kind] = Slot(q_tile, rows, k_tile, columns, piece)
        if (own := found[_OWN]) is not None:
            windows = new_columns(q.start, 2)
            self._windows(wide, n, windows, *given)
            found[_OWN] = own._replace(left=windows[0], right=windows[1])
        return Cut(*found)

    def meet(self, one: Slot, other: Slot) -> bool:
        return bool(self._meet(is_wide(one.q), len(one.q), (one, other)))

    def tiles(
        self, slots: Sequence[Slot], q_anchor: Array, k_anchors: Sequence[Array], grad_anchors: Sequence[Array] | None
    ) -> Tiles:
        n, wide, given = len(q_anchor), is_wide(q_anchor), tuple(slots)
        found = self._count_tiles(wide, n, given)
        room = found + SPARE
        out, (cu_q, cu_kv) = new_columns(q_anchor, 4 if grad_anchors is None else 5, room), new_sums(found)
        one = self._tiles(
            wide, n, out, room, (cu_q, cu_kv), given, q_anchor, tuple(k_anchors), tuple(grad_anchors or ())
        )
        q, rows, k, columns, *grad = out
        return tiles_of(q, rows, k, columns, cu_q, cu_kv, one, *grad)

    # ---- spans of rows

    def spans(self, start: Array, count: Array) -> Spans:
        n, wide = len(count), is_wide(count)
        self._look(wide, n, self._said, start, count)
        kept, total, contiguous = self._said.tolist()
        if kept < n:
            out = new_columns(count, 2, kept + SPARE)
            contiguous = self._drop_empty(wide, n, out, kept + SPARE, start, count)
            start, count = (x[:-SPARE] for x in out)
        return Spans(start, count, total, bool(contiguous))

    def tokens(self, ranges: tuple[Range, ...]) -> tuple[int, int]:
        count = ranges[0].count
        self._tokens(is_wide(count), len(count), self._said, ranges)
        number, total, _ = self._said.tolist()
        return number, total

    def rows(self, ranges: tuple[Range, ...], anchor: Array, number: int, total: int) -> Spans:
        start, count = out = new_columns(anchor, 2, number + SPARE)
        contiguous = self._rows(is_wide(anchor), len(anchor), out, number + SPARE, ranges, anchor)
        return Spans(start[:-SPARE], count[:-SPARE], total, bool(contiguous))

    def cumulative(self, count: Array) -> Array:
        out = np.empty(len(count) + 1, dtype=np.int32)
        self._cumulative(is_wide(count), len(count), out, count)
        return out

    def longest(self, cumulative: Array) -> int:
        return self._longest(False, len(cumulative), cumulative)

    def copied(self, x: Array) -> Array:
        found = self._memory.array(len(x), x.dtype)
        found[:] = x
        return found

    def same(self, one: Array, other: Array) -> bool:
        return bool(self._same(is_wide(one), len(one), one, other))

    def exchanged(
        self, owned: Owned, shares: Sequence[Owned], positions: tuple[Array, Array], row: Array
    ) -> tuple[Spans, list[int]]:
        n, wide, ranks = len(row), is_wide(row), len(shares)
        given = tuple(share.tokens for share in shares)
        sizes = np.empty(ranks, dtype=np.int64)
        room = self._count_exchanged(wide, n, sizes, ranks, given, positions)
        start, count = out = self._kept(row, 2, room)
        self._exchanged(wide, n, out, room, row, owned.tokens, ranks, given, positions)
        return self.spans(start, count), sizes.tolist()

    # ---- keys that were gathered

    def pieces(self, arrived: Sequence[Arrived], size: int, ends: Array | None) -> Pieces:
        wide, kind = is_wide(arrived[0].anchor), arrived[0].anchor.dtype
        given = tuple((a.tokens, a.keys.tokens, a.anchor, () if a.numbers is None else (a.numbers,)) for a in arrived)
        numbers = np.array([(len(a.anchor), a.piece, a.base) for a in arrived], dtype=np.int64)
        if ends is None:
            cursors = np.empty(size, dtype=kind)
            total = self._count_pieces(wide, size, cursors, len(given), numbers, given)
        else:
            total, cursors = int(ends[-1]), np.concatenate([ends[:1] * 0, ends[:-1]])
        found = self._memory.array(3 * total, kind).reshape(total, 3)
        self._pieces(wide, size, found, cursors, total, len(given), numbers, given)
        return Pieces(cursors, found)

    def gathered(self, slots: Sequence[Slot], q_anchor: Array, pieces: Pieces) -> Tiles:
        n, wide, given = len(q_anchor), is_wide(q_anchor), (tuple(slots), len(pieces.pieces), pieces)
        room, tiles = self._most_gathered(wide, n, given[0], pieces.ends), self._count_tiles(wide, n, given[0])
        (start, count), (q, rows, columns) = self._kept(q_anchor, 2, room), self._kept(q_anchor, 3, tiles)
        found = self._gathered(wide, n, (start, count), room, (q, rows, columns), tiles, q_anchor, *given)
        start, count = start[:found], count[:found]
        sums = (self.cumulative(rows), self.cumulative(columns))
        return Tiles(self.spans(q, rows), self.spans(start, count), None, *sums)

    def gathered_whole(
        self, rows: Array, keys: Sequence[tuple[Owned, int]], anchors: Sequence[Array], bases: Sequence[int]
    ) -> tuple[Array, Spans]:
        n, wide, tokens = len(rows), is_wide(rows), keys[0][0].tokens
        numbers = []
        for (owned, piece), base in zip(keys, bases, strict=True):
            assert isinstance(owned.tokens, Chunked)
            a, b, c, d = owned.tokens.numbers.tolist()
            numbers.append((c, d, a, b, base) if piece else (a, b, 0, 0, base))
        given = (tokens, len(keys), np.array(numbers, dtype=np.int64), rows)
        columns, pieces = new_columns(rows, 2)
        room = self._count_whole(wide, n, (columns, pieces), *given)
        out = self._kept(rows, 2, room)
        self._whole(wide, n, out, room, *given, pieces, tuple(anchors))
        return columns, self.spans(*out)


def _function(library: ctypes.PyDLL, name: str, arguments: str) -> Any:
    """A loop of the library: `o` is an object of Python's, `n` a number; every loop's first two are numbers."""
    found = getattr(library, f"cp_plan_{name}")
    kinds = {"o": ctypes.py_object, "n": ctypes.c_int64}
    found.argtypes = [kinds[kind] for kind in "nn" + arguments]
    found.restype = ctypes.c_int64
    return found
