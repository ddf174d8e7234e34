"""A plan that is updated in place: the next batch's programs in the shape of the first one's, every table padded.

Entries that a later batch does not need stay empty; entries that the first batch lacked cannot be added (`shape`).
Padded messages move rows of the buffers that they fill. Nothing else moves, since padding comes last in a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from cp_fast.compile.index_tables import Key, PaddedTables, RowKey, Tables, pad
from cp_fast.compile.lower import Draft
from cp_fast.compile.pipeline import linked
from cp_fast.compile.program import (
    Accumulate,
    BufferSpec,
    Copy,
    Instruction,
    Launch,
    Program,
    Programs,
    Recv,
    Send,
    View,
    with_views,
)
from cp_fast.movers.mover_protocol import Rows
from cp_fast.tiles.tile_groups import SegmentKeys
from cp_ref.problems.cuts import planned_positions
from cp_ref.problems.room import Room
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import side_of
from cp_ref.schedules.table import Column, Spans

__all__ = [
    "Fitted",
    "FixedTables",
    "Moved",
    "Shape",
    "by_key",
    "fit",
    "moved_messages",
]

# ---- The shape of a plan
#
# The constant part of a plan updated in place: its messages, copies and launches, and their sizes.
#
# A captured CUDA graph fixes the messages, copies and launches, and their largest sizes. The first batch determines
# which ones there are. The sizes follow from the plan's room, so that ranks agree on them: a launch may have all
# queries and keys of a buffer, a message all rows of a ring member. With a window in self-attention a ring member sees
# fewer rows of another: of each sequence, `left + right` keys next to each piece of its queries.


_PIECES = {"dual_chunk": 2, "contiguous": 1}  # At most, of one sequence on one rank.


@dataclass(frozen=True)
class Shape:
    """The shape of a plan: the first batch's programs and lengths, the rank, and the room."""

    programs: Programs[RowKey]
    tables: Tables
    problem: Problem
    rank: int
    room: Room

    def side_rows(self, kind: str) -> int:
        """The rows of a rank's own buffer of a kind of operands or results."""
        return self.room.rows_kv if side_of(kind) == "kv" else self.room.rows_q

    def message_rows(self, kind: str, peer: int) -> int:
        """The most rows of a message: inside an a2a group those of one rank, else those that a ring member may see of
        another.
        """
        own, size = self.side_rows(kind), self.problem.a2a_size
        if peer // size == self.rank // size:
            return own
        problem, member = self.problem, own * size
        left, right = problem.window_size[0], 0 if problem.causal else problem.window_size[1]
        lengths = problem.lengths
        if left < 0 or right < 0 or lengths.len_q != lengths.len_kv or lengths.slots_q != lengths.slots_kv:
            return member
        if problem.layout_name not in _PIECES:
            return member
        pieces = _PIECES[problem.layout_name]
        return max(1, min(member, self.room.max_sequences * pieces * (left + right)))

    def segments(self, keys: Any) -> int:
        """The most segments of a launch: the first batch's average per sequence, rounded up."""
        found = len(self.tables.cumulative(keys.cu_q)) - 1
        sequences = sum(n > 0 for n in self.problem.lengths.len_q)
        return self.room.max_sequences * -(-found // sequences)


# ---- Instructions of two batches
#
# Keys of instructions: those of two batches for the same purpose have equal keys.


def by_key(program: Program[RowKey]) -> dict[tuple[Any, ...], Instruction[RowKey]]:
    """The instructions by their kind and the names of their buffers; several of one kind are numbered."""
    times: Counter[Any] = Counter()
    found: dict[tuple[Any, ...], Instruction[RowKey]] = {}
    for one in program.instructions:
        key = _key(program, one)
        if key is not None:
            found[*key, times[key]] = one
            times[key] += 1
    return found


def _key(program: Program[RowKey], one: Instruction[RowKey]) -> tuple[Any, ...] | None:
    def names(numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple(program.buffers[number].name for number in numbers)

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
        return program.steps, "addition", *names((one.source.buffer, one.target.buffer)), one.source.heads
    if isinstance(one, Launch):
        of = names(view.buffer for view in one.operands[:2])
        return one.step, "launch", *of, f"window {one.batch.left}, {one.batch.right}"
    return None


# ---- Messages in padded buffers
#
# The places of messages in padded buffers. Messages lie there one after the other, each with its largest size.


MessageKey = tuple[int, int]  # peer, tag


@dataclass(frozen=True)
class Moved:
    """The first row of each message in the batch's own buffer (`here`) and in the padded one (`there`; `begin` by
    message), and the size of the padded one.
    """

    here: Column
    there: Column
    begin: dict[MessageKey, int]
    size: int

    def rows(self, rows: Column) -> Column:
        """Rows of the batch's own buffer in the padded one."""
        if len(self.here) == 0:
            return rows
        number = np.searchsorted(self.here, rows, side="right") - 1
        return rows - self.here[number] + self.there[number]


def moved_messages(wanted: Program[RowKey], given: Program[RowKey], shape: Shape) -> dict[int, Moved]:
    """The positions of messages in the buffers that they fill and in those that they are sent from.

    Args:
        wanted: the program of the first batch.
        given: the program of this batch.
    """
    names = {spec.name: number for number, spec in enumerate(given.buffers)}
    sizes = _messages(given)
    moved: dict[int, Moved] = {}
    for number, messages in _messages(wanted).items():
        spec = wanted.buffers[number]
        padded = {(peer, tag): shape.message_rows(spec.kind, peer) for peer, tag in messages}
        begin, first = _begins(padded), _begins(sizes.get(names.get(spec.name, -1), {}))
        here, there = (np.array([of[x] for x in begin if x in first], dtype=np.int64) for of in (first, begin))
        moved[number] = Moved(here, there, begin, sum(padded.values()))
    sums = [(one.source.buffer, one.target.buffer) for one in wanted.of(Copy)]
    return moved | {total: moved[message] for total, message in sums if wanted.buffers[message].role == "message"}


def _messages(program: Program[RowKey]) -> dict[int, dict[MessageKey, int]]:
    """The consecutive messages that fill each buffer of operands, or are sent from each buffer of results, with their
    numbers of rows.
    """
    found: dict[int, dict[MessageKey, int]] = {}
    for one in program.instructions:
        if isinstance(one, Recv) and program.buffers[one.buffer].role == "operand":
            found.setdefault(one.buffer, {})[one.peer, one.tag] = one.size
        if isinstance(one, Send) and program.buffers[one.source.buffer].role == "message":
            assert isinstance(one.source.rows, slice)
            size = one.source.rows.stop - one.source.rows.start
            found.setdefault(one.source.buffer, {})[one.peer, one.tag] = size
    return found


def _begins(sizes: dict[MessageKey, int]) -> dict[MessageKey, int]:
    """The first row of each if they are consecutive."""
    return dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))


# ---- A batch in that shape


_NO_ROWS = Spans(*np.zeros((2, 0), dtype=np.int64))


def fit(draft: Draft, problem: Problem, shape: Shape) -> tuple[Programs[Any], PaddedTables]:
    """A batch's programs in this shape, with their tables.

    Raises:
        ValueError: it has a message, copy or launch that the shape does not have, or larger ones.
    """
    tables, given, wanted = PaddedTables(), draft.programs, shape.programs
    ids = tables.add(pad(planned_positions(problem, shape.rank), shape.room.rows_q, 0))
    real = np.zeros(shape.room.rows_q, dtype=bool)
    real[draft.tables.numbers(given.real_q_rows)] = True
    mask = tables.add(real)
    forward = _Fitting(wanted.forward, given.forward, draft.tables, shape, tables, mask, {})
    fitted_forward = forward.fitted()
    kept = {there: forward.moved[here] for here, there in wanted.saved if here in forward.moved}
    fitted_backward = _Fitting(wanted.backward, given.backward, draft.tables, shape, tables, mask, kept).fitted()
    passes = {"forward": fitted_forward, "backward": fitted_backward}
    return replace(wanted, **passes, real_q_rows=mask, position_ids=ids, spare_rows=1), tables


class _Fitting:
    """One pass. Buffers and instructions of the shape and of the batch correspond by the names of their buffers."""

    def __init__(
        self,
        wanted: Program[RowKey],
        given: Program[RowKey],
        given_tables: Tables,
        shape: Shape,
        tables: PaddedTables,
        real_q_rows: Key,
        kept: dict[int, Moved],
    ) -> None:
        self._wanted, self._tables, self._shape, self._real = wanted, given_tables, shape, real_q_rows
        self._padded = tables
        self._given, known = by_key(given), by_key(wanted)
        self._keys = {id(one): key for key, one in known.items()}
        for key in self._given:
            if key not in known:
                step, kind, *names = key
                raise ValueError(
                    f"{wanted.direction} step {step} needs the {kind} {names}, which the plan does not have; make a "
                    "plan with a batch that needs it"
                )
        self.moved = kept | moved_messages(wanted, given, shape)
        self._specs = [self._sized(number, spec) for number, spec in enumerate(wanted.buffers)]

    def fitted(self) -> Program[Any]:
        """The pass in the plan's shape."""
        instructions = [self._fit(one) for one in self._wanted.instructions]
        return replace(self._wanted, buffers=tuple(self._specs), instructions=tuple(instructions))

    # ---- sizes

    def _role(self, number: int) -> str:
        return self._wanted.buffers[number].role

    def _sized(self, number: int, spec: BufferSpec) -> BufferSpec:
        if spec.rows is None or spec.parts or spec.role == "partial":
            return spec
        group = self._shape.side_rows(spec.kind) * self._shape.problem.a2a_size
        return replace(spec, rows=self.moved[number].size if number in self.moved else group)

    def _size(self, number: int) -> int:
        """The rows of a buffer, without the spare one."""
        spec = self._specs[number]
        return self._shape.side_rows(spec.kind) if spec.rows is None else spec.rows

    def _resize(self, number: int, rows: int) -> None:
        self._specs[number] = replace(self._specs[number], rows=rows)

    def _room(self, step: int, kind: str, peer: int, rows: int) -> int:
        """The rows of a message in the plan; at least those of the batch."""
        size = self._shape.message_rows(kind, peer)
        if rows > size:
            raise ValueError(
                f"{self._wanted.direction} step {step} has a message of {rows} rows, but the plan has room for {size} "
                "(what its window lets through where queries and keys have equal lengths); make a plan with a batch "
                "that needs more"
            )
        return size

    # ---- tables

    def _numbers(self, view: View[RowKey]) -> Column:
        """A view's rows in the padded buffer."""
        numbers = self._tables.numbers(slice(0, 0) if view.rows is None else view.rows)
        return self.moved[view.buffer].rows(numbers) if view.buffer in self.moved else numbers

    def _read(self, view: View[RowKey], given: View[RowKey], size: int) -> View[Any]:
        return replace(view, rows=self._padded.read_from(self._numbers(replace(given, buffer=view.buffer)), size))

    def _written(self, view: View[RowKey], given: View[RowKey], size: int) -> View[Any]:
        numbers = self._numbers(replace(given, buffer=view.buffer))
        return replace(view, rows=self._padded.added_to(numbers, size, self._size(view.buffer)))

    # ---- instructions

    def _fit(self, one: Instruction[RowKey]) -> Instruction[Any]:
        found: Any = self._given.get(self._keys.get(id(one), ()))
        given: Any = found or with_views(one, lambda view: replace(view, rows=slice(0, 0)))
        if isinstance(one, Send):
            return self._send(one, given)
        if isinstance(one, Recv):
            return self._recv(one, found.size if found else 0)
        if isinstance(one, Copy):
            return self._copy(one, given)
        if isinstance(one, Launch):
            return self._launch(one, given, found.batch if found else None)
        return self._accumulate(one, given) if isinstance(one, Accumulate) else one

    def _send(self, one: Send[RowKey], given: Send[RowKey]) -> Send[Any]:
        number, view = one.source.buffer, one.source
        if one.part is not None:
            return one
        size = self._room(one.step, self._specs[number].kind, one.peer, self._count(given.source))
        if self._role(number) == "message":
            begin = self.moved[number].begin[one.peer, one.tag]
            return replace(one, source=replace(view, rows=slice(begin, begin + size)))
        return replace(one, source=self._read(view, given.source, size))

    def _count(self, view: View[RowKey]) -> int:
        return 0 if view.rows is None else self._tables.count(view.rows)

    def _recv(self, one: Recv, rows: int) -> Recv:
        size = self._room(one.step, self._specs[one.buffer].kind, one.peer, rows)
        if self._role(one.buffer) == "partial":
            self._resize(one.buffer, size)
            return replace(one, size=size)
        begin = self.moved[one.buffer].begin[one.peer, one.tag]
        return replace(one, size=size, rows=(slice(begin, begin + size),) if one.rows else None)

    def _copy(self, one: Copy[RowKey], given: Copy[RowKey]) -> Copy[Any]:
        source, target = one.source, one.target
        if self._specs[target.buffer].parts:
            send = next(send for send in self._wanted.of(Send) if send.source.buffer == target.buffer)
            size = self._room(one.step, self._specs[target.buffer].kind, send.peer, self._count(given.source))
            self._resize(target.buffer, size)
            return replace(one, source=self._read(source, given.source, size))
        size = self._size(source.buffer)
        if self._specs[source.buffer].parts:
            return replace(one, target=self._written(target, given.target, size))
        return one if source.rows is None else self._moved_rows(one, given, size)

    def _moved_rows(self, one: Any, given: Any, size: int) -> Any:
        """A copy or an accumulation with its rows in the padded buffers."""
        source = self._read(one.source, given.source, size)
        return replace(one, source=source, target=self._written(one.target, given.target, size))

    def _launch(self, one: Launch[RowKey], given: Launch[RowKey], keys: SegmentKeys | None) -> Launch[Any]:
        size_q, size_kv = (self._size(view.buffer) for view in one.operands[:2])
        none = np.zeros(1, dtype=np.int32)
        cu_q, cu_kv = (self._tables.cumulative(k) for k in (keys.cu_q, keys.cu_kv)) if keys else (none, none)
        most = self._shape.segments(one.batch)
        if len(cu_q) > most + 1:
            raise ValueError(
                f"a launch has {len(cu_q) - 1} segments, but the plan has room for {most} (as many a sequence as its "
                "first batch had); make a plan with a batch that needs them"
            )
        lengths = self._padded.lengths(cu_q, most), self._padded.lengths(cu_kv, most)
        batch = SegmentKeys(*lengths, one.batch.left, one.batch.right, (size_q, size_kv))
        operands = [
            self._read(view, its, size_kv if n == 1 else size_q)
            for n, (view, its) in enumerate(zip(one.operands, given.operands, strict=True))
        ]
        for number, size in zip(one.results, (size_q, size_kv), strict=False):
            self._resize(number, size)
        q_rows, kv_rows = (given.q_rows, given.kv_rows) if keys else (_NO_ROWS, _NO_ROWS)
        return replace(one, operands=tuple(operands), batch=batch, q_rows=q_rows, kv_rows=kv_rows)

    def _accumulate(self, one: Accumulate[RowKey], given: Accumulate[RowKey]) -> Accumulate[Any]:
        if one.of_sink:
            return one if one.target.rows is None else replace(one, target=replace(one.target, rows=self._real))
        return self._moved_rows(one, given, self._size(one.source.buffer))


# ---- The tables on the device
#
# The device side of a plan updated in place: one buffer of tables, overwritten by one copy.


Fitted = tuple[Programs[Any], PaddedTables, torch.Tensor]


class FixedTables:
    """The tables of a plan on the device, and their shape."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._buffer: torch.Tensor | None = None
        self._taken = False

    def take(self) -> None:
        """Mark the tables as used by the calling plan. Two plans cannot share them: an update of one would change both.

        Raises:
            TypeError: they are another plan's.
        """
        if self._taken:
            raise TypeError(
                "a cp_fast.Plan that is updated in place cannot be copied, as both would have the same tables; make "
                "another one by make_plan"
            )
        self._taken = True

    def fitted(self, draft: Draft, problem: Problem) -> Fitted:
        """A batch's programs in the plan's shape, and their tables in their device layout. For a GPU they are in new
        pinned memory each time, which PyTorch keeps until the copy from it is done.

        Raises:
            ValueError: the batch does not fit.
        """
        programs, tables = fit(draft, problem, self._shape)
        return programs, tables, tables.on_host(pinned=self._device.type == "cuda")

    def overwrite(self, fitted: Fitted) -> Programs[Rows]:
        """Write the result of `fitted` to the device; returns the programs that read it there."""
        programs, tables, host = fitted
        if self._buffer is None:
            self._buffer = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        assert self._buffer.shape == host.shape
        self._buffer.copy_(host, non_blocking=True)
        return linked(programs, tables.on_device(self._buffer))
