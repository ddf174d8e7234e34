"""Accumulate partial results late, while messages travel, and those of one sum together.

Lowering accumulates a partial result right after its launch, so nothing hides the work and the next messages wait for
it. This pass moves each accumulation down:

    out, dq   to the next launch with a result for the same sum: the messages of its step are then on their way
    dkv       to the end of the step, when the partial results of other ranks are there too; for a local sum, until two
              partial results are waiting

Nothing is moved past an instruction that reads the sum. Of several partial results the first becomes the sum without an
addition, so the pass puts one first whose dtype is that of the sum.
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
        sums_of: dict[int, set[int]] = {}
        for one in parts:
            sums_of.setdefault(one.source.buffer, set()).add(one.target.buffer)
        for one in plan.instructions:
            if one.step != self.step:
                self._end_step()
                self.step = one.step
            if isinstance(one, Accumulate) and not one.of_sink:
                self.waiting.append(one)
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
            return spec.kind == "dkv" and waiting[total] >= (2 if spec.rows is None else 1)

        self._flush(ready)

    def _flush(self, wanted: Callable[[int], bool]) -> None:
        """Accumulate the waiting partial results of these sums."""
        by_sum: dict[int, list[Accumulate[RowKey]]] = {}
        for one in self.waiting:
            if wanted(one.target.buffer):
                by_sum.setdefault(one.target.buffer, []).append(one)
        self.waiting = [one for one in self.waiting if one.target.buffer not in by_sum]
        for total, some in by_sum.items():
            if total not in self.begun and len(some) > 1:
                some.sort(key=lambda one: self._rank(one, two=self.parts[one.target.buffer] == 2))
            self.begun.add(total)
            self.found += [replace(one, step=self.step, made_by="accumulate_late") for one in some]

    def _rank(self, one: Accumulate[RowKey], *, two: bool) -> tuple[bool, bool]:
        """The sort key: the smallest is accumulated first. The sum of `two` partial results has the same bits in either
        order: first is one with all rows, in the dtype that the sum is rounded to. Of more, first is one in the wide
        dtype, for any lengths: so a row's partial results are added in the same order in every batch.
        """
        spec, rows = self.plan.buffers[one.target.buffer], one.target.rows
        dtype = self.plan.buffers[one.source.buffer].dtype
        if not two:
            return False, dtype != "wide"
        whole = spec.rows is None or rows is None or (isinstance(rows, slice) and rows == slice(0, spec.rows))
        return not whole, dtype != spec.dtype
