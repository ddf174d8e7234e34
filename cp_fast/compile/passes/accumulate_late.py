"""Accumulate partial results late, while messages travel, and those of one sum together.

Lowering accumulates a partial result right after its launch, so nothing hides the work and the next messages wait for
it. This pass moves each accumulation down:

    out, dq   to the next launch with a result for the same sum: the messages of its step are then on their way
    dkv       to the end of the step, when the partial results of other ranks are there too; for a local sum, until two
              partial results are waiting, and all that other ranks send are there

Nothing is moved past an instruction that reads the sum. Of several partial results the first becomes the sum without an
addition, so the pass puts one first whose dtype is that of the sum. A row's partial results are then added in an order
that depends on steps, windows and dtypes alone. So a row has the same bits whatever else is in the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cp_fast.compile.executable_plan import PassPlan
from cp_fast.compile.index_tables import RowKey
from cp_fast.compile.instructions import Accumulate, Copy, Instruction, Launch

__all__ = ["accumulate_late"]


def accumulate_late(plan: PassPlan[RowKey]) -> PassPlan[RowKey]:
    """The same accumulations, later."""
    return replace(plan, instructions=_Moving(plan).instructions())


@dataclass
class _Moving:
    plan: PassPlan[RowKey]
    waiting: list[Accumulate[RowKey]] = field(default_factory=list)
    found: list[Instruction[RowKey]] = field(default_factory=list)
    step: int = 0
    begun: set[int] = field(default_factory=set)  # Sums with a partial result.

    def instructions(self) -> tuple[Instruction[RowKey], ...]:
        plan = self.plan
        parts = [one for one in plan.of(Accumulate) if not one.of_sink]
        self.parts = Counter(one.target.buffer for one in parts)
        self.to_come = Counter(one.target.buffer for one in parts if self._is_wide(one))
        sums_of: dict[int, set[int]] = {}
        for one in parts:
            sums_of.setdefault(one.source.buffer, set()).add(one.target.buffer)
        for one in plan.instructions:
            if one.step != self.step:
                self._end_step()
                self.step = one.step
            if isinstance(one, Accumulate) and not one.of_sink:
                self.waiting.append(one)
                self.to_come[one.target.buffer] -= self._is_wide(one)
                continue
            if isinstance(one, Launch):
                more = set[int]().union(*(sums_of.get(result, set()) for result in one.results))
                self._flush(lambda total, more=more: total in more and plan.buffers[total].kind != "dkv")
            elif isinstance(one, Accumulate):
                self._flush(lambda total, one=one: total == one.target.buffer)
            elif isinstance(one, Copy):
                self._flush(lambda total, one=one: total == one.source.buffer)
            self.found.append(one)
        self._flush(lambda total: True)
        return tuple(self.found)

    def _end_step(self) -> None:
        waiting = Counter(one.target.buffer for one in self.waiting)

        def ready(total: int) -> bool:
            spec = self.plan.buffers[total]
            if spec.kind != "dkv" or spec.rows is not None:
                return spec.kind == "dkv"
            return waiting[total] >= 2 and not self.to_come[total]

        self._flush(ready)

    def _flush(self, wanted: Callable[[int], bool]) -> None:
        """Accumulate the waiting partial results of these sums."""
        by_sum: dict[int, list[Accumulate[RowKey]]] = {}
        for one in self.waiting:
            if wanted(one.target.buffer):
                by_sum.setdefault(one.target.buffer, []).append(one)
        self.waiting = [one for one in self.waiting if one.target.buffer not in by_sum]
        for total, some in by_sum.items():
            two = self.parts[total] == 2
            if two and total not in self.begun:
                some.sort(key=self._first_of_two)
            elif not two and self.plan.buffers[total].kind == "dkv":  # Of the others, messages have whole results.
                some.sort(key=lambda one: not self._is_wide(one))
            self.begun.add(total)
            self.found += [replace(one, step=self.step, made_by="accumulate_late") for one in some]

    def _is_wide(self, one: Accumulate[RowKey]) -> bool:
        """Whether the partial result has the dtype of a sum of three or more."""
        return self.plan.buffers[one.source.buffer].dtype == "wide"

    def _first_of_two(self, one: Accumulate[RowKey]) -> tuple[bool, bool]:
        """The sort key for a sum of two, which has the same bits in either order: first is a partial result with all
        rows, in the dtype that the sum is rounded to.
        """
        spec, rows = self.plan.buffers[one.target.buffer], one.target.rows
        whole = spec.rows is None or rows is None or (isinstance(rows, slice) and rows == slice(0, spec.rows))
        return not whole, self.plan.buffers[one.source.buffer].dtype != spec.dtype
