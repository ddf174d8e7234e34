"""The work of a rank in each step: the counted instructions of its programs.

The plan is compiled as for a call, without a device, and each instruction has a price:

    a launch       its heads, rows, keys and visible pairs
    a message      bytes to or from its peer, and once more through the sender's memory
    a copy         bytes that are read and written; so do rows that a launch reads by index
    an accumulation reads the partial result, reads and writes the sum; the first one becomes the sum for nothing

The exchanges of other layers are counted alike (`count_exchange`); their kernels are no instructions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from cp_fast.compile.exchange_program import RowMessages, lower_exchange
from cp_fast.compile.index_tables import Tables
from cp_fast.compile.instruction_passes import in_input_dtype, may_have_low_precision, of_one_launch
from cp_fast.compile.lower import Draft
from cp_fast.compile.pipeline import compiled
from cp_fast.compile.program import Accumulate, Copy, Free, Launch, Program, Recv, Send, View
from cp_fast.kernels.attention.fa4.fa4_backend import Fa4Backend
from cp_ref.schedules.areas import UNBOUNDED, pairs
from cp_ref.schedules.problem import Problem, slice_rows
from cp_ref.schedules.schedule import side_of
from cp_ref.schedules.table import Column
from cp_ref.schedules.verify.costs import ITEM_BYTES

__all__ = [
    "LIBRARY",
    "ExchangedTensor",
    "LaunchCounts",
    "PassBytes",
    "RankCounts",
    "StepCounts",
    "count_alone",
    "count_exchange",
    "count_rank",
    "is_gathered",
    "most_bytes",
]

LIBRARY = Fa4Backend()  # The kernel library whose work is counted.


# ---- sizes of buffers
#
# Rows and bytes of a pass: of its buffers, and of the views that its instructions have of them.


def is_gathered(view: View[Any]) -> bool:
    """Whether rows are read by an index table."""
    return not (view.rows is None or isinstance(view.rows, slice))


class _Sizes(ABC):
    """The sizes of one program. `wide`: in the dtype of sums, not in that of the inputs."""

    program: Program[Any]
    tables: Tables

    @abstractmethod
    def row(self, kind: str, *, wide: bool = False) -> int:
        """Bytes of one row and head of all tensors of a kind."""

    @abstractmethod
    def own_rows(self, kind: str) -> int:
        """The rows of the rank's own tensors of a kind."""

    @abstractmethod
    def messages(self, kind: str) -> int:
        """The tensors of a kind, each of which is a message."""

    def rows(self, view: View[Any]) -> int:
        """The rows of a view."""
        if view.rows is not None:
            return self.tables.count(view.rows)
        spec = self.program.buffers[view.buffer]
        return self.own_rows(spec.kind) if spec.rows is None else spec.rows

    def bytes(self, view: View[Any], *, wide: bool = False) -> int:
        """The bytes of a view, in all parts of its buffer."""
        spec = self.program.buffers[view.buffer]
        heads = max(spec.parts, 1) * (view.heads[1] - view.heads[0])
        return self.rows(view) * heads * self.row(spec.kind, wide=wide)

    def whole(self, number: int) -> View[Any]:
        """All of a buffer."""
        return View(number, None, self.program.buffers[number].all_heads)

    def has_all_rows(self, view: View[Any]) -> bool:
        """Whether a view has all rows of its buffer."""
        return self.rows(view) == self.rows(self.whole(view.buffer))


@dataclass(frozen=True)
class PassBytes(_Sizes):
    """The sizes of one pass of a problem's programs; a row of results has its lse."""

    problem: Problem
    program: Program[Any]
    tables: Tables

    @property
    def item(self) -> int:
        """Bytes of a number of the inputs' dtype."""
        return ITEM_BYTES[self.problem.dtype]

    @property
    def wide_item(self) -> int:
        """Bytes of a number of the sums' dtype."""
        return max(self.item, 4)

    def row(self, kind: str, *, wide: bool = False) -> int:
        d_qk, d_v, item = self.problem.d_qk, self.problem.d_v, self.wide_item if wide else self.item
        dims = {"q": d_qk, "kv": d_qk + d_v, "do": d_v, "res": d_v, "out": d_v, "dq": d_qk, "dkv": d_qk + d_v}[kind]
        return dims * item + (self.wide_item if kind in ("res", "out") else 0)

    def own_rows(self, kind: str) -> int:
        batch = 1 if self.problem.qkv_format == "thd" else len(self.problem.sequences)
        return batch * slice_rows(self.problem, side_of(kind))

    def messages(self, kind: str) -> int:
        return 1 if kind in ("q", "do", "dq") else 2


class ExchangedTensor(NamedTuple):
    """A tensor of a layer's exchange: the numbers of one row and head, and the bytes of a number."""

    numbers: int
    item: int


@dataclass(frozen=True)
class _ExchangeBytes(_Sizes):
    """The sizes of one program of an exchange. tensors: of each kind."""

    tensors: Mapping[str, Sequence[ExchangedTensor]]
    own: Mapping[str, int]
    program: Program[Any]
    tables: Tables

    def row(self, kind: str, *, wide: bool = False) -> int:
        return sum(x.numbers * (max(x.item, 4) if wide else x.item) for x in self.tensors[kind])

    def own_rows(self, kind: str) -> int:
        return self.own[kind]

    def messages(self, kind: str) -> int:
        return len(self.tensors[kind])


# ---- counts


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
    """Both passes of one rank, or both directions of an exchange, and the programs that were counted."""

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
    rows, keys = areas.queries.merged().total, areas.keys.merged().total
    return LaunchCounts(problem.heads_q, problem.heads_kv, rows, keys, problem.pairs)


def count_rank(problem: Problem, rank: int, head_chunks: tuple[int, ...] | None = None) -> RankCounts:
    """Both passes of one rank, as the compiler plans them. `head_chunks`: see `compiled`.

    >>> from cp_ref.schedules.problem import Sequence
    >>> ring = Problem(2, (Sequence(8, 8, 8, 8),), heads_q=2, d_qk=4, d_v=4, dtype="bfloat16")
    >>> for step in count_rank(ring, 0).forward:
    ...     print(step.launches, step.received)
    (LaunchCounts(heads=2, heads_kv=1, rows=4, keys=4, pairs=10),) {1: 64}
    (LaunchCounts(heads=2, heads_kv=1, rows=2, keys=4, pairs=8),) {}
    """
    draft = compiled(problem, rank, LIBRARY, head_chunks)
    if may_have_low_precision(problem):
        draft = replace(draft, programs=replace(draft.programs, backward=_low_precision(draft.programs.backward)))
    passes = draft.programs.forward, draft.programs.backward
    forward, backward = (_counted(PassBytes(problem, program, draft.tables)) for program in passes)
    return RankCounts(forward, backward, draft)


def count_exchange(name: str, messages: RowMessages, tensors: Mapping[str, Sequence[ExchangedTensor]]) -> RankCounts:
    """One rank's part of an exchange of a layer: forward gathers rows, backward gives results back.

    Args:
        tensors: those of each kind of rows and of results.

    >>> from cp_fast.compile.exchange_program import ExchangedRows
    >>> from cp_ref.schedules.schedule import Message, Pieces, Step
    >>> from cp_ref.schedules.table import Spans
    >>> own, both = (Spans(np.array([0]), np.array([n])) for n in (2, 3))
    >>> last = Pieces.of(Spans(np.array([2]), np.array([3])), (0, 1))
    >>> there = Step((), (Message("kv", 1, 0, last),))  # rank 1 sends row 2
    >>> back = Step((Message("dkv", 1, 0, last),), ())
    >>> rows = ExchangedRows(own, both)
    >>> messages = RowMessages({"kv": rows}, (there,), {"dkv": rows}, (back,))
    >>> found = count_exchange("keys", messages, {"kv": [ExchangedTensor(8, 2)], "dkv": [ExchangedTensor(8, 4)]})
    >>> found.forward[0].received, found.backward[0].sent
    ({1: 16}, {1: 32})
    """
    draft = lower_exchange(name, messages)
    own = {kind: rows.own.total for kind, rows in {**messages.rows, **messages.results}.items()}
    programs = draft.programs.forward, draft.programs.backward
    forward, backward = (_counted(_ExchangeBytes(tensors, own, program, draft.tables)) for program in programs)
    return RankCounts(forward, backward, draft)


def _low_precision(program: Program[Any]) -> Program[Any]:
    """The backward pass with gradients from single launches in the inputs' dtype. If a rank sends such gradients in a
    step, those that arrive in this step count as such too, since all ranks do the same.
    """
    sent = of_one_launch(program)
    steps = {one.step for one in program.of(Send) if one.source.buffer in sent}
    received = {
        one.buffer for one in program.of(Recv) if one.step in steps and program.buffers[one.buffer].role == "partial"
    }
    return in_input_dtype(program, sent | received)


def _counted(sizes: _Sizes) -> tuple[StepCounts, ...]:
    """The steps of one pass."""
    steps = [_StepCounter(sizes) for _ in range(sizes.program.steps)]
    begun = set[int]()  # Sums with a partial result.
    for one in sizes.program.instructions:
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
class _StepCounter:
    sizes: _Sizes
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
        spec = self.sizes.program.buffers[buffer]
        self.tensors += self.sizes.messages(spec.kind)
        return rows * (spec.heads[1] - spec.heads[0]) * self.sizes.row(spec.kind, wide=spec.dtype == "wide")

    def launch(self, one: Launch[Any]) -> None:
        sizes, (q, kv) = self.sizes, one.operands[:2]
        of_q, of_kv = (np.diff(sizes.tables.cumulative(key)) for key in (one.batch.cu_q, one.batch.cu_kv))
        visible = _visible(of_q, of_kv, one.batch.left, one.batch.right)
        heads, heads_kv = (view.heads[1] - view.heads[0] for view in (q, kv))
        self.launches.append(LaunchCounts(heads, heads_kv, sizes.rows(q), sizes.rows(kv), visible))
        self.moved += sum(2 * sizes.bytes(view) for view in one.operands if is_gathered(view))


def _copied(sizes: _Sizes, one: Copy[Any], begun: set[int]) -> int:
    source, target = (sizes.program.buffers[view.buffer] for view in (one.source, one.target))
    if target.role in ("message", "result") and one.source.rows is None and not source.parts:
        wide = source.role == "sum" and one.source.buffer in begun and source.dtype != target.dtype
        return sizes.bytes(one.target) + sizes.bytes(one.source, wide=True) if wide else 0
    return 2 * sizes.bytes(one.target if target.parts and not source.parts else one.source)


def _accumulated(sizes: _Sizes, one: Accumulate[Any], begun: set[int]) -> int:
    if one.target.buffer in begun:
        return sizes.bytes(one.source) + 2 * sizes.bytes(one.target, wide=True)
    return 0 if sizes.has_all_rows(one.target) else 2 * sizes.bytes(one.target)


def _visible(q: Column, k: Column, left: int | None, right: int | None) -> int:
    """The visible pairs of segments of these lengths. A window is aligned to the last row and the last key."""
    q, k = q.astype(np.int64), k.astype(np.int64)
    lo = np.full_like(q, -UNBOUNDED) if left is None else k - q - left
    hi = np.full_like(q, UNBOUNDED) if right is None else k - q + right
    return int(pairs(np.zeros_like(q), q, np.zeros_like(k), k, lo, hi).sum())


# ---- peak memory
#
# The peak bytes of a rank above its inputs: its programs' buffers, each from the instruction that fills it to the one
# that frees it.
#
# A launch's own memory counts too: the accumulators of a backward kernel, dq in float32, and with grouped heads dk and
# dv. Not counted: the staging buffers of peer memory, tables, and the allocator's rounding.


_WORKSPACE = 4  # Bytes of a number.


def most_bytes(problem: Problem, counts: RankCounts) -> int:
    """Over both passes; q, k, v and dout are inputs.

    >>> from cp_fast.tools.cost.counts import count_rank
    >>> from cp_ref.schedules.problem import Sequence
    >>> alone = Problem(1, (Sequence(8, 8, 8, 8),), heads_q=2, heads_kv=2, d_qk=4, d_v=4, dtype="bfloat16")
    >>> most_bytes(alone, count_rank(alone, 0))  # out and lse, dq, dk, dv, and dq in float32
    832
    """
    programs, tables = counts.draft.programs, counts.draft.tables
    forward = _Memory(PassBytes(problem, programs.forward, tables))
    forward.run()
    out = forward.size_of(programs.forward.results["out"])
    backward = _Memory(PassBytes(problem, programs.backward, tables))
    for number, other in programs.kept_buffers:
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
    def program(self) -> Program[Any]:
        """The pass."""
        return self.sizes.program

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
        spec = self.program.buffers[number]
        wide = wide or (spec.role != "sum" and spec.dtype == "wide")
        return self.sizes.bytes(self.sizes.whole(number), wide=wide)

    def run(self) -> None:
        """All instructions."""
        instructions = self.program.instructions
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
        spec = self.program.buffers[target]
        if target in self.memory:
            return
        same = source in self.memory and (source in self.wide) == (spec.dtype == "wide")
        if spec.role in ("message", "result") and one.source.rows is None and same and one.target.rows is None:
            self._share(target, source)
        else:
            self.hold(target, self._full(target))

    def _accumulate(self, one: Accumulate[Any]) -> None:
        source, target = one.source.buffer, one.target.buffer
        part_is_wide = self.program.buffers[source].dtype == "wide"
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
        sums = self.program.accumulations[one.target.buffer]
        rounded = id(one) in sums.rounded and self.program.buffers[one.target.buffer].dtype == "input"
        return not part_is_wide if id(one) in sums.written else rounded

    def _covers(self, view: View[Any]) -> bool:
        whole_heads = view.heads == self.program.buffers[view.buffer].all_heads
        return not is_gathered(view) and whole_heads and self.sizes.has_all_rows(view)

    def _gathered(self, view: View[Any]) -> int:
        """The bytes of an operand that a launch copies: rows read by index; of a slice only the lse."""
        if view.rows is None or self._covers(view):
            return 0
        kind, count = self.program.buffers[view.buffer].kind, self.sizes.rows(view) * (view.heads[1] - view.heads[0])
        return count * (self.sizes.row(kind) if is_gathered(view) else self.sizes.wide_item * (kind == "res"))

    def _launch(self, one: Launch[Any], free: tuple[int, ...]) -> None:
        gathered = sum(map(self._gathered, one.operands))
        self._add(gathered)
        if self.program.direction == "backward":
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
