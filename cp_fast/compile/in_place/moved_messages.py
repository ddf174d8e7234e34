"""The places of messages in padded buffers. Messages lie there one after the other, each with its largest size."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from cp_fast.compile.executable_plan import PassPlan
from cp_fast.compile.in_place.shape import Shape
from cp_fast.compile.index_tables import RowKey
from cp_fast.compile.instructions import Copy, Recv, Send
from cp_ref.schedules.table import Column

__all__ = ["Moved", "moved_messages"]

MessageKey = tuple[int, int]  # peer, tag


@dataclass(frozen=True)
class Moved:
    """The first row of each message in the batch's own buffer (`here`) and in the padded one (`there`; `begin` by
    message), and the size of the padded one.
    """

    here: Column
    there: Column
    begin: dict[MessageKey, int]
    size: int

    def rows(self, rows: Column) -> Column:
        """Rows of the batch's own buffer in the padded one."""
        if len(self.here) == 0:
            return rows
        number = np.searchsorted(self.here, rows, side="right") - 1
        return rows - self.here[number] + self.there[number]


def moved_messages(wanted: PassPlan[RowKey], given: PassPlan[RowKey], shape: Shape) -> dict[int, Moved]:
    """The positions of messages in the buffers that they fill and in those that they are sent from.

    Args:
        wanted: the plan of the first batch.
        given: the plan of this batch.
    """
    names = {spec.name: number for number, spec in enumerate(given.buffers)}
    sizes = _messages(given)
    moved: dict[int, Moved] = {}
    for number, messages in _messages(wanted).items():
        spec = wanted.buffers[number]
        padded = {(peer, tag): shape.message_rows(spec.kind, peer) for peer, tag in messages}
        begin, first = _begins(padded), _begins(sizes.get(names.get(spec.name, -1), {}))
        here, there = (np.array([of[x] for x in begin if x in first], dtype=np.int64) for of in (first, begin))
        moved[number] = Moved(here, there, begin, sum(padded.values()))
    sums = [(one.source.buffer, one.target.buffer) for one in wanted.of(Copy)]
    return moved | {total: moved[message] for total, message in sums if wanted.buffers[message].role == "message"}


def _messages(plan: PassPlan[RowKey]) -> dict[int, dict[MessageKey, int]]:
    """The consecutive messages that fill each buffer of operands, or are sent from each buffer of results, with their
    numbers of rows.
    """
    found: dict[int, dict[MessageKey, int]] = {}
    for one in plan.instructions:
        if isinstance(one, Recv) and plan.buffers[one.buffer].role == "operand":
            found.setdefault(one.buffer, {})[one.peer, one.tag] = one.size
        if isinstance(one, Send) and plan.buffers[one.source.buffer].role == "message":
            assert isinstance(one.source.rows, slice)
            size = one.source.rows.stop - one.source.rows.start
            found.setdefault(one.source.buffer, {})[one.peer, one.tag] = size
    return found


def _begins(sizes: dict[MessageKey, int]) -> dict[MessageKey, int]:
    """The first row of each if they are consecutive."""
    return dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
