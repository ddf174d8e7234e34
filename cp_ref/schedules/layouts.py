"""Layouts by name, or as a table of the user's: makers of ownership, of slots (tokens and padding)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, cast

import numpy as np

from cp_ref.schedules.ownership import Fragments, contiguous, dual_chunk
from cp_ref.schedules.table import Column
from cp_ref.schedules.values import check_choice, check_data
from cp_ref.schedules.words import LAYOUTS

__all__ = [
    "LAYOUTS_OF_LENGTHS",
    "LayoutTable",
    "divisor",
    "padded_to_cut",
    "read_layout",
    "slots_of_lengths",
    "slots_of_table",
]

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
