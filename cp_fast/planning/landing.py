"""What arrives is written where it is wanted: into the rows of the buffer that a launch reads, not copied there later.

Where heads are exchanged, the rows that arrive are put together with the rank's own in a buffer of all rows, in their
order. If those of a message lie there in a few pieces, the message is received into them, and the copy is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cp_fast.planning.lower import Draft, reads
from cp_fast.planning.tables import RowKey, Tables
from cp_fast.program import OWN, Copy, LoweredProgram, LoweredStep

__all__ = ["landed"]

_MOST = 4  # pieces of a message: each is a copy of its own, which takes the host longer than a kernel for all of them

Steps = tuple[LoweredStep[RowKey], ...]
Span = tuple[int, int]  # first row, number of rows


def landed(draft: Draft) -> Draft:
    """The same program with such messages received in place. Not for one that is updated in place. Which buffers
    a step is the last to use has to be said anew (`released`).
    """
    program = draft.program
    forward, backward = (_landed(program, steps, draft.tables) for steps in (program.forward, program.backward))
    return replace(draft, program=replace(program, forward=forward, backward=backward))


def _landed(program: LoweredProgram[RowKey], steps: Steps, tables: Tables) -> Steps:
    made = list(steps)
    times = Counter(name for step in steps for name in reads(step))
    for number, step in enumerate(steps):
        for name in dict.fromkeys(recv.buffer for recv in step.recvs):
            later = [(n, c) for n in range(number + 1, len(steps)) for c in steps[n].copies if c.source.buffer == name]
            if times[name] != 1 or len(later) != 1 or name in program.saved:
                continue
            at, copy = later[0]
            recvs = [recv for recv in step.recvs if recv.buffer == name]
            pieces = _pieces(program, copy, [recv.size for recv in recvs], tables)
            target = copy.target.buffer
            if pieces is None or _is_there(made[:number], target) or _is_filled(made[number:at], target):
                continue
            rows = iter(pieces)
            new = [
                replace(recv, buffer=target, rows=next(rows)) if recv.buffer == name else recv
                for recv in made[number].recvs
            ]
            made[number] = replace(made[number], recvs=tuple(new))
            made[at] = replace(made[at], copies=tuple(c for c in made[at].copies if c is not copy))
    return tuple(made)


def _is_there(steps: Sequence[LoweredStep[RowKey]], name: str) -> bool:
    """Whether a buffer is the rank's own, arrives or is filled in these steps."""
    arrives = any(recv.buffer == name for step in steps for recv in step.recvs)
    return name in OWN.values() or arrives or _is_filled(steps, name)


def _is_filled(steps: Sequence[LoweredStep[RowKey]], name: str) -> bool:
    """Whether something is copied into a buffer, or arrives in it in any step but the first of these."""
    copied = any(copy.target.buffer == name for step in steps for copy in (*step.packed, *step.copies))
    return copied or any(recv.buffer == name for step in steps[1:] for recv in step.recvs)


def _pieces(
    program: LoweredProgram[RowKey], copy: Copy[RowKey], sizes: Sequence[int], tables: Tables
) -> list[tuple[slice, ...]] | None:
    """For messages of these sizes, one behind the other: the rows that a copy of all of them puts each into. None where
    they are too many, or the copy is of some rows or heads only.
    """
    for side in (copy.source, copy.target):
        buffer = program.buffers[side.buffer]
        if side.heads != (0, buffer.heads[1] - buffer.heads[0]):
            return None
    spans = tables.spans(copy.target.rows)
    if copy.source.rows != slice(0, sum(sizes)) or len(spans) > _MOST * len(sizes):
        return None
    found = _cut(spans, sizes)
    return found if all(0 < len(pieces) <= _MOST for pieces in found) else None


def _cut(spans: Sequence[Span], sizes: Sequence[int]) -> list[tuple[slice, ...]]:
    """Spans (first row, number of rows), one behind the other, cut into parts of these sizes.

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
