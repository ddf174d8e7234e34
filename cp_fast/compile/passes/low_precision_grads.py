"""Send gradients from a single launch in the launch's dtype: half the bytes, and the same bits.

A partial result travels in float32, since it may be a sum. Where it is just what one launch yielded in the inputs'
dtype, widening it adds nothing: its receiver adds it in float32 all the same. Only the sender knows from how many
launches its rows come, so the ranks tell each other once, when a plan is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from cp_fast.compile.executable_plan import ExecutablePlan, PassPlan
from cp_fast.compile.instructions import Accumulate, Copy, Launch, Recv, Send, reads, writes
from cp_ref.contract.group import Group
from cp_ref.schedules.problem import Problem

__all__ = ["in_input_dtype", "low_precision_grads", "may_have_low_precision", "of_one_launch"]

R = TypeVar("R")


def may_have_low_precision(problem: Problem) -> bool:
    """Whether partial gradients of a planner's schedule travel, and in a wider dtype than the inputs'. It is the same
    on all ranks. In a2a gradients arrive complete.
    """
    half = problem.dtype in ("float16", "bfloat16")
    return half and problem.cp_size > 1 and problem.a2a_size < problem.cp_size


def of_one_launch(plan: PassPlan[R]) -> frozenset[int]:
    """The buffers of gradients that are sent, not complete, and hold the result of one launch and nothing else."""
    parts = Counter(one.target.buffer for one in plan.of(Accumulate))
    launched = {result for one in plan.of(Launch) for result in one.results}
    single = {
        one.target.buffer
        for one in plan.of(Accumulate)
        if one.source.buffer in launched and parts[one.target.buffer] == 1
    }
    sent = [
        (one.target.buffer, plan.buffers[one.target.buffer]) for one in plan.of(Copy) if one.source.buffer in single
    ]
    return frozenset(n for n, spec in sent if (spec.role, spec.dtype) == ("message", "wide") and spec.kind != "out")


def low_precision_grads(plan: ExecutablePlan[R], group: Group, *, rounded: bool) -> ExecutablePlan[R]:
    """The plan with such gradients, and those that arrive from the other ranks, in the inputs' dtype. Collective.

    Args:
        rounded: whether this rank's kernel library always yields gradients in the inputs' dtype.
    """
    single = of_one_launch(plan.backward) if rounded else frozenset[int]()
    mine = [(one.peer, one.tag) for one in plan.backward.of(Send) if one.source.buffer in single]
    arriving = {
        (rank, tag) for rank, its in enumerate(group.all_gather_object(mine)) for peer, tag in its if peer == group.rank
    }
    received = {one.buffer for one in plan.backward.of(Recv) if (one.peer, one.tag) in arriving}
    return replace(plan, backward=in_input_dtype(plan.backward, single | received))


def in_input_dtype(plan: PassPlan[R], numbers: Collection[int]) -> PassPlan[R]:
    """The plan with these buffers, which are sent or received, in the inputs' dtype."""
    buffers = [replace(spec, dtype="input") if n in numbers else spec for n, spec in enumerate(plan.buffers)]
    instructions = [
        replace(one, made_by="low_precision_grads")
        if isinstance(one, Send | Recv) and not {*reads(one), *writes(one)}.isdisjoint(numbers)
        else one
        for one in plan.instructions
    ]
    return replace(plan, buffers=tuple(buffers), instructions=tuple(instructions))
