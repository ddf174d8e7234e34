"""One rank's part of a convolution as tables of numbers: the rows that travel, and the rows that each row reads.

Every row that the rank has or receives has a slot: its own packed rows first, then those that arrive, message by
message. Behind all is the number of a row of zeros, for rows before a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cp_ref.schedules.linear_schedules import DocumentFragments, conv_rank_schedule
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Message
from cp_ref.schedules.table import Column

__all__ = ["HaloMessage", "HaloTables", "Reads", "Received", "halo_tables"]


class HaloMessage(NamedTuple):
    """A message of the forward pass at its sender: where its rows are."""

    peer: int
    tag: int
    own: torch.Tensor  # own rows of it, int64
    forwarded: torch.Tensor  # rows of it that arrived before, numbered from the first row that arrives, int64
    order: torch.Tensor | None  # the place of each row of the message in [own, forwarded], int64; None: as they are


class Received(NamedTuple):
    """A message at its receiver: rows [start, stop) of those that arrive. The backward pass sends their gradients."""

    peer: int
    tag: int
    start: int
    stop: int


class Edges(NamedTuple):
    """A message of gradients: their numbers among the edges, int64."""

    peer: int
    tag: int
    numbers: torch.Tensor


class Reads(NamedTuple):
    """The rows that n own rows read, and the runs of own rows. A run is consecutive rows of one document that lie side
    by side. A row of a run reads the rows before it in the run and, behind these, rows that the run's first row reads.
    """

    slots: torch.Tensor  # int32 [n, kernel_size]: the slots that each row reads, the last its own
    stops: torch.Tensor  # int32 [n]: the row where the run of each row ends
    after: torch.Tensor  # int32 [n, kernel_size - 1]: the slots of the next rows of each row's document


@dataclass(frozen=True, eq=False)
class HaloTables:
    """Both passes on one rank.

    Attributes:
        arriving: how many rows arrive.
        forward: (sends, receives) of each step with messages: rows of x are copied.
        reads: what each of n own rows reads.
        edges: the own rows whose gradients other ranks have a part of, int64, in order.
        edges_read_by: the readers of each edge and, behind the edges, of each row that arrives, int32
            [edges + arriving, kernel_size]. A reader is an own row for each column of the weight; n for no row.
        backward: the messages of the gradients of the rows in `edges_read_by`, which are added where they arrive.
    """

    arriving: int
    forward: tuple[tuple[tuple[HaloMessage, ...], tuple[Received, ...]], ...]
    reads: Reads
    edges: torch.Tensor
    edges_read_by: torch.Tensor
    backward: tuple[tuple[tuple[Edges, ...], tuple[Edges, ...]], ...]

    @property
    def zeros(self) -> int:
        """The slot that is a row of zeros."""
        return len(self.reads.slots) + self.arriving


def halo_tables(
    problem: Problem, rank: int, own: DocumentFragments, kernel_size: int, device: torch.device
) -> HaloTables:
    """The tables of one rank. own: its fragments, in the order of its rows."""
    there, back = conv_rank_schedule(problem, kernel_size, rank)
    rows = [_ranges(own.start, own.stop)]
    n = len(rows[0])
    rows += [_rows(message) for step in there for message in step.recvs]
    held = np.concatenate(rows)  # the global row in each slot
    order = np.argsort(held, kind="stable")
    zeros = len(held)

    def slots_of(wanted: Column) -> Column:
        """The slot of each global row; that of zeros for a row that is not here."""
        place = np.minimum(np.searchsorted(held, wanted, sorter=order), max(zeros - 1, 0))
        found = order[place] if zeros else place
        return np.where(held[found] == wanted, found, zeros) if zeros else np.full_like(wanted, zeros)

    def table(x: Column, dtype: type[np.signedinteger] = np.int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=dtype)).to(device)

    first, lengths = (np.array(x, dtype=np.int64)[own.document] for x in (problem.starts_q, problem.lengths.len_q))
    begin, end = (np.repeat(x, own.stop - own.start)[:, None] for x in (first, first + lengths))
    source = rows[0][:, None] + np.arange(1 - kernel_size, kernel_size)
    slots = np.where((source >= begin) & (source < end), slots_of(np.clip(source, begin, end - 1)), zeros)
    reads, after = slots[:, :kernel_size], slots[:, kernel_size:]
    starts = np.flatnonzero((reads[:, -2:-1] != np.arange(n)[:, None] - 1).all(1)) if kernel_size > 1 else np.arange(0)
    stops = np.append(starts, n)[np.searchsorted(starts, np.arange(n), side="right")]
    read_by = np.full((zeros + 1, kernel_size), n)
    for column in range(kernel_size):
        read_by[reads[:, column], column] = np.arange(n)

    def sent(message: Message) -> HaloMessage:
        slots = slots_of(_rows(message))
        mine = slots < n
        order = np.empty_like(slots)
        order[np.append(np.flatnonzero(mine), np.flatnonzero(~mine))] = np.arange(len(slots))
        mixed = None if mine.all() or not mine.any() else table(order)
        return HaloMessage(message.peer, message.tag, table(slots[mine]), table(slots[~mine] - n), mixed)

    forward: list[tuple[tuple[HaloMessage, ...], tuple[Received, ...]]] = []
    arrived = 0
    for step in there:
        received: list[Received] = []
        for message in step.recvs:
            stop = arrived + len(_rows(message))
            received.append(Received(message.peer, message.tag, arrived, stop))
            arrived = stop
        forward.append((tuple(map(sent, step.sends)), tuple(received)))

    returned = [slots_of(_rows(message)) for step in back for message in step.recvs]
    edges = np.unique(np.concatenate([slots[slots < n] for slots in returned] or [np.empty(0, np.int64)]))

    def gradients(messages: Sequence[Message]) -> tuple[Edges, ...]:
        found: list[Edges] = []
        for message in messages:
            slots = slots_of(_rows(message))
            numbers = np.where(slots < n, np.searchsorted(edges, slots), slots - n + len(edges))
            found.append(Edges(message.peer, message.tag, table(numbers)))
        return tuple(found)

    return HaloTables(
        zeros - n,
        tuple(step for step in forward if step[0] or step[1]),
        Reads(table(reads, np.int32), table(stops, np.int32), table(after, np.int32)),
        table(edges),
        table(np.concatenate([read_by[edges], read_by[n:zeros]]), np.int32),
        tuple((gradients(step.sends), gradients(step.recvs)) for step in back if step.sends or step.recvs),
    )


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
