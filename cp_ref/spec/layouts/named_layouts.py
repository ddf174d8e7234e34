"""Layouts by name, or as a table of the user's: makers of ownership, of slots (tokens and padding)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, cast

import numpy as np

from cp_ref.spec.arguments.argument_words import LAYOUTS
from cp_ref.spec.arguments.single_values import check_choice, check_data
from cp_ref.spec.layouts.balanced import balanced
from cp_ref.spec.tables.ownership import Fragments, Ownership, contiguous, dual_chunk
from cp_ref.spec.tables.problem import Problem
from cp_ref.spec.tables.table import Column, starts_of
from cp_ref.spec.tables.workload import areas_of

__all__ = [
    "LAYOUTS_OF_LENGTHS",
    "check_layout",
    "divisor",
    "padded_to_cut",
    "read_layout",
    "slice_rows",
    "slots_of",
    "slots_of_lengths",
    "table_of",
]

LayoutTable = tuple[tuple[int, int, int, int], ...]
LAYOUTS_OF_LENGTHS = ("dual_chunk", "contiguous")  # A plan alone knows the others.


def slice_rows(problem: Problem, side: str) -> int:
    """Rows of the sequence axis of every rank's slice of one side ("q" or "kv"): a share of the rows, rounded up."""
    lengths = problem.lengths.slots(side)
    held = problem.slots.side(side) if not isinstance(problem.layout, str) else None
    most = int((held.row + held.stop - held.start).max(initial=0)) if held is not None else 0
    if problem.qkv_format == "thd":
        return max(most, -(-sum(lengths) // problem.cp_size))
    share = padded_to_cut(max(lengths, default=0), problem.layout, problem.cp_size) // problem.cp_size
    return max(share, -(-most // max(len(lengths), 1)))


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
        own = _of_table(layout, starts)
    return Ownership(cp_size, own, own)


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


def table_of(problem: Problem) -> Problem:
    """The same problem, its layout as a table.

    >>> from cp_ref.spec.tables.sequences import Sequences
    >>> even = Problem(2, Sequences([4, 2], [4, 2], [4, 2], [4, 2]), layout="contiguous", qkv_format="thd")
    >>> table_of(even).layout
    ((0, 0, 0, 3), (1, 0, 3, 4), (1, 1, 0, 2))
    """
    starts = starts_of(problem.lengths.slots_q)
    held = problem.slots.q.within(starts[:-1], starts[1:])
    sequence = np.searchsorted(starts, held.start, side="right") - 1
    columns = held.rank, sequence, held.start - starts[sequence], held.stop - starts[sequence]
    return replace(problem, layout=tuple(zip(*(column.tolist() for column in columns), strict=True)))


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


def check_layout(problem: Problem) -> None:
    """Raise ValueError where the problem cannot have its layout.

    "balanced" and tables are for self-attention, because keys then lie where their queries do. In bshd and sbhd they
    are for padding masks, because the rows of a slice are then no longer one sequence each. A table holds every slot
    once.
    """
    layout, lengths = problem.layout, problem.lengths
    if layout in LAYOUTS_OF_LENGTHS:
        return
    if lengths.slots_q != lengths.slots_kv:
        raise ValueError(
            f"layout is {problem.layout_name!r}, which needs keys and queries in the same places, but their lengths "
            "differ (cu_seqlens_kv, cu_seqlens_kv_padded or seqlen_kv); use 'dual_chunk' or 'contiguous'"
        )
    if problem.qkv_format != "thd" and not problem.attn_mask_type.startswith("padding"):
        raise ValueError(
            f"layout is {problem.layout_name!r}, which in {problem.qkv_format!r} needs a padding mask, but "
            f"attn_mask_type is {problem.attn_mask_type!r}; use 'dual_chunk' or 'contiguous'"
        )
    if not isinstance(layout, str):
        _check_table(layout, lengths.slots_q, problem.cp_size)


def _check_table(table: LayoutTable, slots: Seq[int], cp_size: int) -> None:
    for n, (rank, sequence, start, stop) in enumerate(table):
        if not 0 <= rank < cp_size:
            raise ValueError(f"layout has rank {rank} (row {n}, sorted by rank); ranks go from 0 to {cp_size - 1}")
        if not 0 <= sequence < len(slots):
            raise ValueError(f"layout has sequence {sequence} (row {n}, sorted by rank), but there are {len(slots)}")
        if not 0 <= start < stop <= slots[sequence]:
            raise ValueError(
                f"layout gives rank {rank} rows {start} to {stop} of sequence {sequence}, which has {slots[sequence]}; "
                "start < stop must lie inside"
            )
    held = [0] * len(slots)  # up to which row each sequence is held
    for _, sequence, start, stop in sorted(table, key=lambda row: row[1:]):
        if start != held[sequence]:
            what = "nobody" if start > held[sequence] else "two ranks"
            row = min(start, held[sequence])
            raise ValueError(f"layout gives row {row} of sequence {sequence} to {what}; every row needs one rank")
        held[sequence] = stop
    for sequence, (stop, length) in enumerate(zip(held, slots, strict=True)):
        if stop < length:
            raise ValueError(f"layout gives row {stop} of sequence {sequence} to nobody; every row needs one rank")


def _of_table(table: LayoutTable, starts: Column) -> Fragments:
    rank, sequence, start, stop = np.array(table, dtype=np.int64).reshape(-1, 4).T
    rows = np.cumsum(stop - start) - (stop - start)
    return Fragments(rank, starts[sequence] + start, starts[sequence] + stop, rows - rows[np.searchsorted(rank, rank)])
