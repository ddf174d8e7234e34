"""Running a lowered program, whichever schedule it was: messages travel while kernels run.

At the start of a step everything is posted: operands that others need, results that are handed over. Kernels are
launched after that, so they hide the messages. What they yield waits in the input's dtype: a partial output until the
next step's messages are posted (its merge then hides them too), gradients of keys until this step's messages are in.
It is then added in float32 (float64 for float64).

What stands beside the schedule: the sink is merged in when all tiles are, max_logit is the largest over the launches,
and both are summed up over the ranks by `passes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cp_fast.backends import Backend
from cp_fast.kernels.base import Kernels
from cp_fast.merge import Part, Total, TotalShape, add_sink
from cp_fast.overlap import head_start
from cp_fast.program import OWN, Contribution, Copy, Heads, Operand, Program, ResultRecv, Send, Step, Sums
from cp_fast.rows import Rows
from cp_ref.common.processes import during
from cp_ref.spec import Group, Parcel, Problem

__all__ = ["Forward", "Inputs", "run_backward", "run_forward", "wide_dtype"]

COMPLETE = -1  # see `planning.lower`


class Held(NamedTuple):
    """Operands in a buffer: tensors by row [n, h, d], and by column [h, n] (lse and its gradient)."""

    rows: list[torch.Tensor]
    columns: list[torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return self.rows + self.columns


class Forward(NamedTuple):
    """A rank's results, sinks included; packed rows."""

    out: torch.Tensor  # [t, h_q, d_v], in q's dtype, 0 where nothing was seen
    lse: torch.Tensor  # [h_q, t], -inf where nothing was seen
    max_logit: torch.Tensor | None  # [h_q], over this rank's launches; None if the kernel library has none
    kept: list[torch.Tensor]  # what the backward pass needs of buffers that are not the rank's own


class Inputs(NamedTuple):
    """What every pass is given: the program and what runs it."""

    problem: Problem
    program: Program[Rows]
    backend: Backend
    comm: Group
    kernels: Kernels


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What results are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def run_forward(
    given: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> Forward:
    """q [t_q, h_q, d_qk], k [t_kv, h_kv, d_qk], v [t_kv, h_kv, d_v]: this rank's packed slices, contiguous, a tail
    allowed; sink [h_q]: each head's sink logit.
    """
    program, problem = given.program, given.problem
    run = _Run(given, program.forward, q, k, v, sink)
    max_logit = torch.full((q.shape[1],), float("-inf"), dtype=run.wide, device=q.device)
    has_max_logit = True
    for number, step in enumerate(program.forward):
        pending = run.post(f"forward, step {number} of {len(program.forward)}", step)
        for launch in step.launches:
            run.settle(launch.results)
            (q_rows,), _ = run.take(launch.q)
            (k_rows, v_rows), _ = run.take(launch.kv)
            part = given.backend.forward(
                q_rows, k_rows, v_rows, launch.segments, scale=problem.scale, softcap=problem.softcap
            )
            run.contribute(launch.results, [part.out], part.lse)
            if part.max_logit is None:
                has_max_logit = False
            else:
                here = max_logit[launch.first_head : launch.first_head + len(part.max_logit)]
                torch.maximum(here, part.max_logit, out=here)
        run.complete_step(step, pending)
    (out,), lse = run.home("out", q.shape[0])
    assert lse is not None
    kept = [x for number in program.saved if number not in OWN.values() for x in run.held[number].tensors]
    kept += [x for sums in program.saved_sums for x in run.sent[sums].tensors]
    return Forward(out, lse, max_logit if has_max_logit else None, kept)


def run_backward(
    given: Inputs,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    sizes: tuple[int, int],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: Sequence[torch.Tensor],
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in the input's dtype, 0 in padding and tail.

    inputs: q, k, v as in `run_forward`; None where the program does not need them. sizes: rows of q and of k. dout, out
    [t_q, h_q, d_v], dlse, lse [h_q, t_q]: final, all own rows; dlse None for zero on every rank. kept: see `Forward`.
    """
    program, problem = given.program, given.problem
    run = _Run(given, program.backward, *(inputs or (None, None, None)), None, sizes=sizes, like=out)
    run.held[OWN["do"]] = Held([dout], [] if dlse is None else [dlse])
    run.held[OWN["res"]] = Held([out], [lse])
    rest = iter(kept)
    for number in program.saved:
        if number not in OWN.values():
            count = 2 if program.buffers[number].kind == "kv" else 1
            run.held[number] = Held([next(rest) for _ in range(count)], [])
    for number in program.saved_sums.values():
        run.held[number] = Held([next(rest)], [next(rest)])
    run.has_dlse = dlse is not None
    for number, step in enumerate(program.backward):
        pending = run.post(f"backward, step {number} of {len(program.backward)}", step)
        for launch in step.launches:
            assert launch.do is not None
            assert launch.res is not None
            run.settle(launch.results)
            (q_rows,), _ = run.take(launch.q)
            (k_rows, v_rows), _ = run.take(launch.kv)
            (dout_rows,), dlse_rows = run.take(launch.do)
            (out_rows,), (lse_rows,) = run.take(launch.res)
            part = given.backend.backward(
                dout_rows,
                q_rows,
                k_rows,
                v_rows,
                out_rows,
                lse_rows,
                dlse_rows[0] if dlse_rows else None,
                launch.segments,
                scale=problem.scale,
                softcap=problem.softcap,
                deterministic=deterministic,
            )
            run.contribute(launch.results, [part.dq])
            run.contribute(launch.results_kv, [part.dk, part.dv])
        run.complete_step(step, pending)
    (dq,), _ = run.home("dq", sizes[0])
    (dk, dv), _ = run.home("dkv", sizes[1])
    return dq, dk, dv


class _Pending(NamedTuple):
    """What was posted at the start of a step."""

    where: str
    work: _Waitable
    operands: dict[int, list[Held]]  # by buffer: its messages' boxes
    results: list[tuple[ResultRecv[Rows], Held]]


class _Waitable:
    """Nothing was posted."""

    def wait(self) -> None:
        """Return at once."""


@dataclass
class _Run:
    """One pass of one rank: its buffers and totals."""

    given: Inputs
    steps: tuple[Step[Rows], ...]
    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    sink: torch.Tensor | None
    sizes: tuple[int, int] | None = None
    like: torch.Tensor | None = None
    has_dlse: bool = False
    held: dict[int, Held] = field(default_factory=dict)
    sent: dict[int, Held] = field(default_factory=dict)  # by sums: complete results as they were sent
    _totals: dict[int, Total] = field(default_factory=dict)
    _arrived: list[tuple[Contribution[Rows], str, Held]] = field(default_factory=list)  # complete results
    _taken: dict[int, tuple[Operand[Rows], tuple[list[torch.Tensor], list[torch.Tensor]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        like = self.q if self.q is not None else self.like
        assert like is not None
        self.dtype, self.device, self.wide = like.dtype, like.device, wide_dtype(like.dtype)
        if self.q is not None and self.k is not None and self.v is not None:
            self.sizes = self.sizes or (self.q.shape[0], self.k.shape[0])
            self.held[OWN["q"]], self.held[OWN["kv"]] = Held([self.q], []), Held([self.k, self.v], [])
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

    # ---- a step

    def post(self, where: str, step: Step[Rows]) -> _Pending:
        """Send and receive; then put together what the launches need."""
        for copy in step.packed:
            self._copy(copy)
        sends = [parcel for send in step.sends for parcel in self._operand_parcels(send)]
        for send in step.result_sends:
            rows = slice(send.start, send.start + send.size)
            handed = self._handed_over(send.sums)
            sends += self._parcels(send.peer, send.tag, [x[rows] for x in handed.rows], _columns(handed.columns, rows))
        for number in {send.sums for send in step.result_sends}:
            if number not in self.given.program.saved_sums:
                self.sent.pop(number, None)
        recvs, operands, results = [], {}, []
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
            dtype = self.dtype if recv.complete else self.wide
            box = self._empty(recv.kind, recv.heads, recv.size, dtype)
            results.append((recv, box))
            recvs += self._parcels(recv.peer, recv.tag, box.rows, box.columns)
        work: _Waitable = _Waitable()
        if sends or recvs:
            with during(where):
                work = self.given.comm.exchange(sorted(sends, key=_by_tag), sorted(recvs, key=_by_tag))
            if step.launches:
                head_start(self.device)
        for copy in step.copies:
            self._copy(copy)
        return _Pending(where, work, operands, results)

    def complete_step(self, step: Step[Rows], pending: _Pending) -> None:
        """Wait for the step's messages and take them in; let go of what is not needed any more."""
        with during(pending.where):
            pending.work.wait()
        for number, boxes in pending.operands.items():
            for n, column in enumerate(self.held[number].columns):
                torch.cat([box.columns[n] for box in boxes], 1, out=column)
        for recv, box in pending.results:
            if recv.complete:
                self._arrived.append((recv.into[0], recv.kind, box))
            else:
                self.contribute(recv.into, box.rows, box.columns[0] if box.columns else None)
        for number, total in self._totals.items():
            sums = self.given.program.sums[number]
            if sums.kind == "dkv" and (total.held > 1 or not sums.home):
                total.settle()
        for number in step.last_use:
            self.held.pop(number, None)

    # ---- operands

    def take(self, what: Operand[Rows]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Rows and heads of a buffer, contiguous. A ring asks for the same rows step after step: the last are kept."""
        last = self._taken.get(what.buffer)
        if last is not None and _same(last[0], what):
            return last[1]
        held = self.held[what.buffer]
        heads = slice(*what.heads)
        rows = [x.contiguous() for x in self.given.kernels.take_rows([x[:, heads] for x in held.rows], what.rows)]
        taken = rows, _columns([x[heads] for x in held.columns], what.rows)
        if what.buffer in OWN.values():
            self._taken[what.buffer] = what, taken
        return taken

    def _copy(self, copy: Copy[Rows]) -> None:
        buffer = self.given.program.buffers[copy.target.buffer]
        if copy.target.buffer not in self.held:
            self.held[copy.target.buffer] = self._empty(buffer.kind, buffer.heads, buffer.size)
        target, heads = self.held[copy.target.buffer], slice(*copy.target.heads)
        rows, columns = self.take(copy.source)
        self.given.kernels.put_rows_([x[:, heads] for x in target.rows], rows, copy.target.rows)
        for into, x in zip(target.columns, columns, strict=True):
            _put_columns(into[heads], x, copy.target.rows)

    def _empty(self, kind: str, heads: Heads, size: int, dtype: torch.dtype | None = None) -> Held:
        """Room for operands or results of one kind."""
        count, options = heads[1] - heads[0], {"device": self.device}
        columns = 1 if kind in ("res", "out") or (kind == "do" and self.has_dlse) else 0
        size += self.given.program.spare_rows if dtype is None else 0
        return Held(
            [torch.empty(size, count, d, dtype=dtype or self.dtype, **options) for d in self._dims[kind]],
            [torch.empty(count, size, dtype=self.wide, **options) for _ in range(columns)],
        )

    def _operand_parcels(self, send: Send[Rows]) -> list[Parcel]:
        held, found = self.held[send.buffer], []
        alone = len(send.peers) == 1 and send.heads == held.rows[0].shape[1]
        packed = (
            [x[None] for x in self.given.kernels.take_rows(held.rows, send.rows)]
            if alone
            else [self.given.kernels.heads_to_front(x, send.rows, send.first_heads, send.heads) for x in held.rows]
        )
        columns = _columns(held.columns, send.rows)
        for n, (peer, tag, first) in enumerate(zip(send.peers, send.tags, send.first_heads, strict=True)):
            found += self._parcels(peer, tag, [x[n] for x in packed], [x[first : first + send.heads] for x in columns])
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
            heads = slice(*c.heads)
            whole = c.heads == (0, rows[0].shape[1])
            mine = self.given.kernels.take_rows([x if whole else x[:, heads] for x in rows], c.rows)
            of_heads = None if lse is None else _columns([lse[heads]], c.rows)[0]
            self._total(c.sums).add(Part(tuple(mine), of_heads, c.into, slice(*c.into_heads)))

    def settle(self, results: Sequence[Contribution[Rows]]) -> None:
        """Merge what the last launch yielded, before the next one is launched."""
        for c in results:
            self._total(c.sums).settle()

    def _total(self, number: int) -> Total:
        if number not in self._totals:
            self._totals[number] = self._new_total(self.given.program.sums[number])
        return self._totals[number]

    def _new_total(self, sums: Sums) -> Total:
        assert self.sizes is not None
        heads = sums.heads[1] - sums.heads[0]
        size = sums.size if not sums.home else self.sizes[1 if sums.kind == "dkv" else 0]
        rounded = sums.home or sums.complete
        final = None if not rounded or (sums.kind == "out" and self.sink is not None) else self.dtype
        behind = tuple((heads, d) for d in self._dims[sums.kind])
        shape = (size, behind, self.wide, final, self.device, sums.kind == "out", self.given.program.spare_rows)
        return Total(TotalShape(*shape), self.given.kernels)

    def _handed_over(self, number: int) -> Held:
        """Sums that are sent: complete ones final, in the input's dtype, all others in the wide one."""
        if number not in self.sent:
            sums = self.given.program.sums[number]
            total = self._total(number).finish()
            del self._totals[number]
            rows, lse = total.rows, total.lse
            if sums.complete and sums.kind == "out" and self.sink is not None:
                assert lse is not None
                add_sink(rows[0], lse, self.sink[slice(*sums.heads)], slice(None))
            dtype = self.dtype if sums.complete else self.wide
            self.sent[number] = Held([x.to(dtype) for x in rows], [] if lse is None else [lse])
        return self.sent[number]

    def home(self, kind: str, size: int) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The results of the rank's own rows, in the input's dtype: for all heads, sinks included."""
        problem, program = self.given.problem, self.given.program
        whole = (0, problem.heads_kv if kind == "dkv" else problem.heads_q)
        mine = [n for n, sums in program.sums.items() if sums.kind == kind and sums.home]
        arrived = [(into, box) for into, of_kind, box in self._arrived if of_kind == kind]
        if len(mine) == 1 and not arrived and program.sums[mine[0]].heads == whole:
            rows, lse, *_ = self._total(mine[0]).finish()
        else:
            behind = tuple((whole[1], d) for d in self._dims[kind])
            dtype = self.wide if kind == "out" and self.sink is not None else self.dtype
            rows = tuple(torch.zeros(size, *shape, dtype=dtype, device=self.device) for shape in behind)
            lse = torch.full((whole[1], size), float("-inf"), dtype=self.wide, device=self.device) if kind == "out" else None
            for number in mine:
                heads, part = slice(*program.sums[number].heads), self._total(number).finish()
                for into, x in zip(rows, part.rows, strict=True):
                    into[:, heads] = x
                if lse is not None and part.lse is not None:
                    lse[heads] = part.lse
        if kind == "out" and self.sink is not None:
            assert lse is not None
            add_sink(rows[0], lse, self.sink, program.real_q_rows)
        rows = [x.to(self.dtype) for x in rows]
        for into, box in arrived:
            heads = slice(*into.into_heads)
            self.given.kernels.put_rows_([x[:, heads] for x in rows], box.rows, into.into)
            if lse is not None:
                _put_columns(lse[heads], box.columns[0], into.into)
        return rows, lse


def _by_tag(parcel: Parcel) -> int:
    return parcel.tag


def _same(one: Operand[Rows], other: Operand[Rows]) -> bool:
    slices = isinstance(one.rows, slice) and isinstance(other.rows, slice) and one.rows == other.rows
    return one.heads == other.heads and (one.rows is other.rows or slices)


def _columns(tensors: Sequence[torch.Tensor], rows: Rows) -> list[torch.Tensor]:
    """Rows of LSEs [h, t], which have them on their second axis; contiguous."""
    return [(x[:, rows] if isinstance(rows, slice) else x.index_select(1, rows)).contiguous() for x in tensors]


def _put_columns(into: torch.Tensor, x: torch.Tensor, rows: Rows) -> None:
    if isinstance(rows, slice):
        into[:, rows] = x
    else:
        into.index_copy_(1, rows.long(), x)
