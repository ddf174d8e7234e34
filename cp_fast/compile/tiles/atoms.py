"""Sets of rows as integers: rows that are in the same spans form one atom, and bit n of a set is atom n."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from cp_fast.compile.tiles.segments import LaunchSegments, SegmentSpans
from cp_ref.schedules.table import Column, ranges, runs

__all__ = ["Atoms", "Uses", "atoms_of", "rows_in"]


class Atoms:
    """Rows that are in the same spans form one atom. A set of atoms is an integer with bit n for atom n."""

    def __init__(self, spans: SegmentSpans) -> None:
        self.given = spans
        self._edges = np.unique(np.concatenate([spans.start, spans.stop]))
        self.rows = np.diff(self._edges)  # of each
        first, last = (np.searchsorted(self._edges, x) for x in (spans.start, spans.stop))
        self.places: tuple[list[int], list[int]] = first.tolist(), last.tolist()  # Of each span, in atoms.

    @cached_property
    def sizes(self) -> list[int]:
        """The atoms with bit 0 set in their number of rows, those with bit 1, ...: `rows_in` counts with these."""
        planes = range(int(self.rows.max(initial=0)).bit_length())
        return [int.from_bytes(np.packbits(self.rows >> n & 1, bitorder="little").tobytes(), "little") for n in planes]

    def sets(self, segments: LaunchSegments) -> list[int]:
        """The atoms of each segment."""
        found = [0] * len(segments)
        for segment, begin, end in zip(self.given.segment.tolist(), *self.places, strict=True):
            found[segment] |= (1 << end) - (1 << begin)
        return found

    def spans(self, sets: Sequence[Sequence[int] | Column]) -> SegmentSpans:
        """The rows of each set, given as its atoms, as few spans."""
        count = np.array([len(atoms) for atoms in sets], dtype=np.int64)
        atom = np.concatenate([np.zeros(0, dtype=np.int64), *(np.sort(np.asarray(x, dtype=np.int64)) for x in sets)])
        segment = np.repeat(np.arange(len(sets)), count)
        begin, size = runs((segment[1:] != segment[:-1]) | (atom[1:] != atom[:-1] + 1), len(atom))
        return SegmentSpans(segment[begin], self._edges[atom[begin]], self._edges[atom[begin + size - 1] + 1])


class Uses:
    """Which launches have each atom, as bits: 64 launches in a row of an array [rows, atoms]."""

    def __init__(self, atoms: Atoms, count: int) -> None:
        self._bits = np.zeros((1, len(atoms.rows)), dtype=np.uint64)
        self._first = np.searchsorted(atoms.given.segment, np.arange(count + 1)).tolist()
        self._places = atoms.places

    def of(self, segment: int) -> slice | Column:
        """The atoms of a segment."""
        here = slice(self._first[segment], self._first[segment + 1])
        first, last = (x[here] for x in self._places)
        if len(first) == 1:
            return slice(first[0], last[0])
        begin = np.array(first, dtype=np.int64)
        return np.unique(ranges(begin, np.array(last, dtype=np.int64) - begin))

    def users(self, atoms: slice | Column) -> int:
        """The launches that have any of these, as bits."""
        return int.from_bytes(np.bitwise_or.reduce(self._bits[:, atoms], axis=1).tobytes(), "little")

    def used(self, atoms: slice | Column, launch: int) -> Column:
        """Whether a launch has each of these."""
        return self._bits[launch // 64, atoms] >> np.uint64(launch % 64) & np.uint64(1) > 0

    def add(self, atoms: slice | Column, launch: int) -> None:
        """Add these atoms to a launch."""
        while launch // 64 >= len(self._bits):
            self._bits = np.concatenate([self._bits, np.zeros_like(self._bits)])
        self._bits[launch // 64, atoms] |= np.uint64(1 << launch % 64)


def rows_in(atoms: int, sizes: Sequence[int]) -> int:
    """The number of rows of a set."""
    return sum((atoms & plane).bit_count() << n for n, plane in enumerate(sizes))


def atoms_of(atoms: int) -> Column:
    """The atoms of a set.

    >>> atoms_of(0b1101).tolist()
    [0, 2, 3]
    """
    if not atoms:
        return np.zeros(0, dtype=np.int64)
    down = (atoms & -atoms).bit_length() - 1
    atoms >>= down
    packed = np.frombuffer(atoms.to_bytes(-(-atoms.bit_length() // 8), "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little")) + down
