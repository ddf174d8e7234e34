"""The loops in C++: csrc/cpu/plan_*.cpp, of the native kernels for the CPU.

A call of a loop takes a microsecond or two, so it must not cost more than that to make one: arrays go as the Python
objects that they are, and C++ asks for their memory by the buffer protocol, whose functions it is given here. The GIL
is held (`PyDLL`). What has several columns is one array, each column a row of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from cp_fast import build
from cp_fast.kernels import native
from cp_fast.planning.columns import Array, Arrived, Band, Cut, Owned, Pieces, Range, Slot
from cp_fast.planning.loops.base import Chunks, Loops, Spans, Tiles

__all__ = ["ByNative", "load"]

_KINDS = Cut._fields
_OWN = _KINDS.index("own")
_MOST_SLOTS = 16


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
        self._zeros = {np.dtype(kind): np.zeros(1, dtype=kind) for kind in (np.int32, np.int64)}
        call = partial(_function, library)
        self._owned = call("pieces", "ooonnnnn")
        self._ends = call("ends", "oon")
        self._below = call("below", "ooo")
        self._through_window = call("through_window", "ooooo")
        self._only = call("only", "oooo")
        self._behind = call("behind", "ooo")
        self._packed = call("packed", "oo")
        self._crossings = call("crossings", "ooooonn")
        self._cut = call("cut", "onooooonnoo")
        self._meet = call("meet", "oo")
        self._count_tiles = call("count_tiles", "o")
        self._tiles = call("tiles", "onnoooo")
        self._look = call("look", "ooo")
        self._drop_empty = call("drop_empty", "onoo")
        self._cumulative = call("cumulative", "oo")
        self._same = call("same", "oo")
        self._exchanged = call("exchanged", "oonnoooooo")
        self._count_held = call("count_held", "ooo")
        self._held = call("held", "onooooonno")
        self._by_sequence = call("by_sequence", "ononoo")
        self._count_gathered = call("count_gathered", "ono")
        self._gathered = call("gathered", "ononoono")
        self._count_whole = call("count_whole", "onoo")
        self._whole = call("whole", "ononooooo")

    # ---- which tokens a unit has, and which of them are seen

    def owned(self, lengths: Array, chunk: Array, chunks: Chunks) -> Owned:
        n, pieces = len(lengths), len(chunks)
        out = np.empty((3 if pieces == 1 else 7, n), dtype=lengths.dtype)
        self._owned(_wide(lengths), n, out, lengths, chunk, pieces, *chunks[0], *chunks[-1])
        if pieces == 1:
            first, stop, count = out
            return Owned((first,), (stop,), (count,), count)
        first, first2, stop, stop2, count, count2, total = out
        return Owned((first, first2), (stop, stop2), (count, count2), total)

    def ends(self, owned: Owned, far: int) -> Array:
        out = np.empty_like(owned.total)
        self._ends(_wide(out), len(out), out, owned, far)
        return out

    def below(self, owned: Owned, position: Array) -> Array:
        out = np.empty_like(owned.total)
        self._below(_wide(out), len(out), out, owned, position)
        return out

    def through_window(self, first: Array, count: Array, band: Band, keys: Owned) -> Range:
        out = np.empty((2, len(first)), dtype=first.dtype)
        self._through_window(_wide(out), len(first), out, first, count, band, keys)
        return Range(*out)

    def only(self, there: Array, tokens: Range) -> Range:
        out = np.empty((2, len(there)), dtype=there.dtype)
        self._only(_wide(out), len(there), out, there, *tokens)
        return Range(*out)

    def behind(self, tokens: Range, before: Range) -> Range:
        out = np.empty((2, len(tokens.start)), dtype=tokens.start.dtype)
        self._behind(_wide(out), len(tokens.start), out, tokens, before)
        return Range(*out)

    def packed(self, ranges: tuple[Range, ...]) -> tuple[tuple[Array, ...], int]:
        out = np.empty((len(ranges), len(ranges[0].start)), dtype=ranges[0].start.dtype)
        size = self._packed(_wide(out), len(ranges[0].start), out, ranges)
        return tuple(out), size

    # ---- tiles

    def cut(
        self, q: Range, k: Range, band: Band, bounded: bool, large: int, offsets: tuple[Array, Array], piece: int
    ) -> Cut:
        n, wide = len(q.start), _wide(q.start)
        there = self._crossings(wide, n, *q, *k, band, bounded, large)
        if not there:
            return Cut()
        kinds = [name for number, name in enumerate(_KINDS) if there >> number & 1]
        out = np.empty((4 * len(kinds) + 2 * (there >> _OWN & 1), n), dtype=q.start.dtype)
        self._cut(wide, n, out, there, *q, *k, band, bounded, large, *offsets)
        slots = {name: Slot(*out[4 * at : 4 * at + 4], piece) for at, name in enumerate(kinds)}
        if "own" in slots:
            slots["own"] = slots["own"]._replace(left=out[-2], right=out[-1])
        return Cut(**slots)

    def meet(self, one: Slot, other: Slot) -> bool:
        return bool(self._meet(_wide(one.q), len(one.q), one, other))

    def tiles(
        self, slots: Sequence[Slot], q_anchor: Array, k_anchors: Sequence[Array], grad_anchors: Sequence[Array] | None
    ) -> Tiles:
        assert len(slots) <= _MOST_SLOTS
        n, wide, given = len(q_anchor), _wide(q_anchor), tuple(slots)
        room = self._count_tiles(wide, n, given) + 1
        out = np.empty((4 if grad_anchors is None else 5, room), dtype=q_anchor.dtype)
        of_grads = () if grad_anchors is None else tuple(grad_anchors)
        self._tiles(wide, n, out, room, len(out), given, q_anchor, tuple(k_anchors), of_grads)
        q, rows, k, columns, *grad = out[:, :-1]
        return q, rows, k, columns, grad[0] if grad else None

    # ---- spans of rows

    def spans(self, start: Array, count: Array) -> tuple[Array, Array, int, bool]:
        n, wide = len(count), _wide(count)
        self._look(wide, n, self._said, start, count)
        kept, total, contiguous = self._said.tolist()
        if kept < n:
            out = np.empty((2, kept + 1), dtype=count.dtype)
            contiguous = self._drop_empty(wide, n, out, kept + 1, start, count)
            start, count = out[:, :-1]
        return start, count, total, bool(contiguous)

    def cumulative(self, count: Array) -> Array:
        out = np.empty(len(count) + 1, dtype=np.int32)
        self._cumulative(_wide(count), len(count), out, count)
        return out

    def same(self, one: Array, other: Array) -> bool:
        return bool(self._same(_wide(one), len(one), one, other))

    def exchanged(
        self, owned: Owned, shares: Sequence[Sequence[tuple[Array, Array]]], positions: tuple[Array, Array], row: Array
    ) -> tuple[Array, Array, list[int]]:
        n, pieces = len(row), len(shares[0])
        rows, counts = np.empty((2, len(shares), n, pieces), dtype=row.dtype)
        sizes = [
            sum(
                self._exchanged(
                    _wide(row), n, rows[rank], counts[rank], pieces, piece, owned, *share[piece], *positions, row
                )
                for piece in range(pieces)
            )
            for rank, share in enumerate(shares)
        ]
        return rows, counts, sizes

    # ---- keys that were gathered

    def held(
        self, tokens: Range, keys: Owned, piece: int, anchor: Array, base: int, numbers: Array | None
    ) -> Arrived | None:
        n, wide = len(anchor), _wide(anchor)
        offset = self._nothing(anchor) if piece == 0 else keys.offset[piece]
        found = self._count_held(wide, n, tokens, offset, keys.count[piece])
        if not found:
            return None
        out = np.empty((4, found + 1), dtype=anchor.dtype)
        numbered = numbers is not None
        self._held(
            wide, n, out, found + 1, tokens, offset, keys.first[piece], keys.count[piece], anchor, base, numbered,
            numbers if numbered else anchor,
        )  # fmt: skip
        return Arrived(*out[:, :-1])

    def pieces(self, arrived: Sequence[Arrived], size: int) -> Pieces:
        sizes = np.array([len(a.seq) for a in arrived], dtype=np.int64)
        kind = arrived[0].first.dtype
        ends, out = np.empty(size, dtype=kind), np.empty((3, int(sizes.sum())), dtype=kind)
        self._by_sequence(_wide(ends), size, ends, out.shape[1], out, len(sizes), sizes, tuple(arrived))
        return Pieces(ends, *out)

    def gathered(self, slots: Sequence[Slot], q_anchor: Array, pieces: Pieces) -> tuple[Spans, Spans, Array]:
        n, wide, given = len(q_anchor), _wide(q_anchor), (tuple(slots), len(pieces.first), pieces)
        room = self._count_gathered(wide, n, *given)
        tiles = self._count_tiles(wide, n, given[0])
        spans, found = np.empty((2, room), dtype=q_anchor.dtype), np.empty((3, tiles), dtype=q_anchor.dtype)
        self._gathered(wide, n, spans, room, found, tiles, q_anchor, *given)
        return (found[0], found[1]), (spans[0], spans[1]), found[2]

    def gathered_whole(
        self, rows: Array, counts: Sequence[Array], anchors: Sequence[Array], offsets: Sequence[Array], bases: Array
    ) -> tuple[Array, Spans]:
        n, wide, number, given = len(rows), _wide(rows), len(counts), tuple(counts)
        columns = np.empty((2, n), dtype=rows.dtype)
        room = self._count_whole(wide, n, columns, number, given, rows)
        out = np.empty((2, room), dtype=rows.dtype)
        self._whole(wide, n, out, room, columns[1], number, given, tuple(anchors), tuple(offsets), bases, rows)
        return columns[0], (out[0], out[1])

    def _nothing(self, like: Array) -> Array:
        """Zeros of the same length and dtype, not to be written to."""
        if len(self._zeros[like.dtype]) < len(like):
            self._zeros[like.dtype] = np.zeros(len(like), dtype=like.dtype)
        return self._zeros[like.dtype][: len(like)]


def _wide(x: Array) -> int:
    return x.dtype.itemsize > 4


def _function(library: ctypes.PyDLL, name: str, arguments: str) -> Any:
    """A loop of the library: `o` is an object of Python's, `n` a number; every loop's first two are numbers."""
    found = getattr(library, f"cp_plan_{name}")
    kinds = {"o": ctypes.py_object, "n": ctypes.c_int64}
    found.argtypes = [kinds[kind] for kind in "nn" + arguments]
    found.restype = ctypes.c_int64
    return found
