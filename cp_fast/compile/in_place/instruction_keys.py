"""Keys of instructions: those of two batches for the same purpose have equal keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from cp_fast.compile.executable_plan import PassPlan
from cp_fast.compile.index_tables import RowKey
from cp_fast.compile.instructions import Accumulate, Copy, Instruction, Launch, Recv, Send

__all__ = ["by_key"]


def by_key(plan: PassPlan[RowKey]) -> dict[tuple[Any, ...], Instruction[RowKey]]:
    """The instructions by their kind and the names of their buffers; several of one kind are numbered."""
    times: Counter[Any] = Counter()
    found: dict[tuple[Any, ...], Instruction[RowKey]] = {}
    for one in plan.instructions:
        key = _key(plan, one)
        if key is not None:
            found[*key, times[key]] = one
            times[key] += 1
    return found


def _key(plan: PassPlan[RowKey], one: Instruction[RowKey]) -> tuple[Any, ...] | None:
    def names(numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple(plan.buffers[number].name for number in numbers)

    if isinstance(one, Copy) and one.source.rows is None and one.target.rows is None:
        return None  # whole buffers: independent of the batch
    if isinstance(one, Accumulate) and one.of_sink:
        return None
    if isinstance(one, Send):
        return one.step, "send", *names((one.source.buffer,)), one.part, one.peer, one.tag
    if isinstance(one, Recv):
        return one.step, "receive", *names((one.buffer,)), one.part, one.peer, one.tag
    if isinstance(one, Copy):
        return one.step, "copy", *names((one.source.buffer, one.target.buffer)), one.source.heads, one.target.heads
    if isinstance(one, Accumulate):  # a pass may move it to another step
        return plan.steps, "addition", *names((one.source.buffer, one.target.buffer)), one.source.heads
    if isinstance(one, Launch):
        of = names(view.buffer for view in one.operands[:2])
        return one.step, "launch", *of, f"window {one.batch.left}, {one.batch.right}"
    return None
