"""Hoist copies that do not need the arriving rows before the wait: they run while the messages travel.

In a head exchange a step may only exchange, and the next step joins the received rows with the rank's own rows. The
messages then hide the copies of the own rows. Nothing is hoisted into a step with a kernel launch: a kernel that waits
for copies hides the messages less, and the copies' targets would occupy memory during the kernel.
"""

from __future__ import annotations

from dataclasses import replace

from cp_fast.compile.executable_plan import PassPlan
from cp_fast.compile.index_tables import RowKey
from cp_fast.compile.instructions import Copy, Instruction, Launch, Recv, Send, Wait

__all__ = ["hoist_copies"]


def hoist_copies(plan: PassPlan[RowKey]) -> PassPlan[RowKey]:
    """Move such copies before the wait of the step before theirs."""
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
    """Hoist copies out of the step after this wait."""
    step = instructions[wait].step + 1
    copies = [
        (one, plan.buffers[one.target.buffer]) for one in instructions if one.step == step and isinstance(one, Copy)
    ]
    some = [one for one, spec in copies if spec.role == "operand" and not spec.parts]  # Those of a launch's operands.
    late = received | {one.target.buffer for one in some}
    sent = {one.source.buffer for one in instructions if one.step == step and isinstance(one, Send)}
    moved = [one for one in some if one.source.buffer not in late and one.target.buffer not in sent]
    rest = [one for one in instructions[wait:] if not any(one is other for other in moved)]
    return [*instructions[:wait], *(replace(one, step=step - 1, made_by="hoist_copies") for one in moved), *rest]
