"""Hoist copies that need nothing of what arrives before the wait: they run while the messages travel.

Where heads are exchanged, a step may do nothing but that, and the next one puts what arrived together with the rank's
own rows. The copies of the own rows then take no time of their own. Where the step launches a kernel nothing is
hoisted: a kernel that waits for copies hides the messages less, and what the copies fill would be held beside it.
"""

from __future__ import annotations

from dataclasses import replace

from cp_fast.compile.index_tables import RowKey
from cp_fast.compile.instructions import Copy, Instruction, Launch, PassPlan, Recv, Send, Wait

__all__ = ["hoist_copies"]


def hoist_copies(plan: PassPlan[RowKey]) -> PassPlan[RowKey]:
    """The same instructions, such copies before the wait of the step before theirs."""
    found = list(plan.instructions)
    for step in range(plan.steps - 1):
        here = [one for one in found if one.step == step]
        received = {one.buffer for one in here if isinstance(one, Recv)}
        if not received or any(isinstance(one, Launch) for one in here):
            continue
        wait = next(place for place, one in enumerate(found) if isinstance(one, Wait) and one.step == step)
        found = _hoisted(plan, found, wait, received)
    return replace(plan, instructions=tuple(found))


def _hoisted(
    plan: PassPlan[RowKey], instructions: list[Instruction[RowKey]], wait: int, received: set[int]
) -> list[Instruction[RowKey]]:
    """Hoist out of the step behind this wait."""
    step = instructions[wait].step + 1
    some = [one for one in instructions if one.step == step and isinstance(one, Copy) and _fills_operand(plan, one)]
    late = received | {one.target.buffer for one in some}
    sent = {one.source.buffer for one in instructions if one.step == step and isinstance(one, Send)}
    moved = [one for one in some if one.source.buffer not in late and one.target.buffer not in sent]
    rest = [one for one in instructions[wait:] if not any(one is other for other in moved)]
    return [*instructions[:wait], *(replace(one, step=step - 1, made_by="hoist_copies") for one in moved), *rest]


def _fills_operand(plan: PassPlan[RowKey], copy: Copy[RowKey]) -> bool:
    """Whether it copies operands of a launch."""
    spec = plan.buffers[copy.target.buffer]
    return spec.role == "operand" and not spec.parts
