"""A plan that is updated in place: the next batch's plan in the shape of the first one's, every table padded.

Entries that a later batch does not need stay empty; entries that the first batch lacked cannot be added (`shape`).
Padded messages move rows of the buffers that they fill. Nothing else moves, since padding comes last in a table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cp_fast.compile.executable_plan import ExecutablePlan, PassPlan
from cp_fast.compile.in_place.instruction_keys import by_key
from cp_fast.compile.in_place.moved_messages import Moved, moved_messages
from cp_fast.compile.in_place.padded_tables import PaddedTables, pad
from cp_fast.compile.in_place.shape import Shape
from cp_fast.compile.index_tables import Key, RowKey, Tables
from cp_fast.compile.instructions import (
    Accumulate,
    BufferSpec,
    Copy,
    Instruction,
    Launch,
    Recv,
    Send,
    View,
    with_views,
)
from cp_fast.compile.lowering.lower_schedule import Draft
from cp_fast.compile.row_maps import Spans
from cp_fast.compile.tiles.groups import SegmentKeys
from cp_ref.contract.cuts import planned_positions
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.table import Column

__all__ = ["fit"]

_NO_ROWS = Spans(*np.zeros((2, 0), dtype=np.int64))


def fit(draft: Draft, problem: Problem, shape: Shape) -> tuple[ExecutablePlan[Any], PaddedTables]:
    """A batch's plan in this shape, with its tables.

    Raises:
        ValueError: it has a message, copy or launch that the shape does not have, or larger ones.
    """
    tables, given, wanted = PaddedTables(), draft.plan, shape.plan
    ids = tables.add(pad(planned_positions(problem, shape.rank), shape.room.rows_q, 0))
    real = np.zeros(shape.room.rows_q, dtype=bool)
    real[draft.tables.numbers(given.real_q_rows)] = True
    mask = tables.add(real)
    forward = _Fitting(wanted.forward, given.forward, draft.tables, shape, tables, mask, {})
    plan_forward = forward.fitted()
    kept = {there: forward.moved[here] for here, there in wanted.saved if here in forward.moved}
    plan_backward = _Fitting(wanted.backward, given.backward, draft.tables, shape, tables, mask, kept).fitted()
    passes = {"forward": plan_forward, "backward": plan_backward}
    return replace(wanted, **passes, real_q_rows=mask, position_ids=ids, spare_rows=1), tables


class _Fitting:
    """One pass. Buffers and instructions of the shape and of the batch correspond by the names of their buffers."""

    def __init__(
        self,
        wanted: PassPlan[RowKey],
        given: PassPlan[RowKey],
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

    def fitted(self) -> PassPlan[Any]:
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
