"""A batch's draft in the shape of a plan: the same messages and launches, every table padded to its constant size.

The gathered block of all_gather has one message behind the other, so rows of it move where messages are padded. Nothing
else moves: what pads a table comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from cp_fast.planning.batch import position_spans
from cp_fast.planning.columns import Array, spread
from cp_fast.planning.compile import DraftProgram
from cp_fast.planning.drafts import DraftGive, DraftLaunch, DraftStep, DraftTake
from cp_fast.planning.exchange import DraftSide
from cp_fast.planning.padded import PaddedTables, pad
from cp_fast.planning.shape import LaunchShape, MessageShape, Shape, StepShape
from cp_fast.planning.tables import RowKey, Tables

__all__ = ["fit"]

Message = TypeVar("Message", DraftGive, DraftTake)


def fit(draft: DraftProgram, shape: Shape) -> DraftProgram:
    """The draft in this shape, with `PaddedTables`.

    Raises:
        ValueError: it has a message or a launch that the shape does not have, or more segments in a launch.
    """
    assert isinstance(draft.tables, Tables)
    assert len(draft.backward) == len(shape.steps)
    for one, other in zip(draft.forward, draft.backward, strict=False):  # both passes get one set of tables
        assert (one.give_kv, one.take_kv, one.launches) == (other.give_kv, other.take_kv, other.launches)
    tables = PaddedTables()
    start, count = position_spans(draft.problem, draft.rank)
    positions = tables.add(pad(spread(start, count), shape.room.rows_q, 0))
    real = np.zeros(shape.room.rows_q, dtype=bool)
    real[draft.tables.numbers(draft.real_q_rows)] = True
    mask = tables.add(real)
    fitter = _Fitter(draft.tables, tables, shape)
    steps = [fitter.step(number, step) for number, step in enumerate(draft.backward)]
    sides = None
    if draft.sides is not None:
        rows = (shape.room.rows_q, shape.room.rows_kv)
        q, kv = (fitter.side(side, size) for side, size in zip(draft.sides, rows, strict=True))
        sides = (q, kv)
    return DraftProgram(
        draft.problem,
        draft.rank,
        tables,
        steps[: shape.forward],
        steps,
        mask,
        sides,
        spare_rows=1,
        position_ids=positions,
    )


class _Moved(NamedTuple):
    """Where the messages that make a block begin: in the batch's own block, and in the padded one."""

    here: Array
    there: Array

    def rows(self, rows: Array) -> Array:
        """Rows of the batch's own block in the padded one."""
        if not len(self.here):
            return rows
        number = np.searchsorted(self.here, rows, side="right") - 1
        return rows - self.here[number] + self.there[number]


def _moved(messages: Sequence[tuple[RowKey | None, int]]) -> _Moved:
    """From where each message begins in the batch's own block (None if it has none), and in the padded one."""
    starts = [(rows.start, there) for rows, there in messages if isinstance(rows, slice)]
    return _Moved(*np.array(starts, dtype=np.int64).reshape(-1, 2).T)


_UNMOVED = _Moved(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))


class _Fitter:
    """Fits step after step."""

    def __init__(self, given: Tables, tables: PaddedTables, shape: Shape) -> None:
        self._given, self._tables, self._shape = given, tables, shape
        self._block = self._grads_before = _UNMOVED  # the block in hand; the one of the step before

    def step(self, number: int, step: DraftStep) -> DraftStep:
        """One step, of both passes."""
        shape, size, tables = self._shape.steps[number], self._shape.message, self._tables
        fitted = DraftStep(own=shape.own, grad_size=shape.keys + 1 if shape.sums else 0)
        for wanted, give in _matched(number, shape.give_kv, step.give_kv):
            rows = self._message(number, give and give.rows, _UNMOVED if wanted.own else self._block)
            fitted.give_kv.append(DraftGive(wanted.peer, wanted.tag, tables.read_from(rows, size), wanted.own))
        for wanted, give in _matched(number, shape.give_dkv, step.give_dkv):
            rows = self._message(number, give and give.rows, self._grads_before)
            fitted.give_dkv.append(DraftGive(wanted.peer, wanted.tag, tables.read_from(rows, size), wanted.own))
        for wanted, take in _matched(number, shape.take_dkv, step.take_dkv):
            rows = self._message(number, take and take.rows, _UNMOVED if wanted.own else self._block)
            spare = self._shape.unit_kv if wanted.own or shape.own else shape.keys
            key = tables.added_to(rows, size, spare)
            fitted.take_dkv.append(DraftTake(wanted.peer, wanted.tag, size, key, wanted.own))
        fitted.launches = [
            self._launch(shape, *pair) for pair in _matched_launches(number, shape.launches, step.launches)
        ]
        self._grads_before = self._block
        arriving = _matched(number, shape.take_kv, step.take_kv)
        for _, take in arriving:
            self._check_message(number, take.size if take else 0)
        for place, (wanted, _) in enumerate(arriving):
            rows = slice(place * size, (place + 1) * size)
            fitted.take_kv.append(DraftTake(wanted.peer, wanted.tag, size, rows, wanted.own))
        if arriving:
            self._block = _moved([(take and take.rows, place * size) for place, (_, take) in enumerate(arriving)])
        return fitted

    def side(self, side: DraftSide, rows: int) -> DraftSide:
        """The exchange of heads: every rank of the group has room for all its rows."""
        home, group = self._given.numbers(side.home_rows), self._given.numbers(side.group_rows)
        parts = np.split(group, np.cumsum(side.group_counts)[:-1])
        spare = rows * len(parts)
        read = [pad(part, rows, int(part[0]) if len(part) else 0) for part in parts]
        return DraftSide(
            home_rows=self._tables.read_from(home, rows),
            into_home=self._tables.added_to(home, rows, rows),
            home_count=rows,
            group_rows=self._tables.add(np.concatenate(read).astype(np.int32)),
            into_group=self._tables.add(np.concatenate([pad(p, rows, spare) for p in parts]).astype(np.int32)),
            group_counts=(rows,) * len(parts),
        )

    def _launch(self, step: StepShape, shape: LaunchShape, launch: DraftLaunch | None) -> DraftLaunch:
        tables, given, size_q, size_kv = self._tables, self._given, self._shape.unit_q, step.keys
        moved = _UNMOVED if step.own else self._block
        q, k, grad = (
            self._rows(key, where)
            for key, where in (
                (launch and launch.q_rows, _UNMOVED),
                (launch and launch.kv_rows, moved),
                (launch and launch.grad_rows, moved),
            )
        )
        none = np.zeros(1, dtype=np.int32)
        cu_q, cu_kv = (given.cumulative(launch.cu_q), given.cumulative(launch.cu_kv)) if launch else (none, none)
        if len(cu_q) > shape.segments + 1:
            raise ValueError(
                f"a launch has {len(cu_q) - 1} segments, but the plan has room for {shape.segments} (as many a "
                "sequence as its first batch had); make a plan with a batch that needs them"
            )
        return DraftLaunch(
            q_rows=tables.read_from(q, size_q),
            out_rows=tables.added_to(q, size_q, size_q),
            kv_rows=tables.read_from(k, size_kv),
            grad_rows=tables.added_to(grad, size_kv, size_kv),
            left=shape.left,
            right=shape.right,
            cu_q=tables.lengths(cu_q, shape.segments),
            cu_kv=tables.lengths(cu_kv, shape.segments),
            bounds=(size_q, size_kv),
        )

    def _message(self, number: int, key: RowKey | None, moved: _Moved) -> Array:
        rows = self._rows(key, moved)
        self._check_message(number, len(rows))
        return rows

    def _check_message(self, number: int, size: int) -> None:
        if size > self._shape.message:
            raise ValueError(
                f"step {number} has a message of {size} rows, but the plan has room for {self._shape.message} (what "
                "its window lets through where queries and keys have equal lengths); make a plan with a batch that "
                "needs more"
            )

    def _rows(self, key: RowKey | None, moved: _Moved) -> Array:
        """A table's rows in the padded buffer; none of them for what the batch does not need."""
        return np.zeros(0, dtype=np.int64) if key is None else moved.rows(self._given.numbers(key))


def _matched(
    number: int, wanted: Sequence[MessageShape], given: Sequence[Message]
) -> list[tuple[MessageShape, Message | None]]:
    """Every message of the shape with that of the batch, if it has one."""
    found = {(m.peer, m.tag): m for m in given}
    assert len(found) == len(given)
    pairs = [(m, found.pop((m.peer, m.tag), None)) for m in wanted]
    if found:
        peer, tag = next(iter(found))
        raise ValueError(
            f"step {number} has a message between this rank and rank {peer} (tag {tag}) that the plan does not have; "
            "make a plan with a batch that needs it"
        )
    return pairs


def _matched_launches(
    number: int, wanted: Sequence[LaunchShape], given: Sequence[DraftLaunch]
) -> list[tuple[LaunchShape, DraftLaunch | None]]:
    """Every launch of the shape with one of the batch that has the same window, in order; None for what it lacks."""
    rest = list(reversed(given))
    pairs: list[tuple[LaunchShape, DraftLaunch | None]] = []
    for shape in wanted:
        same = bool(rest) and (rest[-1].left, rest[-1].right) == (shape.left, shape.right)
        pairs.append((shape, rest.pop() if same else None))
    if rest:
        windows = [(w.left, w.right) for w in wanted]
        raise ValueError(
            f"step {number} needs a launch with window {(rest[-1].left, rest[-1].right)} that the plan does not have "
            f"(its windows are {windows}); make a plan with a batch that needs it"
        )
    return pairs
