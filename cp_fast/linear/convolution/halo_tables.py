"""One rank's part of a convolution as tables of numbers: the rows that travel, and the rows that each row reads.

Every row that the rank has or receives has a slot: its own packed rows first, then those that arrive, message by
message, and at last one row of zeros, for rows before a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cp_ref.spec import Message, Problem, make_rank_halo
from cp_ref.spec.linear.document_fragments import DocumentFragments
from cp_ref.spec.tables.table import Column

__all__ = ["Halo", "HaloTables", "halo_tables"]


class Halo(NamedTuple):
    """A message of rows: the slots that they are in at this end, int64."""

    peer: int
    tag: int
    slots: torch.Tensor


Steps = tuple[tuple[tuple[Halo, ...], tuple[Halo, ...]], ...]


@dataclass(frozen=True, eq=False)
class HaloTables:
    """Both passes on one rank.

    Attributes:
        slots: how many slots there are, the row of zeros included.
        forward: (sends, receives) of each step with messages: rows of x are copied.
        backward: the same of their gradients, which are added where they arrive.
        reads: the slot that each own row reads for each column of the weight, int64 [n, kernel_size].
        read_by: the own row that reads each slot for each column of the weight, int64 [slots, kernel_size]; n where
            there is none.
    """

    slots: int
    forward: Steps
    backward: Steps
    reads: torch.Tensor
    read_by: torch.Tensor


def halo_tables(
    problem: Problem, rank: int, own: DocumentFragments, kernel_size: int, device: torch.device
) -> HaloTables:
    """The tables of one rank. own: its fragments, in the order of its rows."""
    steps = make_rank_halo(problem, kernel_size, rank)
    rows = [_ranges(own.start, own.stop)]
    n = len(rows[0])
    rows += [_rows(message) for step in steps[0] for message in step.recvs]
    held = np.concatenate(rows)  # the global row in each slot
    order = np.argsort(held, kind="stable")
    zeros = len(held)

    def slots_of(wanted: Column) -> Column:
        """The slot of each global row; that of zeros for a row that is not here."""
        place = np.minimum(np.searchsorted(held, wanted, sorter=order), max(zeros - 1, 0))
        found = order[place] if zeros else place
        return np.where(held[found] == wanted, found, zeros) if zeros else np.full_like(wanted, zeros)

    first = np.array(problem.starts_q, dtype=np.int64)[own.document]
    begin = np.repeat(first, own.stop - own.start)[:, None]
    source = rows[0][:, None] - (kernel_size - 1) + np.arange(kernel_size)
    reads = np.where(source >= begin, slots_of(np.maximum(source, begin)), zeros)
    read_by = np.full((zeros + 1, kernel_size), n)
    for column in range(kernel_size):
        read_by[reads[:, column], column] = np.arange(n)
    read_by[zeros] = n

    def table(x: Column) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)).to(device)

    def messages(of_pass: Sequence[tuple[Sequence[Message], Sequence[Message]]]) -> Steps:
        return tuple(
            tuple(tuple(Halo(m.peer, m.tag, table(slots_of(_rows(m)))) for m in side) for side in sides)  # pyright: ignore[reportReturnType]
            for sides in of_pass
            if sides[0] or sides[1]
        )

    there, back = ([(step.sends, step.recvs) for step in of_pass] for of_pass in steps)
    return HaloTables(zeros + 1, messages(there), messages(back), table(reads), table(read_by))


def _rows(message: Message) -> Column:
    """The global rows of a message, in order."""
    return _ranges(message.pieces.start, message.pieces.stop)


def _ranges(start: Column, stop: Column) -> Column:
    """All rows of spans [start, stop).

    >>> _ranges(np.array([3, 0]), np.array([5, 2])).tolist()
    [3, 4, 0, 1]
    """
    size = stop - start
    return np.arange(int(size.sum())) + np.repeat(start - (np.cumsum(size) - size), size)
