"""One pass of one rank's lowered program at work: its buffers and its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cp_fast.backends import Backend
from cp_fast.binding import Call, bound
from cp_fast.bound import Arrival, Given, Held, Moved, Pass, Step, Take
from cp_fast.exchanges import Exchange, prepares
from cp_fast.kernels.base import Kernels
from cp_fast.overlap import head_start
from cp_fast.program import LoweredProgram
from cp_fast.results import Results
from cp_fast.rows import Rows, columns_of, count, put_columns, rows_of
from cp_ref.spec import Group, Pending, Problem

__all__ = ["Inputs", "Run", "wide_dtype"]


_NOT_THERE = "a buffer is read before it was filled, or after it was let go"


class Inputs(NamedTuple):
    """The program of a pass, and the libraries and the group that run it."""

    problem: Problem
    program: LoweredProgram[Rows]
    backend: Backend
    comm: Group
    kernels: Kernels
    bound: dict[Any, Any]  # the plan's, see `cp_fast.bound`


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that results are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Posted(NamedTuple):
    """The messages of a step, under way."""

    work: Pending
    columns: list[tuple[torch.Tensor, torch.Tensor]]  # rows of an lse that arrive, and where they are wanted
    partial: list[Held]


class Run:
    """One pass of one rank.

    Args:
        given: what runs, and on what.
        like: a tensor with the dtype and the device of q.
        sizes: rows of q, and of k and v.
        sink: each head's sink logit [h_q], of a forward pass.
        has_dlse: whether there is a gradient of the lse, of a backward pass.
    """

    def __init__(
        self,
        given: Inputs,
        like: torch.Tensor,
        sizes: tuple[int, int],
        *,
        backward: bool,
        sink: torch.Tensor | None = None,
        has_dlse: bool = False,
    ) -> None:
        self.wide, self._kernels, self._sizes = wide_dtype(like.dtype), given.kernels, sizes
        how = backward, sizes, like.dtype, self.wide, like.device, sink is not None, has_dlse
        self._group = group = given.comm
        call = Call(group if prepares(group) else None, *how)
        self.ready: Pass = bound(given.bound, given.program, given.problem, group, call)
        self.held: list[Held | None] = [None] * len(self.ready.slots)
        self.results = Results(given.problem, given.program, self.ready, given.kernels, like, self.wide, sink)
        self._taken: dict[int, tuple[Take, Held]] = {}

    def hold(self, name: str, rows: Sequence[torch.Tensor], columns: Sequence[torch.Tensor] = ()) -> None:
        """What a buffer has."""
        self.held[self.ready.slots[name]] = Held(rows, columns)

    def kept(self, name: str) -> list[torch.Tensor]:
        """The tensors of a buffer."""
        held = self.held[self.ready.slots[name]]
        assert held is not None, _NOT_THERE
        return [*held.rows, *held.columns]

    # ---- a step

    def post(self, step: Step) -> _Posted | None:
        """Send and receive; then put together what the launches need."""
        for copy in step.packed:
            self._copy(copy)
        posted = None if step.exchange is None else self._post(step, step.exchange)
        for copy in step.copies:
            self._copy(copy)
        return posted

    def _post(self, step: Step, exchange: Exchange) -> _Posted:
        sends, recvs, columns = list[torch.Tensor](), list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()
        for given in step.given:
            sends += self._given(given)
        for sums, rows in step.handed:
            sends += self.results.handed_over(sums, rows)
        for sums in step.gone:
            self.results.handed.pop(sums, None)
        for arrival in step.arrivals:
            recvs += self._arriving(arrival, columns)
        partial = [room.new() for room, _ in step.partial]
        for rows, its_columns in partial:
            recvs += rows
            recvs += its_columns
        complete = [(what, what.room.new()) for what in step.complete]
        self.results.arriving += complete
        for _, box in complete:
            for n, of_peer in enumerate(zip(*(x.unbind() for x in box.rows), strict=True)):
                recvs += of_peer
                recvs += box.columns[n : n + 1]
        work = exchange.post(self._group, sends, recvs)
        if step.launches and not getattr(work, "by_copies", False):
            head_start(self.results.device)
        return _Posted(work, columns, partial)

    def complete_step(self, step: Step, posted: _Posted | None) -> None:
        """Finish what needs no message; wait for the step's, and take them in; let go of what nobody needs any more."""
        for kind in step.finished:
            self.results.finish_own(kind, self._sizes[kind == "dkv"])
        if posted is not None:
            posted.work.wait()
            for column, arrived in posted.columns:
                column.copy_(arrived)
            for (_, gives), (rows, columns) in zip(step.partial, posted.partial, strict=True):
                self.results.contribute(gives, rows, columns[0] if columns else None)
        self.results.settle(step.settled)
        for slot in step.last_use:
            self.held[slot] = None

    # ---- operands

    def take(self, what: Take) -> Held:
        """Rows and heads of a buffer, contiguous. A ring asks for the same rows step after step: the last are kept."""
        held = self.held[what.slot]
        assert held is not None, _NOT_THERE
        if what.whole:
            return held
        last = self._taken.get(what.slot)
        if last is not None and last[0] is what:
            return last[1]
        taken = self._part(held, what)
        if what.own:
            self._taken[what.slot] = what, taken
        return taken

    def _part(self, held: Held, what: Take) -> Held:
        rows = [x.contiguous() for x in rows_of(held.rows, what.rows, what.heads, self._kernels.take_rows)]
        return Held(rows, columns_of(held.columns, what.rows, what.heads) if held.columns else ())

    def _copy(self, copy: Moved) -> None:
        target, source = self.held[copy.slot], self.held[copy.source.slot]
        assert source is not None, _NOT_THERE
        if target is None:
            target = self.held[copy.slot] = copy.room.new()
        what, columns = copy.source, source.columns
        rows = rows_of(source.rows, what.rows, what.heads, self._kernels.take_rows)
        into, into_columns = target
        if copy.heads is not None:
            into, into_columns = [x[:, copy.heads] for x in into], [x[copy.heads] for x in into_columns]
        self._kernels.put_rows_(into, rows, copy.rows)
        if columns:
            for column, x in zip(into_columns, columns_of(columns, what.rows, what.heads), strict=True):
                put_columns(column, x, copy.rows)

    def _given(self, given: Given) -> list[torch.Tensor]:
        """What is sent of a buffer, peer after peer."""
        held = self.held[given.slot]
        assert held is not None, _NOT_THERE
        if given.taken is not None:
            part = held if given.taken.whole else self._part(held, given.taken)
            return [*part.rows, *part.columns]
        front, found = self._kernels.heads_to_front, list[torch.Tensor]()
        packed = [front(x, given.rows, given.first_heads, given.heads).unbind() for x in held.rows]
        for first, of_peer in zip(given.first_heads, zip(*packed, strict=True), strict=True):
            found += of_peer
            found += columns_of(held.columns, given.rows, (first, first + given.heads))
        return found

    def _arriving(self, arrival: Arrival, columns: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Room for a buffer that arrives, by message. `columns` gains those that are yet to be put into the buffer."""
        held = self.held[arrival.slot] = arrival.room.new()
        found = list[torch.Tensor]()
        for rows in arrival.rows:
            if rows is None:
                found += held.rows
                found += held.columns
                continue
            found += [x[piece] for x in held.rows for piece in rows]
            for column in held.columns:
                found.append(box := column.new_empty(column.shape[0], sum(map(count, rows))))
                parts = box.split([count(piece) for piece in rows], 1)
                columns += [(column[:, piece], part) for piece, part in zip(rows, parts, strict=True)]
        return found
