"""The peak bytes of a rank above its inputs: its plan's buffers, each from the instruction that fills it to the one
that frees it.

A launch's own memory counts too: the accumulators of a backward kernel, dq in float32, and with grouped heads dk and
dv. Not counted: the staging buffers of peer memory, tables, and the allocator's rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cp_fast.compile.program import Accumulate, Copy, Free, Launch, Program, Recv, View
from cp_fast.tools.cost.counts import RankCounts
from cp_fast.tools.cost.pass_bytes import PassBytes, is_gathered
from cp_ref.schedules.problem import Problem

__all__ = ["most_bytes"]

_WORKSPACE = 4  # Bytes of a number.


def most_bytes(problem: Problem, counts: RankCounts) -> int:
    """Over both passes; q, k, v and dout are inputs.

    >>> from cp_fast.tools.cost.counts import count_rank
    >>> from cp_ref.schedules.problem import Sequence
    >>> alone = Problem(1, (Sequence(8, 8, 8, 8),), heads_q=2, heads_kv=2, d_qk=4, d_v=4, dtype="bfloat16")
    >>> most_bytes(alone, count_rank(alone, 0))  # out and lse, dq, dk, dv, and dq in float32
    832
    """
    plan, tables = counts.draft.plan, counts.draft.tables
    forward = _Memory(PassBytes(problem, plan.forward, tables))
    forward.run()
    out = forward.size_of(plan.forward.results["out"])
    backward = _Memory(PassBytes(problem, plan.backward, tables))
    for number, other in plan.kept:
        backward.hold(other, forward.size_of(number), shared=True)  # Autograd keeps it until the end of the pass.
    backward.run()
    return max(forward.peak, out + backward.peak)


@dataclass
class _Memory:
    """Runs the instructions of a pass with sizes instead of tensors. Buffers that share memory share a number in
    `memory`.
    """

    sizes: PassBytes
    memory: dict[int, int] = field(default_factory=dict)  # By buffer: the number of its memory.
    bytes: dict[int, int] = field(default_factory=dict)  # By memory.
    users: dict[int, int] = field(default_factory=dict)  # By memory: the number of its buffers.
    wide: set[int] = field(default_factory=set)  # Sums in the wide dtype.
    now: int = 0
    peak: int = 0

    @property
    def plan(self) -> Program[Any]:
        """The pass."""
        return self.sizes.plan

    def size_of(self, number: int) -> int:
        """The current bytes of a buffer."""
        return self.bytes[self.memory[number]] if number in self.memory else 0

    def hold(self, number: int, size: int, *, shared: bool = False) -> None:
        """Give a buffer new memory and free its old one. `shared`: another owner keeps the new memory too."""
        self._release(number)
        new = len(self.bytes)
        self.memory[number], self.bytes[new], self.users[new] = new, size, 1 + shared
        self._add(size)

    def _share(self, number: int, other: int) -> None:
        """Give a buffer the memory of another one."""
        self.memory[number] = self.memory[other]
        self.users[self.memory[other]] += 1

    def _release(self, number: int) -> None:
        if (memory := self.memory.pop(number, None)) is not None:
            self._unshare(memory)

    def _unshare(self, memory: int) -> None:
        """One buffer less has this memory; the last one frees it."""
        self.users[memory] -= 1
        if not self.users[memory]:
            self.now -= self.bytes[memory]

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def _full(self, number: int, *, wide: bool = False) -> int:
        """All bytes of a buffer."""
        spec = self.plan.buffers[number]
        wide = wide or (spec.role != "sum" and spec.dtype == "wide")
        return self.sizes.bytes(self.sizes.whole(number), wide=wide)

    def run(self) -> None:
        """All instructions."""
        instructions = self.plan.instructions
        for n, one in enumerate(instructions):
            following = instructions[n + 1] if n + 1 < len(instructions) else None
            if isinstance(one, Recv) and one.buffer not in self.memory:
                self.hold(one.buffer, self._full(one.buffer))
            elif isinstance(one, Copy):
                self._copy(one)
            elif isinstance(one, Launch):
                self._launch(one, following.buffers if isinstance(following, Free) else ())
            elif isinstance(one, Accumulate) and not one.of_sink:
                self._accumulate(one)
            elif isinstance(one, Free):
                for number in one.buffers:
                    self._release(number)

    def _copy(self, one: Copy[Any]) -> None:
        source, target = one.source.buffer, one.target.buffer
        spec = self.plan.buffers[target]
        if target in self.memory:
            return
        same = source in self.memory and (source in self.wide) == (spec.dtype == "wide")
        if spec.role in ("message", "result") and one.source.rows is None and same and one.target.rows is None:
            self._share(target, source)
        else:
            self.hold(target, self._full(target))

    def _accumulate(self, one: Accumulate[Any]) -> None:
        source, target = one.source.buffer, one.target.buffer
        part_is_wide = self.plan.buffers[source].dtype == "wide"
        if target not in self.memory:
            if self._covers(one.target) and source in self.memory:
                self._share(target, source)
            else:
                self.hold(target, self._full(target, wide=part_is_wide))
            self.wide |= {target} if part_is_wide else set()
        elif target not in self.wide and not self._keeps_dtype(one, part_is_wide=part_is_wide):
            self.wide.add(target)
            old = self.memory.pop(target)
            self.hold(target, self._full(target, wide=True))  # In addition to the old one.
            self._unshare(old)

    def _keeps_dtype(self, one: Accumulate[Any], *, part_is_wide: bool) -> bool:
        """Whether a sum in the inputs' dtype is not widened for this one."""
        sums = self.plan.accumulations[one.target.buffer]
        rounded = id(one) in sums.rounded and self.plan.buffers[one.target.buffer].dtype == "input"
        return not part_is_wide if id(one) in sums.written else rounded

    def _covers(self, view: View[Any]) -> bool:
        whole_heads = view.heads == self.plan.buffers[view.buffer].all_heads
        return not is_gathered(view) and whole_heads and self.sizes.has_all_rows(view)

    def _gathered(self, view: View[Any]) -> int:
        """The bytes of an operand that a launch copies: rows read by index; of a slice only the lse."""
        if view.rows is None or self._covers(view):
            return 0
        kind, count = self.plan.buffers[view.buffer].kind, self.sizes.rows(view) * (view.heads[1] - view.heads[0])
        return count * (self.sizes.row(kind) if is_gathered(view) else self.sizes.wide_item * (kind == "res"))

    def _launch(self, one: Launch[Any], free: tuple[int, ...]) -> None:
        gathered = sum(map(self._gathered, one.operands))
        self._add(gathered)
        if self.plan.direction == "backward":
            self._backward_launch(one, free, gathered)
        else:
            self.hold(one.results[0], self._full(one.results[0]))
            self.now -= gathered

    def _backward_launch(self, one: Launch[Any], free: tuple[int, ...], gathered: int) -> None:
        """The kernels read the operands and accumulate. Then the operands are freed, and each accumulator is rounded
        and freed.
        """
        problem = self.sizes.problem
        (dq, dkv), (q, kv) = one.results, one.operands[:2]
        grouped = q.heads[1] - q.heads[0] > kv.heads[1] - kv.heads[0]
        per_number = _WORKSPACE // self.sizes.item or 1
        adds = {dq: self._full(dq) * per_number, dkv: self._full(dkv) * per_number * grouped}
        self._add(sum(adds.values()) + self._full(dkv) * (not grouped))
        for number in free:
            self._release(number)
        self.now -= gathered
        if grouped:
            share = problem.d_qk / (problem.d_qk + problem.d_v)
            for part in (share, 1 - share):
                self._add(int(self._full(dkv) * part))
                self.now -= int(adds[dkv] * part)
        self._add(self._full(dq))
        self.now -= adds[dq] + self._full(dq) + self._full(dkv)
        self.hold(dkv, self._full(dkv))
        self.hold(dq, self._full(dq))
