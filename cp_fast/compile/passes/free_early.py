"""Free every buffer after its last use. Without this pass all buffers live until the end of the pass.

An operand last used by a backward launch is freed before its gradients are allocated (`cp_fast.runtime`). Messages keep
their tensors alive, so a sent buffer is freed when its messages are posted. A buffer that is only received is freed
when its messages have arrived.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from cp_fast.compile.executable_plan import PassPlan
from cp_fast.compile.instructions import Free, Instruction, Recv, Send, Wait, reads, writes

__all__ = ["free_early"]

R = TypeVar("R")


def free_early(plan: PassPlan[R], kept: Collection[int]) -> PassPlan[R]:
    """Add the frees. `kept`: buffers that are needed after the pass."""
    keep = {*kept, *(number for number, spec in enumerate(plan.buffers) if spec.role in ("own", "result"))}
    after: dict[int, list[int]] = {}
    for place, one in reversed(list(enumerate(plan.instructions))):
        for number in (*reads(one), *writes(one)):
            if number not in keep:
                keep.add(number)
                after.setdefault(_end(plan.instructions, place), []).append(number)
    found: list[Instruction[R]] = []
    for place, one in enumerate(plan.instructions):
        found.append(one)
        if place in after:
            found.append(Free(one.step, tuple(sorted(after[place]))))
    return replace(plan, instructions=tuple(found))


def _end(instructions: tuple[Instruction[R], ...], place: int) -> int:
    """The end of the use at this place: messages are posted together, and received at the next wait."""
    if isinstance(instructions[place], Recv):
        while not isinstance(instructions[place], Wait):
            place += 1
    while isinstance(instructions[place], Send | Recv) and isinstance(instructions[place + 1], Send | Recv):
        place += 1
    return place
