"""A plan that is updated in place: the next batch's program in the shape of the first one's, every table padded.

What a later batch does not need is left empty; what the first batch did not have cannot be added (`shape.py`).

Where messages are padded, rows of the buffers that they fill move; nothing else does, as what pads a table comes last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from cp_fast.planning.groups import SegmentKeys
from cp_fast.planning.lower import COMPLETE, Draft
from cp_fast.planning.padded import PaddedTables, pad
from cp_fast.planning.shape import Shape
from cp_fast.planning.tables import Key, RowKey
from cp_fast.program import (
    OWN,
    Buffer,
    Contribution,
    Copy,
    Launch,
    LoweredProgram,
    LoweredStep,
    Operand,
    Recv,
    ResultRecv,
    ResultSend,
    Send,
    Sums,
)
from cp_ref.spec import Column, Problem, planned_positions

__all__ = ["fit"]

Item = TypeVar("Item")


def fit(draft: Draft, problem: Problem, shape: Shape) -> tuple[LoweredProgram[Any], PaddedTables]:
    """A batch's program in this shape, with its tables.

    Raises:
        ValueError: it has a message, copy or launch that the shape does not have, or larger ones.
    """
    tables = PaddedTables()
    positions = planned_positions(problem, shape.rank)
    ids = tables.add(pad(positions, shape.room.rows_q, 0))
    real = np.zeros(shape.room.rows_q, dtype=bool)
    real[draft.tables.numbers(draft.program.real_q_rows)] = True
    mask = tables.add(real)
    fitter = _Fitter(draft, shape, tables)
    passes = {
        name: tuple(
            fitter.step(f"{name} step {n}", wanted, given)
            for n, (wanted, given) in enumerate(
                zip(getattr(shape.program, name), getattr(draft.program, name), strict=True)
            )
        )
        for name in ("forward", "backward")
    }
    fitted = replace(
        shape.program,
        **passes,
        buffers=fitter.buffers,
        sums=fitter.sums,
        real_q_rows=mask,
        position_ids=ids,
        spare_rows=1,
    )
    return fitted, tables


@dataclass(frozen=True)
class _Moved:
    """Where each message of a buffer or of sums begins: in the batch's own, and in the padded one (there by peer and
    tag, too); and the latter's size.
    """

    here: Column
    there: Column
    begin: dict[tuple[int, int], int]
    size: int

    def rows(self, rows: Column) -> Column:
        """Rows of the batch's own buffer in the padded one."""
        if len(self.here) == 0:
            return rows
        number = np.searchsorted(self.here, rows, side="right") - 1
        return rows - self.here[number] + self.there[number]


def _messages(steps: Iterable[LoweredStep[RowKey]]) -> dict[str, dict[tuple[int, int], int]]:
    """The messages that fill each buffer, or are sent from each sums, one behind the other: their numbers of rows, by
    peer and tag.
    """
    found: dict[str, dict[tuple[int, int], int]] = {}
    for step in steps:
        for r in step.recvs:
            found.setdefault(r.buffer, {})[r.peer, r.tag] = r.size
        for s in step.result_sends:
            found.setdefault(s.sums, {})[s.peer, s.tag] = s.size
    return found


class _Fitter:
    """Fits a batch's program into a shape, step by step."""

    def __init__(self, draft: Draft, shape: Shape, tables: PaddedTables) -> None:
        self._given, self._shape, self._tables = draft.tables, shape, tables
        self._moved = self._find_messages(draft.program)
        self.buffers = {name: replace(b, size=self._size(name, b)) for name, b in shape.program.buffers.items()}
        self.sums = {name: replace(s, size=self._size(name, s)) for name, s in shape.program.sums.items()}

    def _find_messages(self, given: LoweredProgram[RowKey]) -> dict[str, _Moved]:
        """Where messages lie in what they fill and in what they are sent from."""
        program, sizes = self._shape.program, _messages((*given.forward, *given.backward))
        moved: dict[str, _Moved] = {}
        for name, messages in _messages(self._shape.steps()).items():
            kind = (program.buffers.get(name) or program.sums[name]).kind
            padded = {(peer, tag): self._shape.message_rows(kind, peer) for peer, tag in messages}
            begin, first = _begins(padded), _begins(sizes.get(name, {}))
            here, there = (np.array([of[x] for x in begin if x in first], dtype=np.int64) for of in (first, begin))
            moved[name] = _Moved(here, there, begin, sum(padded.values()))
        return moved | {kept: moved[sums] for sums, kept in program.saved_sums.items()}

    def _size(self, name: str, what: Buffer | Sums) -> int:
        """Rows of a buffer or of sums, without the spare one."""
        if name in self._moved:
            return self._moved[name].size
        own = self._shape.side_rows(what.kind)
        return (
            own
            if name in OWN.values() or (isinstance(what, Sums) and what.home)
            else own * self._shape.problem.a2a_size
        )

    def step(self, where: str, wanted: LoweredStep[RowKey], given: LoweredStep[RowKey]) -> LoweredStep[Any]:
        """One step in the shape of the first batch's."""

        def pairs(name: str, key: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
            return _matched(f"{where} ({name})", getattr(wanted, name), getattr(given, name), key)

        every, number = (*given.packed, *given.copies), len(wanted.packed)  # rows that nothing sends are copied later
        copies = _matched(f"{where} (copies)", (*wanted.packed, *wanted.copies), every, _copy_key)
        return LoweredStep(
            packed=tuple(self._copy(*pair) for pair in copies[:number]),
            sends=tuple(self._send(where, *pair) for pair in pairs("sends", lambda s: (s.buffer, s.peers, s.tags))),
            recvs=tuple(self._recv(where, *pair) for pair in pairs("recvs", lambda r: (r.buffer, r.peer, r.tag))),
            result_sends=tuple(
                self._result_send(where, *pair) for pair in pairs("result_sends", lambda s: (s.sums, s.peer, s.tag))
            ),
            result_recvs=tuple(
                self._result_recv(where, *pair) for pair in pairs("result_recvs", lambda r: (r.peer, r.tag))
            ),
            copies=tuple(self._copy(*pair) for pair in copies[number:]),
            launches=tuple(self._launch(where, *pair) for pair in pairs("launches", _launch_key)),
            last_use=wanted.last_use,
        )

    def _numbers(self, name: str, rows: RowKey | None) -> Column:
        """A table's rows in the padded buffer; none of them for what the batch does not need."""
        if rows is None:
            return np.zeros(0, dtype=np.int64)
        numbers = self._given.numbers(rows)
        return self._moved[name].rows(numbers) if name in self._moved else numbers

    def _read(self, name: str, rows: RowKey | None, size: int) -> Key:
        return self._tables.read_from(self._numbers(name, rows), size)

    def _written(self, name: str, rows: RowKey | None, size: int) -> Key:
        spare = (self.buffers.get(name) or self.sums[name]).size
        return self._tables.added_to(self._numbers(name, rows), size, spare)

    def _copy(self, wanted: Copy[RowKey], given: Copy[RowKey] | None) -> Copy[Any]:
        source, target = wanted.source, wanted.target
        size = self.buffers[source.buffer].size
        return Copy(
            Operand(source.buffer, self._read(source.buffer, given and given.source.rows, size), source.heads),
            Operand(target.buffer, self._written(target.buffer, given and given.target.rows, size), target.heads),
        )

    def _send(self, where: str, wanted: Send[RowKey], given: Send[RowKey] | None) -> Send[Any]:
        rows = len(self._given.numbers(given.rows)) if given else 0
        size = self._room(where, self.buffers[wanted.buffer].kind, wanted.peers[0], rows)
        return replace(wanted, rows=self._read(wanted.buffer, given and given.rows, size))

    def _recv(self, where: str, wanted: Recv, given: Recv | None) -> Recv:
        kind = self.buffers[wanted.buffer].kind
        return replace(wanted, size=self._room(where, kind, wanted.peer, given.size if given else 0))

    def _result_send(self, where: str, wanted: ResultSend, given: ResultSend | None) -> ResultSend:
        size = self._room(where, self.sums[wanted.sums].kind, wanted.peer, given.size if given else 0)
        return replace(wanted, start=self._moved[wanted.sums].begin[wanted.peer, wanted.tag], size=size)

    def _result_recv(self, where: str, wanted: ResultRecv[RowKey], given: ResultRecv[RowKey] | None) -> ResultRecv[Any]:
        size = self._room(where, wanted.kind, wanted.peer, given.size if given else 0)
        into = self._contributions(where, wanted.kind, wanted.into, given.into if given else (), size)
        return replace(wanted, size=size, into=into)

    def _contributions(
        self,
        where: str,
        kind: str,
        wanted: Sequence[Contribution[RowKey]],
        given: Sequence[Contribution[RowKey]],
        size: int,
    ) -> tuple[Contribution[Any], ...]:
        """Where a partial result of `size` rows goes."""
        found: list[Contribution[Any]] = []
        for one, other in _matched(f"{where} (results)", wanted, given, lambda c: (c.sums, c.heads)):
            rows = self._tables.read_from(self._numbers("", other and other.rows), size)
            if one.sums == COMPLETE:
                into = self._tables.added_to(self._numbers("", other and other.into), size, self._shape.side_rows(kind))
            else:
                into = self._written(one.sums, other and other.into, size)
            found.append(replace(one, rows=rows, into=into))
        return tuple(found)

    def _launch(self, where: str, wanted: Launch[RowKey], given: Launch[RowKey] | None) -> Launch[Any]:
        size_q, size_kv = self.buffers[wanted.q.buffer].size, self.buffers[wanted.kv.buffer].size

        def operand(name: str, size: int) -> Operand[Any] | None:
            one, other = getattr(wanted, name), getattr(given, name) if given else None
            return None if one is None else replace(one, rows=self._read(one.buffer, other and other.rows, size))

        keys: Any = given.segments if given else None
        none = np.zeros(1, dtype=np.int32)
        cu_q, cu_kv = (self._given.cumulative(k) for k in (keys.cu_q, keys.cu_kv)) if keys else (none, none)
        most = self._shape.segments(wanted.segments)
        if len(cu_q) > most + 1:
            raise ValueError(
                f"a launch has {len(cu_q) - 1} segments, but the plan has room for {most} (as many a sequence as its "
                "first batch had); make a plan with a batch that needs them"
            )
        lengths = self._tables.lengths(cu_q, most), self._tables.lengths(cu_kv, most)
        segments = SegmentKeys(*lengths, wanted.segments.left, wanted.segments.right, (size_q, size_kv))
        kind = "dq" if wanted.do else "out"
        results, results_kv = (given.results, given.results_kv) if given else ((), ())
        return Launch(
            **{name: operand(name, size_kv if name == "kv" else size_q) for name in ("q", "kv", "do", "res")},  # type: ignore[arg-type]
            segments=segments,
            first_head=wanted.first_head,
            results=self._contributions(where, kind, wanted.results, results, size_q),
            results_kv=self._contributions(where, "dkv", wanted.results_kv, results_kv, size_kv),
        )

    def _room(self, where: str, kind: str, peer: int, rows: int) -> int:
        """The rows that a message has in the plan, which are enough for the batch's."""
        size = self._shape.message_rows(kind, peer)
        if rows > size:
            raise ValueError(
                f"{where} has a message of {rows} rows, but the plan has room for {size} (what its window lets through "
                "where queries and keys have equal lengths); make a plan with a batch that needs more"
            )
        return size


def _begins(sizes: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """Where each begins when they lie one behind the other."""
    return dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))


def _matched(
    where: str, wanted: Sequence[Item], given: Sequence[Item], key: Callable[[Item], Any]
) -> list[tuple[Item, Item | None]]:
    """Every item of the shape with the batch's item of the same key, None where the batch has none; of several with one
    key the first with the first, and so on.
    """

    def numbered(items: Sequence[Item]) -> dict[Any, Item]:
        times: Counter[Any] = Counter()
        found: dict[Any, Item] = {}
        for item in items:
            found[key(item), times[key(item)]] = item
            times[key(item)] += 1
        return found

    here, there = numbered(wanted), numbered(given)
    for more, _ in there.keys() - here.keys():
        raise ValueError(
            f"{where} needs {more}, which the plan does not have (it has {[its for its, _ in here]}); make a plan with "
            "a batch that needs it"
        )
    return [(item, there.get(name)) for name, item in here.items()]


def _copy_key(copy: Copy[Any]) -> tuple[Any, ...]:
    return copy.source.buffer, copy.source.heads, copy.target.buffer, copy.target.heads


def _launch_key(launch: Launch[Any]) -> tuple[Any, ...]:
    return launch.q.buffer, launch.kv.buffer, f"window {(launch.segments.left, launch.segments.right)}"
