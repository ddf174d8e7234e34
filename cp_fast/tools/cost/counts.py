"""The work of a rank in each step: the counted instructions of its executable plan.

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

from cp_fast.compile.executable_plan import PassPlan
from cp_fast.compile.index_tables import Tables
from cp_fast.compile.instructions import Accumulate, BufferSpec, Copy, Launch, Recv, Send, View
from cp_fast.compile.lowering.lower_schedule import Draft
from cp_fast.compile.passes.low_precision_grads import in_input_dtype, may_have_low_precision, of_one_launch
from cp_fast.compile.pipeline import compiled
from cp_ref.spec import UNBOUNDED, Column, Problem, slice_rows
from cp_ref.spec.planners.ring_members import merged
from cp_ref.spec.tables.attention_slices import pairs

__all__ = ["LaunchCounts", "RankCounts", "Sizes", "StepCounts", "count_alone", "count_plan", "count_rank"]

_ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
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


@dataclass(frozen=True)
class Sizes:
    """Bytes of rows, of one problem."""

    problem: Problem
    item: int
    wide: int

    @staticmethod
    def of(problem: Problem) -> Sizes:
        """The sizes for a problem's dtype, and for the dtype of its sums."""
        item = _ITEM[problem.dtype]
        return Sizes(problem, item, max(item, 4))

    def row(self, kind: str, *, wide: bool = False) -> int:
        """Bytes of one row and head of all tensors of a kind, with its lse."""
        d_qk, d_v, item = self.problem.d_qk, self.problem.d_v, self.wide if wide else self.item
        dims = {"q": d_qk, "kv": d_qk + d_v, "do": d_v, "res": d_v, "out": d_v, "dq": d_qk, "dkv": d_qk + d_v}[kind]
        return dims * item + (self.wide if kind in ("res", "out") else 0)


def count_alone(problem: Problem) -> LaunchCounts:
    """The whole problem as one launch on one GPU.

    >>> from cp_ref.spec import Sequence
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

    >>> from cp_ref.spec import Sequence
    >>> ring = Problem(2, (Sequence(8, 8, 8, 8),), heads_q=2, d_qk=4, d_v=4, dtype="bfloat16")
    >>> for step in count_rank(ring, 0).forward:
    ...     print(step.launches, step.received)
    (LaunchCounts(heads=2, heads_kv=1, rows=4, keys=4, pairs=10),) {1: 64}
    (LaunchCounts(heads=2, heads_kv=1, rows=2, keys=4, pairs=8),) {}
    """
    draft, sizes = compiled(problem, rank, head_chunks), Sizes.of(problem)
    if may_have_low_precision(problem):
        draft = replace(draft, plan=replace(draft.plan, backward=_low_precision(draft.plan.backward)))
    passes = draft.plan.forward, draft.plan.backward
    forward, backward = (count_plan(one, draft.tables, sizes) for one in passes)
    return RankCounts(forward, backward, draft)


def _low_precision(plan: PassPlan[Any]) -> PassPlan[Any]:
    """The backward pass with gradients from single launches in the inputs' dtype. If a rank sends such gradients in a
    step, those that arrive in this step count as such too, since all ranks do the same.
    """
    sent = of_one_launch(plan)
    steps = {one.step for one in plan.of(Send) if one.source.buffer in sent}
    received = {one.buffer for one in plan.of(Recv) if one.step in steps and plan.buffers[one.buffer].role == "partial"}
    return in_input_dtype(plan, sent | received)


def count_plan(plan: PassPlan[Any], tables: Tables, sizes: Sizes) -> tuple[StepCounts, ...]:
    """The steps of one pass."""
    counting = _Counting(plan, tables, sizes, [_Step() for _ in range(plan.steps)])
    for one in plan.instructions:
        counting.count(one)
    return tuple(step.counts() for step in counting.steps)


@dataclass
class _Step:
    launches: list[LaunchCounts] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    received: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    tensors: int = 0
    moved: int = 0

    def counts(self) -> StepCounts:
        return StepCounts(tuple(self.launches), dict(self.sent), dict(self.received), self.tensors, self.moved)


@dataclass
class _Counting:
    plan: PassPlan[Any]
    tables: Tables
    sizes: Sizes
    steps: list[_Step]
    begun: set[int] = field(default_factory=set)  # Sums with a partial result.

    def count(self, one: Any) -> None:
        """One instruction."""
        if isinstance(one, Send | Recv):
            self._message(one)
        elif isinstance(one, Copy):
            self.steps[one.step].moved += self._copied(one)
        elif isinstance(one, Launch):
            self._launch(one)
        elif isinstance(one, Accumulate):
            self.steps[one.step].moved += self._accumulated(one)

    def _spec(self, number: int) -> BufferSpec:
        return self.plan.buffers[number]

    def _rows(self, view: View[Any]) -> int:
        spec = self._spec(view.buffer)
        return rows_of(self.sizes.problem, spec) if view.rows is None else self.tables.count(view.rows)

    def _bytes(self, view: View[Any], *, wide: bool = False) -> int:
        spec = self._spec(view.buffer)
        parts = max(spec.parts, 1)
        return parts * self._rows(view) * (view.heads[1] - view.heads[0]) * self.sizes.row(spec.kind, wide=wide)

    def _message(self, one: Send[Any] | Recv) -> None:
        step = self.steps[one.step]
        if isinstance(one, Send):
            number, rows = one.source.buffer, self._rows(one.source)
        else:
            number, rows = one.buffer, one.size
        spec = self._spec(number)
        size = rows * (spec.heads[1] - spec.heads[0]) * self.sizes.row(spec.kind, wide=spec.dtype == "wide")
        way = step.sent if isinstance(one, Send) else step.received
        way[one.peer] += size
        step.tensors += _TENSORS[spec.kind]
        if isinstance(one, Send):
            step.moved += 2 * size

    def _copied(self, one: Copy[Any]) -> int:
        source, target = self._spec(one.source.buffer), self._spec(one.target.buffer)
        if target.role in ("message", "result") and one.source.rows is None and not source.parts:
            wide = source.role == "sum" and one.source.buffer in self.begun and source.dtype != target.dtype
            return self._bytes(one.target) + self._bytes(one.source, wide=True) if wide else 0
        if source.parts:
            return 2 * self._bytes(one.source)
        if target.parts:
            return 2 * self._bytes(one.target)
        return 2 * self._bytes(one.source)

    def _launch(self, one: Launch[Any]) -> None:
        step, (q, kv) = self.steps[one.step], one.operands[:2]
        of_q, of_kv = (np.diff(self.tables.cumulative(key)) for key in (one.batch.cu_q, one.batch.cu_kv))
        visible = _visible(of_q, of_kv, one.batch.left, one.batch.right)
        heads, heads_kv = (view.heads[1] - view.heads[0] for view in (q, kv))
        step.launches.append(LaunchCounts(heads, heads_kv, self._rows(q), self._rows(kv), visible))
        step.moved += sum(2 * self._bytes(view) for view in one.operands if is_gathered(view))

    def _accumulated(self, one: Accumulate[Any]) -> int:
        if self._spec(one.source.buffer).kind == "sink":
            return 0
        total = one.target.buffer
        if total not in self.begun:
            self.begun.add(total)
            whole = one.target.rows is None or self._rows(one.target) == rows_of(self.sizes.problem, self._spec(total))
            return 0 if whole else 2 * self._bytes(one.target)
        return self._bytes(one.source) + 2 * self._bytes(one.target, wide=True)


def is_gathered(view: View[Any]) -> bool:
    """Whether rows are read by an index table."""
    return not (view.rows is None or isinstance(view.rows, slice))


def rows_of(problem: Problem, spec: BufferSpec) -> int:
    """The rows of a buffer."""
    if spec.rows is not None:
        return spec.rows
    batch = 1 if problem.qkv_format == "thd" else len(problem.sequences)
    return batch * slice_rows(problem, "kv" if spec.kind in ("kv", "dkv") else "q")


def _visible(q: Column, k: Column, left: int | None, right: int | None) -> int:
    """The visible pairs of segments of these lengths. A window is aligned to the last row and the last key."""
    q, k = q.astype(np.int64), k.astype(np.int64)
    lo = np.full_like(q, -UNBOUNDED) if left is None else k - q - left
    hi = np.full_like(q, UNBOUNDED) if right is None else k - q + right
    return int(pairs(np.zeros_like(q), q, np.zeros_like(k), k, lo, hi).sum())
