"""Ownership: the rows that each rank holds, and their order in its buffer. The second of the three tables.

There is one `Fragments` table for queries and one for keys and values: rank r holds rows [start, stop) of the global
packed buffer, from row `row` of its buffer on. A layout is a function that makes such tables:

    dual_chunk, cp_size 2, one sequence of 8      contiguous, cp_size 2, sequences of 4 and 8 as one buffer
    row of the global buffer   0 1 2 3 4 5 6 7    0 1 2 3 4 5 6 7 8 9 10 11
    rank                       0 0 1 1 1 1 0 0    0 0 0 0 0 0 1 1 1 1  1  1
    row of the rank's buffer   0 1 0 1 2 3 2 3    0 1 2 3 4 5 0 1 2 3  4  5

All ranks' buffers have ceil(total / cp_size) rows; rows without an owner are tail. "balanced" is in another file
(`balanced.py`), and a user's table is a layout too.

Under a causal mask, late chunks see more keys, so dual_chunk gives each rank an early and a late one. Chunk c sees all
c earlier chunks and half of itself. So chunks r and 2 * cp_size - 1 - r together see 2 * cp_size on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from cp_ref.schedules.table import Column, Spans, Table
from cp_ref.schedules.values import check_choice, check_data
from cp_ref.schedules.words import LAYOUTS

__all__ = [
    "LAYOUTS_OF_LENGTHS",
    "Fragments",
    "LayoutTable",
    "Ownership",
    "contiguous",
    "divisor",
    "dual_chunk",
    "grouped",
    "padded_to_cut",
    "read_layout",
    "slots_of_lengths",
    "slots_of_table",
]


@dataclass(frozen=True, eq=False)
class Fragments(Table):
    """Rows [start, stop) of a global packed buffer that lie at rows [row, row + stop - start) of `rank`'s buffer.

    Sorted by rank, then by row; none is empty, and no two of them share a global row. In a table that `grouped` made,
    `rank` is a group of ranks.
    """

    rank: Column
    start: Column
    stop: Column
    row: Column

    @property
    def spans(self) -> Spans:
        """The global rows."""
        return Spans(self.start, self.stop)

    def of(self, rank: int, count: int = 1) -> Fragments:
        """The fragments of one rank, or of `count` ranks from this one on."""
        first, last = np.searchsorted(self.rank, [rank, rank + count])
        return self.take(slice(int(first), int(last)))

    def sorted(self) -> Fragments:
        """The fragments sorted by global row."""
        return self.take(np.argsort(self.start, kind="stable"))

    def within(self, start: Column, stop: Column) -> Fragments:
        """The fragments' rows that lie in these global spans, which are sorted and disjoint: tokens without padding.

        >>> cut = Fragments.of_rows([(0, 0, 4, 0), (1, 4, 8, 0)]).within(np.array([0, 6]), np.array([3, 8]))
        >>> list(cut.rows())
        [(0, 0, 3, 0), (1, 6, 8, 2)]
        """
        some = start < stop
        number, _, first, last = self.spans.overlaps(Spans(start[some], stop[some]))
        cut = self.take(number)
        return Fragments(cut.rank, first, last, cut.row + first - cut.start)


@dataclass(frozen=True, eq=False)
class Ownership:
    """The rows of each rank on both sides, and the size of every rank's buffers (padding and tail included)."""

    cp_size: int
    q: Fragments
    kv: Fragments

    def side(self, side: str) -> Fragments:
        """`side` is "q" or "kv"."""
        return self.q if side == "q" else self.kv

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ownership):
            return NotImplemented
        return (self.cp_size, self.q, self.kv) == (other.cp_size, other.q, other.kv)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # columns are arrays

    def __str__(self) -> str:
        lines = [f"ownership cp_size {self.cp_size}\n"]
        for side in ("q", "kv"):
            rows = self.side(side).rows()
            lines += [f"rank {rank} {side}[{start}:{stop}] row {row}\n" for rank, start, stop, row in rows]
        return "".join(lines)

    @staticmethod
    def parse(text: str) -> Ownership:
        """The ownership that `str` printed. Raises ValueError naming the first line that is not understood.

        >>> rows = Fragments.of_rows([(0, 0, 4, 0), (1, 4, 8, 0)])
        >>> Ownership.parse(str(Ownership(2, rows, rows))) == Ownership(2, rows, rows)
        True
        """
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        head = re.fullmatch(r"ownership cp_size (\d+)", lines[0] if lines else "")
        if head is None:
            raise ValueError("an ownership begins with 'ownership cp_size N'")
        rows: dict[str, list[tuple[int, ...]]] = {"q": [], "kv": []}
        for line in lines[1:]:
            if (found := _LINE.fullmatch(line)) is None:
                raise ValueError(f"{line!r} is no fragment, which has the form 'rank 0 q[0:4] row 0'")
            rows[found[2]].append(tuple(int(found[n]) for n in (1, 3, 4, 5)))
        return Ownership(int(head[1]), Fragments.of_rows(rows["q"]), Fragments.of_rows(rows["kv"]))


_LINE = re.compile(r"rank (\d+) (q|kv)\[(\d+):(\d+)\] row (\d+)")


def dual_chunk(starts: Column, cp_size: int) -> Fragments:
    """Every sequence is cut in 2 * cp_size chunks; rank r holds chunk r and then chunk 2 * cp_size - 1 - r.

    If a length does not divide, its remaining tokens go to one rank after the other, a token each. The next sequence
    continues with the next rank. So over all sequences, no rank holds more than one token more than another.

    Args:
        starts: where each sequence begins in the global buffer, and where the last ends, [b + 1].

    >>> list(dual_chunk(np.array([0, 8]), 2).rows())
    [(0, 0, 2, 0), (0, 6, 8, 2), (1, 2, 4, 0), (1, 4, 6, 2)]
    >>> list(dual_chunk(np.array([0, 5, 6]), 2).rows())  # token 0 is left of the first, the second one is all left
    [(0, 0, 2, 0), (0, 4, 5, 2), (1, 2, 3, 0), (1, 3, 4, 1), (1, 5, 6, 2)]
    """
    chunk, rest = np.divmod(np.diff(starts), 2 * cp_size)
    first = (np.cumsum(rest) - rest) % cp_size  # The rank that gets the first remaining token.
    early, late = np.minimum(rest, cp_size), np.maximum(rest - cp_size, 0)  # of them, in the early and late chunks
    rank = np.arange(cp_size + 1, dtype=starts.dtype)[:, None]

    def before(count: Column) -> Column:
        """How many of `count` tokens go to ranks before each rank, if ranks first, first + 1, ... get one each."""
        from_first = np.minimum(np.maximum(rank - first, 0), count)
        return from_first + np.maximum(np.minimum(rank, first + count - cp_size), 0)

    begin = starts[:-1] + rank * chunk + before(early)  # [rank + 1, sequence]: of the early chunk
    end = starts[1:] - rank * chunk - before(late)  # of the late one
    start, stop = np.stack([begin[:-1], end[1:]], axis=2), np.stack([begin[1:], end[:-1]], axis=2)
    return _fragments(start, stop)


def contiguous(starts: Column, cp_size: int) -> Fragments:
    """Every stretch of the global buffer is cut into cp_size equal parts; the last ones are shorter where the length
    does not divide. Rank r holds the r-th part of each.

    Args:
        starts: where each stretch begins, and where the last ends, [n + 1]: the sequences in bshd and sbhd, one stretch
            in thd.

    >>> list(contiguous(np.array([0, 4, 12]), 2).rows())
    [(0, 0, 2, 0), (0, 4, 8, 2), (1, 2, 4, 0), (1, 8, 12, 2)]
    >>> list(contiguous(np.array([0, 7]), 3).rows())
    [(0, 0, 3, 0), (1, 3, 6, 0), (2, 6, 7, 0)]
    """
    part = -(-np.diff(starts) // cp_size)
    start = starts[:-1] + part * np.arange(cp_size, dtype=starts.dtype)[:, None]  # [rank, stretch]
    return _fragments(np.minimum(start, starts[1:]), np.minimum(start + part, starts[1:]))


def _fragments(start: Column, stop: Column) -> Fragments:
    """Non-empty fragments from arrays [rank, ...] in the order of the ranks' buffers."""
    size = (stop - start).reshape(len(start), -1)
    rank = np.repeat(np.arange(len(start), dtype=start.dtype), size.shape[1])
    found = Fragments(rank, start.ravel(), stop.ravel(), (np.cumsum(size, axis=1) - size).ravel())
    return found if size.all() else found.take(found.start < found.stop)


def grouped(fragments: Fragments, size: int) -> Fragments:
    """The rows of groups of `size` neighbouring ranks: `rank` is the group's number, touching fragments are one, and
    `row` counts the group's rows in the order of the global buffer.

    >>> list(grouped(dual_chunk(np.array([0, 8]), 4), 2).rows())
    [(0, 0, 2, 0), (0, 6, 8, 2), (1, 2, 6, 0)]
    """
    if not len(fragments):
        return fragments
    unit = fragments.rank // size
    order = np.lexsort((fragments.start, unit))
    unit, start, stop = unit[order], fragments.start[order], fragments.stop[order]
    first = np.ones(len(unit), dtype=bool)
    first[1:] = (unit[1:] != unit[:-1]) | (start[1:] != stop[:-1])
    begin = np.flatnonzero(first)
    unit, start, stop = unit[begin], start[begin], stop[np.append(begin[1:], len(stop)) - 1]
    row = np.cumsum(stop - start) - (stop - start)
    return Fragments(unit, start, stop, row - row[np.searchsorted(unit, unit)])


# ---- layouts by name, or as a table of the user's: makers of ownership of slots, which are tokens and padding

LayoutTable = tuple[tuple[int, int, int, int], ...]  # rows (rank, sequence, start, stop)
LAYOUTS_OF_LENGTHS = ("dual_chunk", "contiguous")  # A plan alone knows the others.


def padded_to_cut(length: int, layout: str | LayoutTable, cp_size: int) -> int:
    """The length of a sequence of bshd or sbhd with the padding that lets it be cut in equal parts.

    >>> padded_to_cut(13, "dual_chunk", 4), padded_to_cut(13, "contiguous", 4)
    (16, 16)
    """
    parts = divisor(layout, cp_size)
    return -(-length // parts) * parts


def divisor(layout: str | LayoutTable, cp_size: int) -> int:
    """The number of parts that a layout cuts a sequence into: multiples of it are cut without a remainder."""
    return 2 * cp_size if layout == "dual_chunk" else cp_size


def slots_of_lengths(layout: str, starts: Column, packed: bool, cp_size: int) -> Fragments:
    """The slots that each rank holds of one side, for layouts that depend on lengths alone.

    Args:
        starts: where each sequence begins in the global buffer, padding included, and where the last ends, [b + 1].
        packed: whether the sequences are one buffer (thd), of which ranks hold equal shares, or each of them is padded
            at its end (bshd, sbhd), of which all are cut alike.

    >>> list(slots_of_lengths("dual_chunk", np.array([0, 5]), False, 2).rows())  # as if it were 8
    [(0, 0, 2, 0), (1, 2, 4, 0), (1, 4, 5, 2)]
    """
    make = dual_chunk if layout == "dual_chunk" else contiguous
    if packed:
        return make(starts if layout == "dual_chunk" else starts[[0, -1]], cp_size)
    slots = np.diff(starts)
    room = np.array([padded_to_cut(length, layout, cp_size) for length in slots.tolist()], dtype=np.int64)
    begin = np.append(0, np.cumsum(room))
    cut = make(begin, cp_size)
    if (room == slots).all():
        return cut
    cut = cut.within(begin[:-1], begin[:-1] + slots)
    shift = (starts - begin)[np.searchsorted(begin, cut.start, side="right") - 1]
    return Fragments(cut.rank, cut.start + shift, cut.stop + shift, cut.row)


def read_layout(layout: Any) -> str | LayoutTable:
    """A layout's name, or a table [n, 4] of integers as tuples, sorted by rank, each rank's rows in the order given.

    Raises:
        ValueError, TypeError: the name does not exist, or it is no such table.
    """
    if isinstance(layout, str):
        check_choice("layout", layout, LAYOUTS)
        return layout
    check_data("layout", layout)
    given: Any = layout.tolist() if hasattr(layout, "tolist") else layout
    if not isinstance(given, list | tuple):
        raise TypeError(f"layout is a {type(layout).__name__}; it must be a name or a table of integers [n, 4]")
    rows: list[tuple[int, int, int, int]] = []
    for n, row in enumerate(cast("Seq[Any]", given)):
        if not isinstance(row, list | tuple) or list(map(type, cast("Seq[Any]", row))) != [int] * 4:
            raise ValueError(f"layout[{n}] is {row!r}; a row has four integers: rank, sequence, start, stop")
        rows.append(cast("tuple[int, int, int, int]", tuple(cast("Seq[Any]", row))))
    return tuple(sorted(rows, key=lambda row: row[0]))


def slots_of_table(table: LayoutTable, starts: Column) -> Fragments:
    rank, sequence, start, stop = np.array(table, dtype=np.int64).reshape(-1, 4).T
    rows = np.cumsum(stop - start) - (stop - start)
    return Fragments(rank, starts[sequence] + start, starts[sequence] + stop, rows - rows[np.searchsorted(rank, rank)])
