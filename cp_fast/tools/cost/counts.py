"""The work of a rank in each step: the counted instructions of its programs.

The plan is compiled as for a call, without a device, and each instruction has a price:

    a launch       its heads, rows, keys and visible pairs
    a message      bytes to or from its peer, and once more through the sender's memory
    a copy         bytes that are read and written; so do rows that a launch reads by index
    an accumulation reads the partial result, reads and writes the sum; the first one becomes the sum for nothing
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from cp_fast.compile.instruction_passes import in_input_dtype, may_have_low_precision, of_one_launch
from cp_fast.compile.lower import Draft
from cp_fast.compile.pipeline import compiled
from cp_fast.compile.program import Accumulate, Copy, Launch, Program, Recv, Send
from cp_fast.tools.cost.pass_bytes import PassBytes, is_gathered
from cp_ref.schedules.attention_slices import UNBOUNDED, pairs
from cp_ref.schedules.planners.ring_members import merged
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.table import Column

__all__ = ["LaunchCounts", "RankCounts", "StepCounts", "count_alone", "count_rank"]

_TENSORS = {"q": 1, "kv": 2, "do": 1, "res": 2, "out": 2, "dq": 1, "dkv": 2}


class LaunchCounts(NamedTuple):
    """One kernel launch: query heads, kv heads, query rows, key rows, and visible pairs of a head."""

    heads: int
    heads_kv: int
    rows: int
    keys: int
    pairs: int


class StepCounts(NamedTuple):
    """One step: launches; bytes by peer, both ways; posted tensors; bytes that the GPU reads and writes to pack, gather
    and add.
    """

    launches: tuple[LaunchCounts, ...]
    sent: dict[int, int]
    received: dict[int, int]
    tensors: int
    moved: int


@dataclass(frozen=True)
class RankCounts:
    """Both passes of one rank, and the plan that was counted."""

    forward: tuple[StepCounts, ...]
    backward: tuple[StepCounts, ...]
    draft: Draft = field(repr=False, compare=False)


def count_alone(problem: Problem) -> LaunchCounts:
    """The whole problem as one launch on one GPU.

    >>> from cp_ref.schedules.problem import Sequence
    >>> count_alone(Problem(1, (Sequence(4, 4, 4, 4), Sequence(2, 2, 2, 2)), heads_q=8))
    LaunchCounts(heads=8, heads_kv=1, rows=6, keys=6, pairs=13)
    """
    areas = problem.workload.areas
    rows, keys = _distinct(areas.q_start, areas.q_stop), _distinct(areas.k_start, areas.k_stop)
    return LaunchCounts(problem.heads_q, problem.heads_kv, rows, keys, problem.pairs)


def _distinct(start: Column, stop: Column) -> int:
    begin, end = merged(start, stop)
    return int((end - begin).sum())


def count_rank(problem: Problem, rank: int, head_chunks: tuple[int, ...] | None = None) -> RankCounts:
    """Both passes of one rank, as the compiler plans them. `head_chunks`: see `compiled`.

    >>> from cp_ref.schedules.problem import Sequence
    >>> ring = Problem(2, (Sequence(8, 8, 8, 8),), heads_q=2, d_qk=4, d_v=4, dtype="bfloat16")
    >>> for step in count_rank(ring, 0).forward:
    ...     print(step.launches, step.received)
    (LaunchCounts(heads=2, heads_kv=1, rows=4, keys=4, pairs=10),) {1: 64}
    (LaunchCounts(heads=2, heads_kv=1, rows=2, keys=4, pairs=8),) {}
    """
    draft = compiled(problem, rank, head_chunks)
    if may_have_low_precision(problem):
        draft = replace(draft, plan=replace(draft.plan, backward=_low_precision(draft.plan.backward)))
    passes = draft.plan.forward, draft.plan.backward
    forward, backward = (_counted(PassBytes(problem, plan, draft.tables)) for plan in passes)
    return RankCounts(forward, backward, draft)


def _low_precision(plan: Program[Any]) -> Program[Any]:
    """The backward pass with gradients from single launches in the inputs' dtype. If a rank sends such gradients in a
    step, those that arrive in this step count as such too, since all ranks do the same.
    """
    sent = of_one_launch(plan)
    steps = {one.step for one in plan.of(Send) if one.source.buffer in sent}
    received = {one.buffer for one in plan.of(Recv) if one.step in steps and plan.buffers[one.buffer].role == "partial"}
    return in_input_dtype(plan, sent | received)


def _counted(sizes: PassBytes) -> tuple[StepCounts, ...]:
    """The steps of one pass."""
    steps = [_Step(sizes) for _ in range(sizes.plan.steps)]
    begun = set[int]()  # Sums with a partial result.
    for one in sizes.plan.instructions:
        if isinstance(one, Send):
            steps[one.step].send(one)
        elif isinstance(one, Recv):
            steps[one.step].receive(one)
        elif isinstance(one, Copy):
            steps[one.step].moved += _copied(sizes, one, begun)
        elif isinstance(one, Launch):
            steps[one.step].launch(one)
        elif isinstance(one, Accumulate) and not one.of_sink:
            steps[one.step].moved += _accumulated(sizes, one, begun)
            begun.add(one.target.buffer)
    return tuple(step.counts() for step in steps)


@dataclass
class _Step:
    sizes: PassBytes
    launches: list[LaunchCounts] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    received: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    tensors: int = 0
    moved: int = 0

    def counts(self) -> StepCounts:
        return StepCounts(tuple(self.launches), dict(self.sent), dict(self.received), self.tensors, self.moved)

    def send(self, one: Send[Any]) -> None:
        size = self._message(one.source.buffer, self.sizes.rows(one.source))
        self.sent[one.peer] += size
        self.moved += 2 * size

    def receive(self, one: Recv) -> None:
        self.received[one.peer] += self._message(one.buffer, one.size)

    def _message(self, buffer: int, rows: int) -> int:
        """Count the tensors of a message; returns its bytes."""
        spec = self.sizes.plan.buffers[buffer]
        self.tensors += _TENSORS[spec.kind]
        return rows * (spec.heads[1] - spec.heads[0]) * self.sizes.row(spec.kind, wide=spec.dtype == "wide")

    def launch(self, one: Launch[Any]) -> None:
        sizes, (q, kv) = self.sizes, one.operands[:2]
        of_q, of_kv = (np.diff(sizes.tables.cumulative(key)) for key in (one.batch.cu_q, one.batch.cu_kv))
        visible = _visible(of_q, of_kv, one.batch.left, one.batch.right)
        heads, heads_kv = (view.heads[1] - view.heads[0] for view in (q, kv))
        self.launches.append(LaunchCounts(heads, heads_kv, sizes.rows(q), sizes.rows(kv), visible))
        self.moved += sum(2 * sizes.bytes(view) for view in one.operands if is_gathered(view))


def _copied(sizes: PassBytes, one: Copy[Any], begun: set[int]) -> int:
    source, target = (sizes.plan.buffers[view.buffer] for view in (one.source, one.target))
    if target.role in ("message", "result") and one.source.rows is None and not source.parts:
        wide = source.role == "sum" and one.source.buffer in begun and source.dtype != target.dtype
        return sizes.bytes(one.target) + sizes.bytes(one.source, wide=True) if wide else 0
    return 2 * sizes.bytes(one.target if target.parts and not source.parts else one.source)


def _accumulated(sizes: PassBytes, one: Accumulate[Any], begun: set[int]) -> int:
    if one.target.buffer in begun:
        return sizes.bytes(one.source) + 2 * sizes.bytes(one.target, wide=True)
    return 0 if sizes.has_all_rows(one.target) else 2 * sizes.bytes(one.target)


def _visible(q: Column, k: Column, left: int | None, right: int | None) -> int:
    """The visible pairs of segments of these lengths. A window is aligned to the last row and the last key."""
    q, k = q.astype(np.int64), k.astype(np.int64)
    lo = np.full_like(q, -UNBOUNDED) if left is None else k - q - left
    hi = np.full_like(q, UNBOUNDED) if right is None else k - q + right
    return int(pairs(np.zeros_like(q), q, np.zeros_like(k), k, lo, hi).sum())
