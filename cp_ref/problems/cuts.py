"""The rows of a global tensor in each rank's slice, and their positions: shared by shard, unshard and position_ids.

x [7], dual_chunk of sequences of 4 and 3 on 2 ranks     with the zeros that fill up the slices: each rank's rows
a0 a1 a2 a3 b0 b1 b2                                     rank 0: a0 a3 b0 b2     rank 1: a1 a2 b1 0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from cp_ref.problems.call_checks import check_placements, check_plan_owner, check_settled, local_part
from cp_ref.schedules.ownership import LAYOUTS_OF_LENGTHS, Fragments, padded_to_cut, slots_of_lengths
from cp_ref.schedules.problem import Problem, slice_rows
from cp_ref.schedules.table import Column, ranges, starts_of
from cp_ref.schedules.values import (
    check_choice,
    check_tensor,
    differences,
    kind_of,
    read_count,
    read_lengths,
)
from cp_ref.schedules.words import QKV_FORMATS

__all__ = [
    "Cut",
    "Gathering",
    "Roll",
    "planned_cut",
    "planned_positions",
    "read_cut",
    "read_gathering",
    "read_positions",
    "roll_of",
    "sequences_of",
    "slice_axis",
]


@dataclass(frozen=True, eq=False)
class Cut:
    """How a global tensor is cut into slices, after zeros at its end have made it cp_size slices long.

    Attributes:
        fragments: who holds which rows; rows that nobody holds, and the zeros, are tail, which fills the slices up.
        cp_size: the number of slices.
        qkv_format: of the tensors.
        size: rows of the global tensor's sequence axis.
        rows: rows of each slice's.
        batch: None where the sequence axis is cut, of all sequences alike; else the number of sequences, which are cut
            as one buffer of rows.
    """

    fragments: Fragments
    cp_size: int
    qkv_format: str
    size: int
    rows: int
    batch: int | None = None

    def of(self, rank: int) -> Column:
        """The rows of the lengthened tensor that a rank's slice has, in order.

        >>> fragments = Fragments.of_rows([(0, 0, 1, 0), (0, 3, 5, 1), (0, 6, 7, 3), (1, 1, 3, 0), (1, 5, 6, 2)])
        >>> Cut(fragments, 2, "thd", 7, 4).of(1).tolist()
        [1, 2, 5, 7]
        """
        own = self.fragments.of(rank)
        tail: Column = np.arange(int(self._tails[rank]), int(self._tails[rank + 1]))
        return np.append(ranges(own.start, own.stop - own.start), tail)

    @cached_property
    def _tails(self) -> Column:
        """Return where each rank's part of the tail begins, and the end of the last."""
        held = np.bincount(self.fragments.rank, self.fragments.stop - self.fragments.start, self.cp_size)
        held = held.astype(np.int64)
        return np.append(0, np.cumsum((self.batch or 1) * self.rows - held)) + held.sum()


def slice_axis(x: Any, qkv_format: str) -> int:
    """The sequence axis of a tensor in this format: 1 for bshd, 0 for sbhd and thd.

    Raises:
        TypeError, ValueError: x is no tensor, has too few axes, or the format does not exist.
    """
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    axis = 1 if qkv_format == "bshd" else 0
    check_tensor("x", x)
    if len(x.shape) <= axis:
        raise ValueError(f"x has shape {list(x.shape)}; qkv_format {qkv_format!r} has its sequence on axis {axis}")
    return axis


def read_cut(
    cp: Any, plan: Any, x: Any, qkv_format: str, cu_seqlens_padded: Any, *, whole: bool, seqlen: Any = None
) -> Cut:
    """How a tensor is cut, by a plan or by lengths. Of a slice that is a DTensor the local part counts.

    Args:
        cp: a ContextParallel. plan: a plan of its package, or None.
        whole: whether x is the global tensor (shard), or a rank's slice (unshard).
        seqlen: rows of the global tensor in bshd and sbhd, where x is a slice; None: as many as all slices have.

    Raises:
        ValueError, TypeError: lengths that are not the format's, do not fit x, or are given with a plan, which has
        them; a layout that only plans know.
    """
    problem = None if plan is None else _problem_of(plan, cp, qkv_format, seqlen, cu_seqlens_padded)
    if not whole:
        layout, form = (cp.layout, qkv_format) if problem is None else (problem.layout, problem.qkv_format)
        check_placements(cp, layout, form, None, x=x)
        x = local_part(x)
    if problem is not None:
        return _by_plan(problem, x, whole)
    axis = slice_axis(x, qkv_format)
    count = x.shape[axis] * (1 if whole else cp.size)
    if not whole and seqlen is None and qkv_format != "thd":
        _check_length_is_told(cp, x.shape[axis])
    size: Any = count if seqlen is None and qkv_format != "thd" else seqlen
    starts, fragments = _cut_by_lengths(cp, qkv_format, size, cu_seqlens_padded)
    total = int(starts[-1])
    rows = -(-total // cp.size)
    if qkv_format == "thd":
        return _packed(fragments, rows, total, cp.size, count, whole)
    if not whole and total != count:
        raise ValueError(
            f"x has {x.shape[axis]} rows on axis {axis}, but layout {cp.layout!r} at cp_size {cp.size} cuts a sequence "
            f"of {size} into slices of {rows}"
        )
    return Cut(fragments, cp.size, qkv_format, size, rows)


def _check_length_is_told(cp: Any, rows: int) -> None:
    """Raise ValueError if this context has also cut a shorter sequence into slices of `rows` rows."""
    if (length := cp.uneven.get(rows)) is not None:
        raise ValueError(
            f"seqlen is None, and cp has cut a sequence of {length} into slices of {rows} rows; say whether x is "
            f"of {length} or of {rows * cp.size} tokens"
        )


def _by_plan(problem: Problem, x: Any, whole: bool) -> Cut:
    """The cut of tensors of the query side."""
    axis, rows = slice_axis(x, problem.qkv_format), slice_rows(problem, "q")
    slots, count = problem.lengths.slots_q, x.shape[axis] * (1 if whole else problem.cp_size)
    if problem.qkv_format == "thd":
        return _packed(problem.slots.q, rows, sum(slots), problem.cp_size, count, whole)
    batch, wanted = len(slots), slots[0] if whole and len(slots) else rows
    if x.shape[axis] != wanted:
        raise ValueError(
            f"x has shape {list(x.shape)}; of the plan's batch axis {axis} has {wanted} rows "
            f"{'before' if whole else 'after'} sharding"
        )
    cut = planned_cut(problem, "q")
    if cut.batch is not None and (len(x.shape) < 2 or x.shape[1 - axis] != batch):
        raise ValueError(f"x has shape {list(x.shape)}; axis {1 - axis} must have the plan's {batch} sequences")
    return cut


def planned_cut(problem: Problem, side: str, tail: int = 0) -> Cut:
    """How a problem's layout cuts global tensors of one side ("q" or "kv"); in thd with `tail` tokens behind them."""
    rows, cp_size, layout = slice_rows(problem, side), problem.cp_size, problem.layout
    slots = problem.lengths.slots(side)
    if problem.qkv_format == "thd":
        return _packed(problem.slots.side(side), rows, sum(slots), cp_size, sum(slots) + tail, True)
    size = max(slots, default=0)
    if isinstance(layout, str) and layout in LAYOUTS_OF_LENGTHS:
        fragments = slots_of_lengths(layout, starts_of([rows * cp_size]), False, cp_size)
        return Cut(fragments, cp_size, problem.qkv_format, size, rows)
    return Cut(problem.slots.side(side), cp_size, problem.qkv_format, size, rows, len(slots))


def _packed(fragments: Fragments, rows: int, total: int, cp_size: int, count: int, whole: bool) -> Cut:
    """The cut of a packed buffer of `count` rows, or of all slices of one. Its `total` rows of sequences need slices of
    `rows` rows; longer slices have a tail.
    """
    if count < (total if whole else rows * cp_size):
        has, of_which = (count, "") if whole else (count // cp_size, f", of which a slice has {rows}")
        raise ValueError(
            f"x has {has} tokens, but cu_seqlens_padded ends at {total}{of_which}; more is a tail, fewer is a mistake"
        )
    size = count if whole or count > rows * cp_size else total
    return Cut(fragments, cp_size, "thd", size, max(rows, -(-count // cp_size)))


def check_known(layout: Any) -> None:
    """Raise ValueError for a layout that the lengths alone do not decide."""
    if layout not in LAYOUTS_OF_LENGTHS:
        named = "'balanced'" if isinstance(layout, str) else "of a table"
        raise ValueError(
            f"plan is None, but layout {named} is known to a plan alone; give plan=make_plan(...), or call "
            "cp_batch.shard(x) where shard_batch has cut the batch"
        )


def sequences_of(cut: Cut, plan: Any, cu_seqlens_padded: Any) -> Column:
    """The first row of each sequence among the rows to cut, and the end of the last, [b + 1]."""
    if cut.batch is None and cut.qkv_format != "thd":
        return np.array([0, cut.size])
    slots = _thd_slots(cu_seqlens_padded) if plan is None else plan.problem.lengths.slots_q
    return starts_of(slots)


def read_positions(
    cp: Any, plan: Any, qkv_format: str, seqlen: int | None, cu_seqlens_padded: Any, rank: int | None
) -> Column:
    """The position inside its sequence of each row of a rank's slice; the arguments are those of `position_ids`.

    Raises:
        ValueError, TypeError: the lengths are missing, or not the format's; a layout that only plans know.
    """
    whose: int = cp.rank if rank is None else read_count("rank", rank, at_least=0, at_most=cp.size - 1)
    if plan is not None:
        return planned_positions(_problem_of(plan, cp, qkv_format, seqlen, cu_seqlens_padded), whose)
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    starts, fragments = _cut_by_lengths(cp, qkv_format, seqlen, cu_seqlens_padded)
    return _positions(fragments.of(whose), starts, -(-int(starts[-1]) // cp.size))


def planned_positions(problem: Problem, rank: int) -> Column:
    """The position inside its sequence of each query row of a rank's slice: [rows]; for layouts that cut the sequences
    of bshd and sbhd differently, [b, rows] and [rows, b].
    """
    cut = planned_cut(problem, "q")
    alike = cut.batch is None and cut.qkv_format != "thd"  # One sequence is like all others.
    starts = starts_of([cut.rows * cut.cp_size] if alike else problem.lengths.slots_q)
    if cut.batch is None:
        return _positions(cut.fragments.of(rank), starts, cut.rows)
    found = _positions(cut.fragments.of(rank), starts, cut.batch * cut.rows).reshape(cut.batch, cut.rows)
    return found if cut.qkv_format == "bshd" else np.ascontiguousarray(found.T)


def _positions(own: Fragments, starts: Column, rows: int) -> Column:
    own = own.within(starts[:-1], starts[1:])
    first = starts[np.searchsorted(starts, own.start, side="right") - 1]  # Its sequence begins there.
    found = ranges(own.start - first, own.stop - own.start)
    return np.append(found, np.zeros(rows - len(found), dtype=found.dtype))


def _problem_of(plan: Any, cp: Any, qkv_format: str, seqlen: Any, cu_seqlens_padded: Any) -> Problem:
    """A plan's problem, checked against the context and against the arguments given with the plan."""
    if not isinstance(getattr(plan, "problem", None), Problem):
        raise TypeError(f"plan is {kind_of(plan)}; it must be a Plan, as make_plan gives it")
    check_plan_owner(plan.problem, plan.rank, cp)
    check_settled(plan.problem, qkv_format=qkv_format, cu_seqlens_padded=cu_seqlens_padded, seqlen=seqlen)
    return plan.problem


def _cut_by_lengths(cp: Any, qkv_format: str, seqlen: Any, cu_seqlens_padded: Any) -> tuple[Column, Fragments]:
    """The starts of the sequences with the end of the last, and the rows of each rank, without a plan. In bshd and
    sbhd, those of one sequence, padded until it divides: all others are cut like it.
    """
    check_known(cp.layout)
    if packed := qkv_format == "thd":
        if seqlen is not None:
            raise ValueError(f"seqlen is {seqlen!r}, but qkv_format 'thd' takes its lengths from cu_seqlens_padded")
        slots = _thd_slots(cu_seqlens_padded)
    else:
        if cu_seqlens_padded is not None:
            raise ValueError(f"cu_seqlens_padded is given, but qkv_format is {qkv_format!r}; it belongs to 'thd'")
        if seqlen is None:
            raise ValueError(f"seqlen is None; qkv_format {qkv_format!r} needs the global sequence length")
        slots = [padded_to_cut(read_count("seqlen", seqlen, at_least=0), cp.layout, cp.size)]
    starts = starts_of(slots)
    return starts, slots_of_lengths(cp.layout, starts, packed, cp.size)


def _thd_slots(cu_seqlens_padded: Any) -> list[int]:
    cumulative = read_lengths("cu_seqlens_padded", cu_seqlens_padded)
    if cumulative is None:
        raise ValueError("cu_seqlens_padded is None; qkv_format 'thd' needs it")
    return differences(cumulative)


@dataclass(frozen=True)
class Gathering:
    """The arguments that all ranks must have in common, in the form that `agreed` takes."""

    x: tuple[tuple[int, ...], str]
    qkv_format: str
    layout: object  # It is a name, or a table.
    seqlen: int | None
    cu_seqlens_padded: tuple[int, ...] | None
    problem: str | None  # It is the plan's problem.
    roll: tuple[int, float] | None  # It has shifts and fill_value.
    requires_grad: bool  # True: a backward pass follows, which is collective too.

    @property
    def fingerprint(self) -> bytes:
        """32 bytes of the text."""
        return blake2b(str(self).encode()).digest()[:32]


def read_gathering(
    cp: Any,
    plan: Any,
    x: Any,
    qkv_format: str,
    cu_seqlens_padded: Any,
    seqlen: Any,
    read_roll: Callable[[], tuple[int, float]] | None = None,
    *,
    with_grad: bool,
) -> tuple[Cut, Gathering]:
    """How the tensor was cut of which every rank has a slice, and what all ranks must have in common.

    Args:
        cp: a ContextParallel. read_roll: reads shifts and fill_value of `roll`, once x is known to be a tensor.
            with_grad: whether PyTorch records what needs gradients. The others: as in `unshard`.

    Raises:
        ValueError, TypeError: an argument is wrong.
    """
    cut = read_cut(cp, plan, x, qkv_format, cu_seqlens_padded, whole=False, seqlen=seqlen)
    lengths = None if cu_seqlens_padded is None else tuple(cu_seqlens_padded.tolist())
    shifted = None if read_roll is None else read_roll()
    of_plan = None if plan is None else plan.problem.fingerprint.hex()
    shape = tuple(x.shape), str(x.dtype)
    needs_grad = with_grad and x.requires_grad
    return cut, Gathering(shape, cut.qkv_format, cp.layout, seqlen, lengths, of_plan, shifted, needs_grad)


@dataclass(frozen=True, eq=False)
class Roll:
    """One rank's share of a roll.

    Attributes:
        sends: for every rank, itself included, the rows of this rank's slice that it takes.
        recvs: for every rank, itself included, the rows of the result that take its rows; in the order of its sends.
        most: the rows that any rank sends to any other.
    """

    sends: tuple[Column, ...]
    recvs: tuple[Column, ...]
    most: int


def roll_of(cut: Cut, starts: Column, shifts: int, rank: int) -> Roll:
    """The roll of a slice.

    Args:
        starts: where each sequence begins among the rows that are cut, and where the last ends, [b + 1].
        shifts: how many rows each row moves on; negative: back.

    >>> from cp_ref.schedules.ownership import dual_chunk
    >>> cut = Cut(dual_chunk(np.array([0, 4, 7]), 2), 2, "thd", 7, 4)
    >>> roll = roll_of(cut, np.array([0, 4, 7]), -1, 0)
    >>> [x.tolist() for x in roll.sends], [x.tolist() for x in roll.recvs]
    ([[], [1, 3]], [[], [0, 2]])
    """
    rows = [cut.of(r) for r in range(cut.cp_size)]
    holder = np.zeros(sum(map(len, rows)), dtype=np.int64)
    place = np.zeros_like(holder)
    for r, own in enumerate(rows):
        holder[own], place[own] = r, np.arange(len(own))
    sequence = np.searchsorted(starts, np.arange(len(holder)), side="right") - 1  # after all of them: b
    edges = np.append(starts, len(holder))

    def taken_by(receiver: int) -> tuple[Column, Column]:
        """(rows of its result, the lined-up rows that they take)."""
        own = rows[receiver]
        source, n = own - shifts, sequence[own]
        there = (n < len(starts) - 1) & (source >= edges[n]) & (source < edges[n + 1])
        return np.flatnonzero(there), source[there]

    taken = [taken_by(r) for r in range(cut.cp_size)]
    counts = [np.bincount(holder[source], minlength=cut.cp_size) for _, source in taken]
    most = max(int(np.delete(count, r).max(initial=0)) for r, count in enumerate(counts))
    sends = tuple(place[source[holder[source] == rank]] for _, source in taken)
    into, source = taken[rank]
    return Roll(sends, tuple(into[holder[source] == r] for r in range(cut.cp_size)), most)
