"""Copies that need nothing of what arrives are made while it travels, and not after it.

Where heads are exchanged, a step may do nothing but that, and the next one puts what arrived together with the rank's
own rows. These are copied in the step that exchanges: they take no time beside messages that nothing else hides.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from cp_fast.planning.lower import Draft
from cp_fast.planning.tables import RowKey
from cp_fast.program import LoweredStep

__all__ = ["meanwhile"]

Step = LoweredStep[RowKey]


def meanwhile(draft: Draft) -> Draft:
    """The same program with such copies one step earlier, where that launches nothing: a kernel that waits for them
    would hide the messages less, and what they fill would be held beside it. Not for one that is updated in place.
    Which buffers a step is the last to use has to be said anew (`released`).
    """
    program = draft.program
    forward, backward = (_earlier(steps) for steps in (program.forward, program.backward))
    return replace(draft, program=replace(program, forward=forward, backward=backward))


def _earlier(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    made = list(steps)
    for number, (before, step) in enumerate(pairwise(steps)):
        if before.launches or not before.recvs:
            continue
        late = {recv.buffer for recv in before.recvs} | {copy.target.buffer for copy in (*step.packed, *step.copies)}
        moved = tuple(copy for copy in step.copies if copy.source.buffer not in late)
        made[number] = replace(made[number], copies=made[number].copies + moved)
        made[number + 1] = replace(step, copies=tuple(copy for copy in step.copies if copy.source.buffer in late))
    return tuple(made)
