"""One pass of one rank's lowered program at work: its buffers, its messages, and the totals of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cp_fast.backends import Backend
from cp_fast.kernels.base import Kernels
from cp_fast.merge import Part, Total, TotalShape, add_sink
from cp_fast.overlap import head_start
from cp_fast.program import OWN, Contribution, Copy, Heads, LoweredProgram, LoweredStep, Operand, ResultRecv, Send, Sums
from cp_fast.rows import Rows, columns_of, is_all, put_columns
from cp_ref.common.processes import during
from cp_ref.spec import Group, Parcel, Pending, Problem

__all__ = ["Held", "Inputs", "Run", "wide_dtype"]


class Held(NamedTuple):
    """Operands in a buffer: tensors by row [n, h, d], and by column [h, n] (lse and its gradient)."""

    rows: list[torch.Tensor]
    columns: list[torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors by row, then those by column."""
        return self.rows + self.columns


class Inputs(NamedTuple):
    """The program of a pass, and the libraries and the group that run it."""

    problem: Problem
    program: LoweredProgram[Rows]
    backend: Backend
    comm: Group
    kernels: Kernels


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that results are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Nothing:
    """Nothing was posted."""

    def wait(self) -> None:
        """Return at once."""


class _Pending(NamedTuple):
    """The messages that were posted at the start of a step."""

    where: str
    work: Pending
    operands: dict[str, list[Held]]  # by buffer: its messages' boxes
    partial: list[tuple[ResultRecv[Rows], Held]]
    complete: list[_Complete]


class _Complete(NamedTuple):
    """Complete results for the same own rows, from each peer for as many heads; unpacked by one kernel."""

    kind: str
    into: Rows
    first_heads: list[int]
    rows: list[torch.Tensor]  # [peers, n, heads, d]
    columns: list[torch.Tensor]  # by peer, lse [heads, n]

    @property
    def heads(self) -> int:
        """How many there are, of all peers together."""
        return self.rows[0].shape[0] * self.rows[0].shape[2]


@dataclass
class Run:
    """One pass of one rank: its buffers and totals."""

    given: Inputs
    steps: tuple[LoweredStep[Rows], ...]
    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    sink: torch.Tensor | None
    sizes: tuple[int, int] | None = None
    like: torch.Tensor | None = None
    has_dlse: bool = False
    held: dict[str, Held] = field(default_factory=dict)
    sent: dict[str, Held] = field(default_factory=dict)  # by sums: complete results as they were sent
    _totals: dict[str, Total] = field(default_factory=dict)
    _arrived: list[_Complete] = field(default_factory=list)
    _taken: dict[str, tuple[Operand[Rows], tuple[list[torch.Tensor], list[torch.Tensor]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        like = self.q if self.q is not None else self.like
        assert like is not None
        self.dtype, self.device, self.wide = like.dtype, like.device, wide_dtype(like.dtype)
        if self.q is not None and self.k is not None and self.v is not None:
            self.sizes = self.sizes or (self.q.shape[0], self.k.shape[0])
            self.hold_own("q", [self.q])
            self.hold_own("kv", [self.k, self.v])
        problem = self.given.problem
        self._dims = {
            "q": (problem.d_qk,),
            "kv": (problem.d_qk, problem.d_v),
            "do": (problem.d_v,),
            "res": (problem.d_v,),
            "out": (problem.d_v,),
            "dq": (problem.d_qk,),
            "dkv": (problem.d_qk, problem.d_v),
        }

    def hold_own(self, kind: str, rows: Sequence[torch.Tensor], columns: Sequence[torch.Tensor] = ()) -> None:
        """The rank's own rows. Detached: kernel libraries that take addresses refuse what requires a gradient."""
        self.held[OWN[kind]] = Held([x.detach() for x in rows], [x.detach() for x in columns])

    # ---- a step

    def post(self, where: str, step: LoweredStep[Rows]) -> _Pending:
        """Send and receive; then put together what the launches need."""
        for copy in step.packed:
            self._copy(copy)
        sends = [parcel for send in step.sends for parcel in self._operand_parcels(send)]
        for send in step.result_sends:
            rows = slice(send.start, send.start + send.size)
            handed = self._handed_over(send.sums)
            columns = columns_of(handed.columns, rows, (0, handed.rows[0].shape[1]))
            sends += self._parcels(send.peer, send.tag, [x[rows] for x in handed.rows], columns)
        for name in {send.sums for send in step.result_sends}:
            if name not in self.given.program.saved_sums:
                self.sent.pop(name, None)
        recvs, operands, partial = [], {}, []
        for recv in step.recvs:
            buffer = self.given.program.buffers[recv.buffer]
            if recv.buffer not in self.held:
                self.held[recv.buffer] = self._empty(buffer.kind, buffer.heads, buffer.size)
            offset = sum(len(box.rows[0]) for box in operands.get(recv.buffer, ()))
            rows = slice(offset, offset + recv.size)
            box = Held(
                [x[rows] for x in self.held[recv.buffer].rows],
                [x.new_empty(x.shape[0], recv.size) for x in self.held[recv.buffer].columns],
            )
            operands.setdefault(recv.buffer, []).append(box)
            recvs += self._parcels(recv.peer, recv.tag, box.rows, box.columns)
        for recv in step.result_recvs:
            if not recv.complete:
                dtype = self.dtype if recv.narrow else self.wide
                partial.append((recv, self._empty(recv.kind, recv.heads, recv.size, dtype)))
                recvs += self._parcels(recv.peer, recv.tag, *partial[-1][1])
        complete: list[_Complete] = []
        for group in _for_the_same_rows(step.result_recvs):
            complete.append(room := self._room_for(group))
            for n, recv in enumerate(group):
                recvs += self._parcels(recv.peer, recv.tag, [x[n] for x in room.rows], room.columns[n : n + 1])
        work: Pending = _Nothing()
        if sends or recvs:
            with during(where):
                work = self.given.comm.exchange(sorted(sends, key=_by_tag), sorted(recvs, key=_by_tag))
            if step.launches and not getattr(work, "by_copies", False):
                head_start(self.device)
        for copy in step.copies:
            self._copy(copy)
        return _Pending(where, work, operands, partial, complete)

    def complete_step(self, step: LoweredStep[Rows], pending: _Pending, *, last: bool = False) -> None:
        """Wait for the step's messages and take them in; let go of what is not needed any more. `last`: of the pass,
        so that the totals of the rank's own rows are finished next.
        """
        with during(pending.where):
            pending.work.wait()
        for name, boxes in pending.operands.items():
            for n, column in enumerate(self.held[name].columns):
                arrived = torch.cat([box.columns[n] for box in boxes], 1)
                column[:, : arrived.shape[1]] = arrived
        self._arrived += pending.complete
        for recv, box in pending.partial:
            self.contribute(recv.into, box.rows, box.columns[0] if box.columns else None)
        for name, total in self._totals.items():
            sums = self.given.program.sums[name]
            if sums.kind == "dkv" and (total.held > 1 or not sums.home) and not (last and sums.home):
                total.settle()
        for name in step.last_use:
            self.held.pop(name, None)

    # ---- operands

    def take(self, what: Operand[Rows]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Rows and heads of a buffer, contiguous. A ring asks for the same rows step after step: the last are kept."""
        last = self._taken.get(what.buffer)
        if last is not None and _same(last[0], what):
            return last[1]
        held = self.held[what.buffer]
        rows = [x.contiguous() for x in self._rows_of(held.rows, what.rows, what.heads)]
        taken = rows, columns_of(held.columns, what.rows, what.heads)
        if what.buffer in OWN.values():
            self._taken[what.buffer] = what, taken
        return taken

    def _copy(self, copy: Copy[Rows]) -> None:
        buffer = self.given.program.buffers[copy.target.buffer]
        if copy.target.buffer not in self.held:
            self.held[copy.target.buffer] = self._empty(buffer.kind, buffer.heads, buffer.size)
        target, heads = self.held[copy.target.buffer], slice(*copy.target.heads)
        source = self.held[copy.source.buffer]
        rows = self._rows_of(source.rows, copy.source.rows, copy.source.heads)
        columns = columns_of(source.columns, copy.source.rows, copy.source.heads)
        self.given.kernels.put_rows_([x[:, heads] for x in target.rows], rows, copy.target.rows)
        for into, x in zip(target.columns, columns, strict=True):
            put_columns(into[heads], x, copy.target.rows)

    def _rows_of(self, tensors: Sequence[torch.Tensor], rows: Rows, heads: Heads) -> Sequence[torch.Tensor]:
        """Rows and heads of tensors by row: they themselves where that is all of them, which costs the host nothing."""
        if not tensors:
            return tensors
        size, count, *_ = tensors[0].shape
        if heads != (0, count):
            tensors = [x[:, heads[0] : heads[1]] for x in tensors]
        return tensors if is_all(rows, size) else self.given.kernels.take_rows(tensors, rows)

    def _empty(self, kind: str, heads: Heads, size: int, dtype: torch.dtype | None = None) -> Held:
        """Room for operands or results of one kind."""
        count, device = heads[1] - heads[0], self.device
        columns = 1 if kind in ("res", "out") or (kind == "do" and self.has_dlse) else 0
        size += self.given.program.spare_rows if dtype is None else 0
        return Held(
            [torch.empty(size, count, d, dtype=dtype or self.dtype, device=device) for d in self._dims[kind]],
            [torch.empty(count, size, dtype=self.wide, device=device) for _ in range(columns)],
        )

    def _room_for(self, group: list[ResultRecv[Rows]]) -> _Complete:
        """Room for complete results that go to the same own rows."""
        first, heads = group[0], group[0].heads[1] - group[0].heads[0]
        shape, device = (len(group), first.size, heads), self.device
        rows = [torch.empty(*shape, d, dtype=self.dtype, device=device) for d in self._dims[first.kind]]
        count = len(group) if first.kind == "out" else 0
        columns = [torch.empty(heads, first.size, dtype=self.wide, device=device) for _ in range(count)]
        return _Complete(first.kind, first.into[0].into, [recv.heads[0] for recv in group], rows, columns)

    def _operand_parcels(self, send: Send[Rows]) -> list[Parcel]:
        held, found = self.held[send.buffer], []
        alone = len(send.peers) == 1 and send.heads == held.rows[0].shape[1]
        packed = (
            [[x] for x in self._rows_of(held.rows, send.rows, (0, send.heads))]
            if alone
            else [self.given.kernels.heads_to_front(x, send.rows, send.first_heads, send.heads) for x in held.rows]
        )
        for n, (peer, tag, first) in enumerate(zip(send.peers, send.tags, send.first_heads, strict=True)):
            columns = columns_of(held.columns, send.rows, (first, first + send.heads))
            found += self._parcels(peer, tag, [x[n] for x in packed], columns)
        return found

    def _parcels(
        self, peer: int, tag: int, rows: Sequence[torch.Tensor], columns: Sequence[torch.Tensor]
    ) -> list[Parcel]:
        """One parcel a tensor, with tags of their own: no copy into a common buffer."""
        tensors = [*((n, x) for n, x in enumerate(rows)), *((2 + n, x) for n, x in enumerate(columns))]
        return [Parcel(peer, tag + n, x.contiguous()) for n, x in tensors]

    # ---- results

    def contribute(
        self, into: Sequence[Contribution[Rows]], rows: Sequence[torch.Tensor], lse: torch.Tensor | None = None
    ) -> None:
        """Hand a partial result to the totals that it is a part of."""
        for c in into:
            mine = self._rows_of(rows, c.rows, c.heads)
            of_heads = None if lse is None else columns_of([lse], c.rows, c.heads)[0]
            self._total(c.sums).add(Part(tuple(mine), of_heads, c.into, slice(*c.into_heads)))

    def settle(self, results: Sequence[Contribution[Rows]]) -> None:
        """Merge what the last launch yielded, before the next one is launched."""
        for c in results:
            self._total(c.sums).settle()

    def _total(self, name: str) -> Total:
        if name not in self._totals:
            self._totals[name] = self._new_total(self.given.program.sums[name])
        return self._totals[name]

    def _new_total(self, sums: Sums) -> Total:
        assert self.sizes is not None
        heads = sums.heads[1] - sums.heads[0]
        size = sums.size if not sums.home else self.sizes[1 if sums.kind == "dkv" else 0]
        rounded = sums.home or sums.complete
        final = None if not rounded or (sums.kind == "out" and self.sink is not None) else self.dtype
        behind = tuple((heads, d) for d in self._dims[sums.kind])
        shape = (size, behind, self.wide, final, self.device, sums.kind == "out", self.given.program.spare_rows)
        return Total(TotalShape(*shape), self.given.kernels)

    def _handed_over(self, name: str) -> Held:
        """Sums that are sent: complete ones final, in the input's dtype, all others in the wide one."""
        if name not in self.sent:
            sums = self.given.program.sums[name]
            total = self._total(name).finish()
            del self._totals[name]
            rows, lse = total.rows, total.lse
            if sums.complete and sums.kind == "out" and self.sink is not None:
                assert lse is not None
                add_sink(rows[0], lse, self.sink[slice(*sums.heads)], slice(None))
            assert not sums.narrow or all(x.dtype == self.dtype for x in rows), "the library said that it rounds"
            dtype = self.dtype if sums.complete or sums.narrow else self.wide
            self.sent[name] = Held([x.to(dtype) for x in rows], [] if lse is None else [lse])
        return self.sent[name]

    def home(self, kind: str, size: int) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The results of the rank's own rows, in the input's dtype: for all heads, sinks included."""
        problem, program = self.given.problem, self.given.program
        whole = (0, problem.heads_kv if kind == "dkv" else problem.heads_q)
        mine = [n for n, sums in program.sums.items() if sums.kind == kind and sums.home]
        arrived = [done for done in self._arrived if done.kind == kind]
        if len(mine) == 1 and not arrived and program.sums[mine[0]].heads == whole:
            rows, lse, *_ = self._total(mine[0]).finish()
        else:
            dtype = self.wide if kind == "out" and self.sink is not None else self.dtype
            all_written = not program.spare_rows and whole[1] == sum(
                program.sums[name].heads[1] - program.sums[name].heads[0] for name in mine
            ) + sum(done.heads for done in arrived if _count(done.into) == size)
            new = torch.empty if all_written else torch.zeros
            rows = tuple(new(size, whole[1], d, dtype=dtype, device=self.device) for d in self._dims[kind])
            lse = None
            if kind == "out":
                lse = torch.empty(whole[1], size, dtype=self.wide, device=self.device)
                if not all_written:
                    lse.fill_(float("-inf"))
            for name in mine:
                heads, part = slice(*program.sums[name].heads), self._total(name).finish()
                here = [x[:, heads] for x in rows]
                self.given.kernels.put_rows_(here, [x.to(dtype) for x in part.rows], slice(0, size))
                if lse is not None and part.lse is not None:
                    lse[heads] = part.lse
        if kind == "out" and self.sink is not None:
            assert lse is not None
            add_sink(rows[0], lse, self.sink, program.real_q_rows)
        rows = [x.to(self.dtype) for x in rows]
        if arrived and program.spare_rows:  # what pads a table is written behind the rows
            rows = [torch.cat([x, x.new_empty(program.spare_rows, *x.shape[1:])]) for x in rows]
            lse = None if lse is None else torch.cat([lse, lse.new_empty(lse.shape[0], program.spare_rows)], 1)
        for done in arrived:
            for into, x in zip(rows, done.rows, strict=True):
                self.given.kernels.heads_to_back_(into, x, done.into, done.first_heads, False)
            for first, x in zip(done.first_heads, done.columns, strict=False):
                assert lse is not None
                put_columns(lse[first : first + len(x)], x, done.into)
        if rows[0].shape[0] > size:
            return [x[:size] for x in rows], None if lse is None else lse[:, :size].contiguous()
        return rows, lse


def _for_the_same_rows(recvs: Sequence[ResultRecv[Rows]]) -> list[list[ResultRecv[Rows]]]:
    """Complete results by the own rows that they go to."""
    groups: dict[tuple[object, ...], list[ResultRecv[Rows]]] = {}
    for recv in recvs:
        if recv.complete:
            into = recv.into[0].into
            rows = (into.start, into.stop) if isinstance(into, slice) else id(into)
            groups.setdefault((recv.kind, rows, recv.size, recv.heads[1] - recv.heads[0]), []).append(recv)
    return list(groups.values())


def _count(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _by_tag(parcel: Parcel) -> int:
    return parcel.tag


def _same(one: Operand[Rows], other: Operand[Rows]) -> bool:
    slices = isinstance(one.rows, slice) and isinstance(other.rows, slice) and one.rows == other.rows
    return one.heads == other.heads and (one.rows is other.rows or slices)
