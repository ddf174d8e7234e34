"""Rows, or maps of fragments, on their way from owners to readers: as messages of one step, or of two.

A rank of a pair of groups (`a2a+p2p`) reaches its row and its column of the grid of ranks. Rows for
another rank are sent along the column to the reader's row at the first step, and along this row at the second. The rank
between the two forwards them, to several readers if they are in one row.

                 a2a_rank 0   1          cp_size 4, a2a_size 2: rank 0 sends to rank 3
    p2p_rank 0            0   1          step 0: from rank 0 to rank 2
    p2p_rank 1            2   3          step 1: from rank 2 to rank 3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ref.spec.tables.messages import Message, Pieces
from cp_ref.spec.tables.schedule import RankSchedule, Step
from cp_ref.spec.tables.table import Column, Table, runs

__all__ = ["ALL_HEADS", "HEADS", "Deliveries", "brought_back", "delivered"]

HEADS = (1, 1)  # of a schedule: the heads of a linear layer travel together, and count as one
ALL_HEADS = (0, 1)


@dataclass(frozen=True, eq=False)
class Deliveries(Table):
    """Global rows [start, stop) that rank `reader` needs and rank `source` has."""

    source: Column
    reader: Column
    start: Column
    stop: Column


def delivered(needs: Deliveries, rank: int, kind: str, a2a_size: int) -> RankSchedule:
    """One rank's messages that bring the rows to their readers, step by step.

    >>> needs = Deliveries.of_rows([(0, 3, 4, 6), (0, 2, 4, 6)])
    >>> for step in delivered(needs, 2, "state", a2a_size=2):
    ...     for message in (*step.recvs, *step.sends):
    ...         print(message.peer, list(message.pieces.rows()))
    0 [(4, 6, 0, 1)]
    3 [(4, 6, 0, 1)]
    """
    steps: list[Step] = []
    for number, hop in enumerate(_hops(needs, a2a_size)):
        sends = _messages(kind, number, hop.take(hop.source == rank), "reader")
        steps.append(Step(sends, _messages(kind, number, hop.take(hop.reader == rank), "source")))
    return tuple(steps)


def brought_back(needs: Deliveries, rank: int, kind: str, a2a_size: int) -> RankSchedule:
    """The messages of `delivered` backwards: results for the rows that were read go to the rows' owner."""
    there = delivered(needs, rank, kind, a2a_size)
    return tuple(Step(step.recvs, step.sends) for step in reversed(there))


def _hops(needs: Deliveries, a2a_size: int) -> list[Deliveries]:
    """The ways between two ranks that have a group in common, step by step; a step without any is left out."""
    between = needs.reader // a2a_size * a2a_size + needs.source % a2a_size
    hops = (needs.source, between), (between, needs.reader)
    found = [_distinct(Deliveries(*hop, needs.start, needs.stop)) for hop in hops]
    return [hop for hop in found if len(hop)]


def _distinct(needs: Deliveries) -> Deliveries:
    """The deliveries from rank to rank, each row once: sorted by source, reader and row. Spans that overlap are one."""
    needs = needs.take(needs.source != needs.reader)
    needs = needs.take(np.lexsort((needs.start, needs.reader, needs.source)))
    if not len(needs):
        return needs
    apart = (needs.source[1:] != needs.source[:-1]) | (needs.reader[1:] != needs.reader[:-1])
    shift = np.append(0, np.cumsum(apart)) * int(needs.stop.max())  # so that spans of other pairs of ranks lie behind
    end = np.maximum.accumulate(needs.stop + shift)
    new = np.append(True, apart | (needs.start[1:] + shift[1:] >= end[:-1]))
    last = np.append(new[1:], True)
    return Deliveries(needs.source[new], needs.reader[new], needs.start[new], (end - shift)[last])


def _messages(kind: str, number: int, rows: Deliveries, peer: str) -> tuple[Message, ...]:
    """One message for each rank in the column `peer`. Both ends have its pieces in the order of the rows."""
    rows = rows.take(np.argsort(getattr(rows, peer), kind="stable"))
    peers: Column = getattr(rows, peer)
    found: list[Message] = []
    for first, count in zip(*runs(peers[1:] != peers[:-1], len(peers)), strict=True):
        of_peer = slice(int(first), int(first + count))
        pieces = Pieces.spans(rows.start[of_peer], rows.stop[of_peer], ALL_HEADS)
        found.append(Message(kind, int(peers[first]), number, pieces))
    return tuple(found)
