"""Receive rows where a launch reads them, instead of copying them there later.

In a head exchange the received rows join the rank's own in a buffer of all rows, in their order. If the rows of a
message form a few pieces there, the message is received into them, and the copy is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cp_fast.compile.executable_plan import PassPlan
from cp_fast.compile.index_tables import RowKey, Tables
from cp_fast.compile.instructions import Copy, Instruction, Recv, reads

__all__ = ["recv_in_place"]

_MOST = 4  # Pieces of a message: each is a separate copy, and more cost the host more than one kernel for all of them.

Span = tuple[int, int]  # First row, number of rows.


def recv_in_place(plan: PassPlan[RowKey], tables: Tables, kept: Sequence[int]) -> PassPlan[RowKey]:
    """Receive such messages in place. `kept`: buffers that are needed after the pass."""
    found = list(plan.instructions)
    times = Counter(number for one in found for number in reads(one))
    received = dict.fromkeys(one.buffer for one in found if isinstance(one, Recv) and one.part is None)
    for number in received:
        copies = [one for one in found if isinstance(one, Copy) and one.source.buffer == number]
        if times[number] != 1 or len(copies) != 1 or number in kept:
            continue
        copy = copies[0]
        recvs = [one for one in found if isinstance(one, Recv) and one.buffer == number]
        pieces = _pieces(plan, copy, [recv.size for recv in recvs], tables)
        at, posted = (next(n for n, one in enumerate(found) if one is wanted) for wanted in (copy, recvs[0]))
        if pieces is None or _is_written(plan, found[:at], copy, recvs[0].step) or at < posted:
            continue
        where = dict(zip(map(id, recvs), pieces, strict=True))
        target = copy.target.buffer
        found = [
            replace(one, buffer=target, rows=where[id(one)], made_by="recv_in_place")
            if isinstance(one, Recv) and id(one) in where
            else one
            for one in found
            if one is not copy
        ]
    return replace(plan, instructions=tuple(found))


def _is_written(plan: PassPlan[RowKey], before: Sequence[Instruction[RowKey]], copy: Copy[RowKey], step: int) -> bool:
    """Whether a copy or message of another step has written to the target of a copy."""
    target = copy.target.buffer
    if plan.buffers[target].role == "own":
        return True
    return any(
        (isinstance(one, Copy) and one.target.buffer == target and one.step != copy.step)
        or (isinstance(one, Recv) and one.buffer == target and one.step != step)
        for one in before
    )


def _pieces(
    plan: PassPlan[RowKey], copy: Copy[RowKey], sizes: Sequence[int], tables: Tables
) -> list[tuple[slice, ...]] | None:
    """The target rows of each message, for consecutive messages of these sizes that one copy moves. None if there are
    too many pieces, or if the copy moves only some rows or heads.
    """
    for view in (copy.source, copy.target):
        spec = plan.buffers[view.buffer]
        if view.heads != spec.all_heads or spec.parts:
            return None
    if copy.source.rows != slice(0, sum(sizes)) or copy.target.rows is None:
        return None
    spans = tables.spans(copy.target.rows)
    if len(spans) > _MOST * len(sizes):
        return None
    found = _cut(spans, sizes)
    return found if all(0 < len(pieces) <= _MOST for pieces in found) else None


def _cut(spans: Sequence[Span], sizes: Sequence[int]) -> list[tuple[slice, ...]]:
    """Spans (first row, number of rows), cut in order into parts of these sizes.

    >>> _cut([(10, 6), (20, 2)], [4, 4])
    [(slice(10, 14, None),), (slice(14, 16, None), slice(20, 22, None))]
    """
    found: list[tuple[slice, ...]] = []
    rest = list(reversed(spans))
    for size in sizes:
        pieces: list[slice] = []
        while size:
            first, count = rest.pop()
            taken = min(count, size)
            begin = pieces.pop().start if pieces and pieces[-1].stop == first else first
            pieces.append(slice(begin, first + taken))
            if taken < count:
                rest.append((first + taken, count - taken))
            size -= taken
        found.append(tuple(pieces))
    return found
