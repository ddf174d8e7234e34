"""The loops in C++: csrc/cpu/plan_*.cpp, of the native kernels for the CPU.

A call of a loop takes a microsecond or two, so it must not cost more than that to make one: arrays go as the Python
objects that they are, and C++ asks for their memory by the buffer protocol, whose functions it is given here. The GIL
is held (`PyDLL`). What has several columns is one array, each column a row of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from copy import copy
from functools import lru_cache, partial
from typing import Any, NamedTuple

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
    Spanned,
    Spans,
)
from cp_fast.planning.loops.base import Loops, Ring, RingStep, Sight, Tiles
from cp_fast.planning.loops.memory import Memory

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
    """One pass over the sequences each, or two where the first says how large the result is.

    Every column is memory of its own: small pieces that are given back are used again, large ones are fresh every time,
    and fresh memory costs more than the loops.
    """

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
        self._ring_facts = call("ring_facts", "oonnnnnn")
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
        self._tokens = call("tokens", "oo")
        self._rows = call("rows", "onoo")
        self._count_exchanged = call("count_exchanged", "oonoo")
        self._exchanged = call("exchanged", "onoonoo")
        self._count_pieces = call("count_pieces", "onoo")
        self._pieces = call("pieces", "oonnoo")
        self._count_gathered = call("count_gathered", "ono")
        self._gathered = call("gathered", "ononoono")
        self._count_whole = call("count_whole", "oonoo")
        self._whole = call("whole", "ononoooo")

    def for_one_plan(self) -> ByNative:
        """The same with memory for a plan."""
        found = copy(self)
        found._memory = Memory()
        return found

    def _kept(self, like: Array, number: int, size: int) -> tuple[Array, ...]:
        """Columns, not yet written, that are kept until the plan is made."""
        return tuple(self._memory.array(size, like.dtype) for _ in range(number))

    # ---- which tokens a unit has, and which of them are seen

    def columns(self, tokens: Chunked | Spanned) -> OwnedColumns:
        if isinstance(tokens, Spanned):
            count = tokens.stop - tokens.first
            return (tokens.first,), (tokens.stop,), (count,), count
        pieces = 1 if tokens.numbers[2] < 0 else 2
        out = _new(tokens.lengths, 3 if pieces == 1 else 7)
        self._columns(_wide(tokens.lengths), len(tokens.lengths), out, tokens)
        return out[:pieces], out[pieces : 2 * pieces], out[2 * pieces : 3 * pieces], out[-1]

    def ends(self, owned: Owned, far: int) -> Array:
        out = np.empty_like(owned.tokens[0])
        self._ends(_wide(out), len(out), out, owned.tokens, far)
        return out

    def below(self, owned: Owned, position: Array) -> Array:
        out = np.empty_like(position)
        self._below(_wide(out), len(out), out, owned.tokens, position)
        return out

    def seen(self, queries: Owned, how: Sequence[int | Sight], band: Band, keys: Owned) -> tuple[Range, ...]:
        nothing = Range(_zeros(band.lo), _zeros(band.lo))
        ranges = tuple(nothing if sight is Sight.NOTHING else Range(*_new(band.lo, 2)) for sight in how)
        numbers = [sight.value if isinstance(sight, Sight) else sight for sight in how]
        self._seen(
            _wide(band.lo), len(band.lo), ranges, queries.tokens, numbers[0], numbers[-1], band, keys.tokens
        )  # fmt: skip
        return ranges

    def packed(self, ranges: tuple[Range, ...]) -> tuple[tuple[Array, ...], int]:
        start = ranges[0].start
        out = _new(start, len(ranges))
        if len(ranges) == 1:
            return out, self._packed_one(_wide(start), len(start), *out, *ranges)
        return out, self._packed_two(_wide(start), len(start), out, *ranges)

    def ring(self, ring: Ring) -> Iterator[RingStep] | None:
        like, count, bounded = ring.q_anchor, len(ring.tokens), ring.hi is not None
        n, wide, said = len(like), _wide(like), np.zeros(len(_Facts._fields), dtype=np.int64)
        lengths, chunk, _ = ring.tokens[0].tokens
        numbers = np.concatenate([owned.tokens.numbers for owned in ring.tokens])
        given = (lengths, chunk, numbers, *self._kept(like, 2, count * n))  # how far units reach together
        self._ring(wide, n, given, count, ring.unit, ring.hi or 0)
        for s, tile in enumerate(ring.pieces):
            pieces = (-2, -2) if tile is None else (-1 if x is None else x for x in tile)
            step = (given, count, ring.unit, s, *pieces, bounded)
            self._ring_facts(wide, n, said, *step)
            arrays = _step_arrays(like, _Facts(*said.tolist()))
            self._ring_step(wide, n, said, *step, arrays, ring.q_anchor, ring.own_anchor)
            yield _ring_step(_Facts(*said.tolist()), arrays, s, count)

    # ---- tiles

    def plain(self, queries: Owned, piece: int | None, keys: Owned, other: int | None) -> Slot:
        lengths = queries.tokens[0]
        out = _new(lengths, 4)
        numbers = (-1 if n is None else n for n in (piece, other))
        self._plain(_wide(lengths), len(lengths), out, queries.tokens, next(numbers), keys.tokens, next(numbers))
        return Slot(*out, piece or 0)

    def cut(
        self, q: Range, k: Range, band: Band, bounded: bool, large: int, offsets: tuple[Array, Array], piece: int
    ) -> Cut:
        n, wide, given = len(q.start), _wide(q.start), (q, k, band, bounded, large)
        there = self._crossings(wide, n, *given)
        found: list[Slot | None] = [None] * len(Cut._fields)
        for kind in range(len(found)):
            if there >> kind & 1:
                out = _new(q.start, 4)
                self._cut(wide, n, out, kind, *given, *offsets)
                found[kind] = Slot(*out, piece)
        if (own := found[_OWN]) is not None:
            windows = _new(q.start, 2)
            self._windows(wide, n, windows, *given)
            found[_OWN] = own._replace(left=windows[0], right=windows[1])
        return Cut(*found)

    def meet(self, one: Slot, other: Slot) -> bool:
        return bool(self._meet(_wide(one.q), len(one.q), (one, other)))

    def tiles(
        self, slots: Sequence[Slot], q_anchor: Array, k_anchors: Sequence[Array], grad_anchors: Sequence[Array] | None
    ) -> Tiles:
        n, wide, given = len(q_anchor), _wide(q_anchor), tuple(slots)
        room = self._count_tiles(wide, n, given) + 1
        out, sums = _new(q_anchor, 4 if grad_anchors is None else 5, room), _sums(room)
        one = self._tiles(wide, n, out, room, sums, given, q_anchor, tuple(k_anchors), tuple(grad_anchors or ()))
        return _tiles(*out[:4], *sums, one, *out[4:])

    # ---- spans of rows

    def spans(self, start: Array, count: Array) -> Spans:
        n, wide = len(count), _wide(count)
        self._look(wide, n, self._said, start, count)
        kept, total, contiguous = self._said.tolist()
        if kept < n:
            out = _new(count, 2, kept + 1)
            contiguous = self._drop_empty(wide, n, out, kept + 1, start, count)
            start, count = (x[:-1] for x in out)
        return Spans(start, count, total, bool(contiguous))

    def tokens(self, ranges: tuple[Range, ...]) -> tuple[int, int]:
        count = ranges[0].count
        self._tokens(_wide(count), len(count), self._said, ranges)
        number, total, _ = self._said.tolist()
        return number, total

    def rows(self, ranges: tuple[Range, ...], anchor: Array, number: int, total: int) -> Spans:
        start, count = out = _new(anchor, 2, number + 1)
        contiguous = self._rows(_wide(anchor), len(anchor), out, number + 1, ranges, anchor)
        return Spans(start[:-1], count[:-1], total, bool(contiguous))

    def cumulative(self, count: Array) -> Array:
        out = np.empty(len(count) + 1, dtype=np.int32)
        self._cumulative(_wide(count), len(count), out, count)
        return out

    def same(self, one: Array, other: Array) -> bool:
        return bool(self._same(_wide(one), len(one), one, other))

    def exchanged(
        self, owned: Owned, shares: Sequence[Owned], positions: tuple[Array, Array], row: Array
    ) -> tuple[Spans, list[int]]:
        n, wide, ranks = len(row), _wide(row), len(shares)
        given = tuple(share.tokens for share in shares)
        sizes = np.empty(ranks, dtype=np.int64)
        room = self._count_exchanged(wide, n, sizes, owned.tokens, ranks, given, positions)
        start, count = out = self._kept(row, 2, room)
        self._exchanged(wide, n, out, room, row, owned.tokens, ranks, given, positions)
        return self.spans(start, count), sizes.tolist()

    # ---- keys that were gathered

    def pieces(self, arrived: Sequence[Arrived], size: int) -> Pieces:
        wide, kind = _wide(arrived[0].anchor), arrived[0].anchor.dtype
        given = tuple(
            (a.tokens, a.keys.tokens, a.anchor, () if a.numbers is None else (a.numbers,)) for a in arrived
        )
        numbers = np.array([(len(a.anchor), a.piece, a.base) for a in arrived], dtype=np.int64)
        ends = np.empty(size, dtype=kind)
        total = self._count_pieces(wide, size, ends, len(given), numbers, given)
        found = self._memory.array(3 * total, kind).reshape(total, 3)
        self._pieces(wide, size, found, ends, total, len(given), numbers, given)
        return Pieces(ends, found)

    def gathered(self, slots: Sequence[Slot], q_anchor: Array, pieces: Pieces) -> Tiles:
        n, wide, given = len(q_anchor), _wide(q_anchor), (tuple(slots), len(pieces.pieces), pieces)
        room, tiles = self._count_gathered(wide, n, *given), self._count_tiles(wide, n, given[0])
        (start, count), (q, rows, columns) = self._kept(q_anchor, 2, room), self._kept(q_anchor, 3, tiles)
        self._gathered(wide, n, (start, count), room, (q, rows, columns), tiles, q_anchor, *given)
        sums = (self.cumulative(rows), self.cumulative(columns))
        return Tiles(self.spans(q, rows), self.spans(start, count), None, *sums)

    def gathered_whole(
        self, rows: Array, keys: Sequence[tuple[Owned, int]], anchors: Sequence[Array], bases: Sequence[int]
    ) -> tuple[Array, Spans]:
        n, wide, tokens = len(rows), _wide(rows), keys[0][0].tokens
        numbers = []
        for (owned, piece), base in zip(keys, bases, strict=True):
            assert isinstance(owned.tokens, Chunked)
            a, b, c, d = owned.tokens.numbers.tolist()
            numbers.append((c, d, a, b, base) if piece else (a, b, 0, 0, base))
        given = (tokens, len(keys), np.array(numbers, dtype=np.int64), rows)
        columns, pieces = _new(rows, 2)
        room = self._count_whole(wide, n, (columns, pieces), *given)
        out = self._kept(rows, 2, room)
        self._whole(wide, n, out, room, *given, pieces, tuple(anchors))
        return columns, self.spans(*out)


class _Facts(NamedTuple):
    """What csrc/cpu/plan_ring.cpp finds out of a step, in this order. `contiguous` has a bit for each kind of rows."""

    tiles: int
    size: int
    grad_size: int
    apart: int
    sent: int
    sent_total: int
    got: int
    got_total: int
    contiguous: int


def _step_arrays(like: Array, fact: _Facts) -> tuple[Any, ...]:
    """What is written of a step, in the order of `_ring_step`; every array with room for one more."""
    q, rows, k, columns = _new(like, 4, fact.tiles + 1)
    grad = _new(like, 1, fact.tiles + 1)[0] if fact.apart else ()
    sums = _sums(fact.tiles + 1)
    return q, rows, k, columns, grad, *sums, *_new(like, 2, fact.sent + 1), *_new(like, 2, fact.got + 1)


def _ring_step(fact: _Facts, arrays: tuple[Any, ...], s: int, count: int) -> RingStep:
    q, rows, k, columns, grad, cu_q, cu_kv, sent, sent_count, got, got_count = arrays
    sends, gets = fact.contiguous >> 3 & 1, fact.contiguous >> 4 & 1
    return RingStep(
        size=fact.size,
        grad_size=fact.grad_size,
        tiles=_tiles(q, rows, k, columns, cu_q, cu_kv, fact.contiguous, *([grad] if fact.apart else [])),
        sent=Spans(sent[:-1], sent_count[:-1], fact.sent_total, bool(sends)) if s + 1 < count else None,
        got=Spans(got[:-1], got_count[:-1], fact.got_total, bool(gets)) if s > 1 else None,
    )


def _tiles(
    q: Array, rows: Array, k: Array, columns: Array, cu_q: Array, cu_kv: Array, one: int, grad: Array | None = None
) -> Tiles:
    """What was written of tiles, with room for one more. `one`: bits of the rows that are one range."""
    rows, columns, queries, keys = rows[:-1], columns[:-1], int(cu_q[-1]), int(cu_kv[-1])
    of_grads = None if grad is None else Spans(grad[:-1], columns, keys, bool(one & 4))
    return Tiles(
        Spans(q[:-1], rows, queries, bool(one & 1)), Spans(k[:-1], columns, keys, bool(one & 2)), of_grads, cu_q, cu_kv
    )


def _sums(size: int) -> tuple[Array, Array]:
    """Cumulative lengths, not yet written."""
    return np.empty(size, dtype=np.int32), np.empty(size, dtype=np.int32)


def _new(like: Array, number: int, size: int | None = None) -> tuple[Array, ...]:
    """Columns, not yet written, that are soon given back: small ones, which the next ones get while they are in the
    cache.
    """
    size, kind = len(like) if size is None else size, like.dtype
    return tuple(np.empty(size, kind) for _ in range(number))


def _zeros(like: Array) -> Array:
    """Zeros of the same length and dtype, not to be written to."""
    return _zeros_of(len(like), like.dtype)


@lru_cache(maxsize=8)
def _zeros_of(size: int, dtype: np.dtype[np.signedinteger]) -> Array:
    found = np.zeros(size, dtype)
    found.flags.writeable = False
    return found


def _wide(x: Array) -> int:
    return x.dtype.itemsize > 4


def _function(library: ctypes.PyDLL, name: str, arguments: str) -> Any:
    """A loop of the library: `o` is an object of Python's, `n` a number; every loop's first two are numbers."""
    found = getattr(library, f"cp_plan_{name}")
    kinds = {"o": ctypes.py_object, "n": ctypes.c_int64}
    found.argtypes = [kinds[kind] for kind in "nn" + arguments]
    found.restype = ctypes.c_int64
    return found
