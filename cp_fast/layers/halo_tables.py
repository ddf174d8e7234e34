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

from cp_fast.compile.exchange_program import ExchangedRows, RowMessages
from cp_ref.schedules.linear_schedules import DocumentFragments, conv_rank_schedule
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Message, RankSchedule, Step
from cp_ref.schedules.table import Column, Spans, ranges

__all__ = ["HaloTables", "Reads", "halo_tables"]


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
        messages: the exchange that gathers the rows that arrive, message after message. Its results are the gradients
            of the rows in `edges_read_by`; those of `edges` come back.
        reads: what each of n own rows reads.
        edges: the own rows whose gradients other ranks have a part of, int64, in order.
        edges_read_by: the readers of each edge and, behind the edges, of each row that arrives, int32
            [edges + arriving, kernel_size]. A reader is an own row for each column of the weight; n for no row.
    """

    messages: RowMessages
    reads: Reads
    edges: torch.Tensor
    edges_read_by: torch.Tensor

    @property
    def zeros(self) -> int:
        """The slot that is a row of zeros."""
        return len(self.reads.slots) + self.messages.rows["kv"].gathered.total


def halo_tables(
    problem: Problem, rank: int, own: DocumentFragments, kernel_size: int, device: torch.device
) -> HaloTables:
    """The tables of one rank. own: its fragments, in the order of its rows."""
    there, back = conv_rank_schedule(problem, kernel_size, rank)
    arriving = _spans_of([message for step in there for message in step.recvs])
    rows, arrived = (ranges(spans.start, spans.size) for spans in (own.spans, arriving))
    n, held = len(rows), np.append(rows, arrived)  # the global row in each slot
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
    source = rows[:, None] + np.arange(1 - kernel_size, kernel_size)
    slots = np.where((source >= begin) & (source < end), slots_of(np.clip(source, begin, end - 1)), zeros)
    reads, after = slots[:, :kernel_size], slots[:, kernel_size:]
    starts = np.flatnonzero((reads[:, -2:-1] != np.arange(n)[:, None] - 1).all(1)) if kernel_size > 1 else np.arange(0)
    stops = np.append(starts, n)[np.searchsorted(starts, np.arange(n), side="right")]
    read_by = np.full((zeros + 1, kernel_size), n)
    for column in range(kernel_size):
        read_by[reads[:, column], column] = np.arange(n)

    returned = _spans_of([message for step in back for message in step.recvs])
    edges = np.unique(slots_of(ranges(returned.start, returned.size)))
    edges = edges[edges < n]
    of_edges = Spans(rows[edges], rows[edges] + 1)
    results = ExchangedRows(of_edges, _joined(of_edges, arriving))
    gathered = ExchangedRows(own.spans, arriving)
    return HaloTables(
        RowMessages({"kv": gathered}, _with_messages(there), {"dkv": results}, _with_messages(back)),
        Reads(table(reads, np.int32), table(stops, np.int32), table(after, np.int32)),
        table(edges),
        table(np.concatenate([read_by[edges], read_by[n:zeros]]), np.int32),
    )


def _with_messages(steps: RankSchedule) -> RankSchedule:
    """The steps that send or receive."""
    return tuple(Step(step.sends, step.recvs) for step in steps if step.sends or step.recvs)


def _spans_of(messages: Sequence[Message]) -> Spans:
    """The global rows of messages, one after the other."""
    return _joined(*(Spans(message.pieces.start, message.pieces.stop) for message in messages))


def _joined(*some: Spans) -> Spans:
    none = np.empty(0, dtype=np.int64)
    return Spans(*(np.concatenate([none, *columns]) for columns in zip((none, none), *some, strict=True)))
