"""Instructions as operations: functions of a call's state, with everything that depends on shapes resolved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cp_fast.backends import Backend, BackwardOperands
from cp_fast.backends.backend_protocol import backward_letting_go
from cp_fast.compile.instructions import OWN, Accumulate, BufferSpec, Copy, Free, Launch, Recv, Send, View
from cp_fast.movers.base import Kernels
from cp_fast.runtime.head_start import head_start
from cp_fast.runtime.prepared_exchange import Message, prepare
from cp_fast.runtime.row_selection import Rows, columns_of, count, is_all, is_mask, put_columns, rows_of
from cp_fast.runtime.sinks import add_sink
from cp_fast.runtime.tensors import Allocation, Operation, Shapes, State, Tensors
from cp_ref.spec import Group

__all__ = ["Operations"]

_MISSING = "a buffer is read before it was filled, or after it was freed"
Give = Callable[[State], list[torch.Tensor]]


@dataclass(frozen=True)
class Operations:
    """Makes the operations of one pass.

    Attributes:
        buffers: the specifications.
        written_once: buffers written by only one instruction.
        zeroed: buffers with cells that are never written.
    """

    buffers: Sequence[BufferSpec]
    shapes: Shapes
    backend: Backend
    kernels: Kernels
    written_once: frozenset[int]
    zeroed: frozenset[int]

    # ---- views

    def _heads(self, number: int) -> tuple[int, int]:
        first, last = self.buffers[number].heads
        return 0, last - first

    def _rows(self, view: View[Rows]) -> Rows:
        return slice(0, self.shapes.rows(self.buffers[view.buffer])) if view.rows is None else view.rows

    def _is_whole(self, view: View[Rows]) -> bool:
        all_rows = view.rows is None or is_all(view.rows, self.shapes.rows(self.buffers[view.buffer]))
        return all_rows and view.heads == self._heads(view.buffer)

    def _taker(self, view: View[Rows]) -> Callable[[State], Tensors]:
        """Rows and heads of a buffer, contiguous. The last rows gathered from an own buffer are kept: a ring needs the
        same ones at every step.
        """
        number, rows, heads, take_rows = view.buffer, self._rows(view), view.heads, self.kernels.take_rows
        if self._is_whole(view):

            def whole(state: State) -> Tensors:
                found = state.buffers[number]
                assert found is not None, _MISSING
                return found

            return whole
        own = self.buffers[number].role == "own"
        key = (rows.start, rows.stop, heads) if isinstance(rows, slice) else (id(rows), heads)

        def part(state: State) -> Tensors:
            held = state.buffers[number]
            assert held is not None, _MISSING
            if own and (last := state.gathered.get(number)) is not None and last[0] == key:
                return last[1]
            taken = Tensors(
                [x.contiguous() for x in rows_of(held.rows, rows, heads, take_rows)],
                columns_of(held.columns, rows, heads) if held.columns else (),
            )
            if own:
                state.gathered[number] = key, taken
            return taken

        return part

    # ---- messages

    def exchange(
        self, where: str, sends: Sequence[Send[Rows]], recvs: Sequence[Recv], group: Group, *, hidden: bool
    ) -> Operation:
        """Post messages together. `hidden`: kernels are launched before the wait."""
        giving = [self._giver(send) for send in sends]
        receiving = [self._receiver(some) for some in _by_buffer(recvs)]
        out = [message for send in sends for message in self._sent(send, held=not hidden)]
        back = [message for some in _by_buffer(recvs) for recv in some for message in self._received(recv)]
        prepared = prepare(group, where, out, back)
        device = self.shapes.device

        def post(state: State) -> None:
            given, arriving = list[torch.Tensor](), list[torch.Tensor]()
            for give in giving:
                given += give(state)
            for receive in receiving:
                arriving += receive(state)
            state.pending = work = prepared.post(state.group, given, arriving)
            if hidden and not getattr(work, "by_copies", False):
                head_start(device)

        return post

    def wait(self) -> Operation:
        """Wait for the messages under way."""

        def wait(state: State) -> None:
            assert state.pending is not None
            state.pending.wait()
            state.pending = None
            for column, arrived in state.arrived:
                column.copy_(arrived)
            state.arrived.clear()

        return wait

    def _giver(self, send: Send[Rows]) -> Give:
        part = send.part
        if part is not None:

            def give_part(state: State) -> list[torch.Tensor]:
                held = state.buffers[send.source.buffer]
                return [*(x[part] for x in held.rows), *held.columns[part : part + 1]]

            return give_part
        take = self._taker(send.source)

        def give(state: State) -> list[torch.Tensor]:
            rows, columns = take(state)
            return [*rows, *columns]

        return give

    def _receiver(self, recvs: Sequence[Recv]) -> Give:
        """Allocate room for all messages that fill one buffer, message after message."""
        number, spec = recvs[0].buffer, self.buffers[recvs[0].buffer]
        allocation, size = self.shapes.allocation(spec), self.shapes.rows(spec)
        pieces = [recv.rows or (slice(0, recv.size),) for recv in recvs]
        if spec.parts:

            def receive_parts(state: State) -> list[torch.Tensor]:
                held = state.buffers[number] = allocation.empty()
                found = list[torch.Tensor]()
                for recv in recvs:
                    assert recv.part is not None
                    found += [x[recv.part] for x in held.rows]
                    found += held.columns[recv.part : recv.part + 1]
                return found

            return receive_parts
        if len(recvs) == 1 and is_all(pieces[0][0], size):

            def receive_whole(state: State) -> list[torch.Tensor]:
                held = state.buffers[number] = allocation.empty()
                return [*held.rows, *held.columns]

            return receive_whole

        def receive(state: State) -> list[torch.Tensor]:
            held = state.buffers[number]
            if held is None:
                held = state.buffers[number] = allocation.empty()
            found = list[torch.Tensor]()
            for rows in pieces:
                found += [x[piece] for x in held.rows for piece in rows]
                for column in held.columns:
                    found.append(box := column.new_empty(column.shape[0], sum(map(count, rows))))
                    parts = box.split([count(piece) for piece in rows], 1)
                    state.arrived += [(column[:, piece], part) for piece, part in zip(rows, parts, strict=True)]
            return found

        return receive

    def _sent(self, send: Send[Rows], *, held: bool) -> list[Message]:
        spec = self.buffers[send.source.buffer]
        size = count(self._rows(send.source))
        kept = held or spec.role == "own" or spec.parts > 0
        return _messages(send.peer, send.tag, self.shapes.allocation(spec, size, stacked=False), held=kept)

    def _received(self, recv: Recv) -> list[Message]:
        pieces = None if recv.rows is None else [count(rows) for rows in recv.rows]
        allocation = self.shapes.allocation(self.buffers[recv.buffer], recv.size, stacked=False)
        return _messages(recv.peer, recv.tag, allocation, pieces)

    # ---- copies

    def copy(self, one: Copy[Rows]) -> Operation:
        """Copy rows and heads."""
        source, target = self.buffers[one.source.buffer], self.buffers[one.target.buffer]
        if target.parts:
            return self._pack(one)
        if source.parts:
            return self._unpack(one)
        if one.target.buffer in self.written_once and self._is_whole(one.target) and one.source.rows is None:
            return self._convert(one)
        return self._move(one)

    def _pack(self, one: Copy[Rows]) -> Operation:
        """Rows for the heads of several peers, into a stacked buffer."""
        number, target, rows, firsts = one.source.buffer, one.target.buffer, self._rows(one.source), one.first_heads
        _, heads = self._heads(target)
        front = self.kernels.heads_to_front

        def pack(state: State) -> None:
            held = state.buffers[number]
            assert held is not None, _MISSING
            columns = [columns_of(held.columns, rows, (first, first + heads)) for first in firsts if held.columns]
            packed = [front(x, rows, firsts, heads) for x in held.rows]
            state.buffers[target] = Tensors(packed, [x for some in columns for x in some])

        return pack

    def _unpack(self, one: Copy[Rows]) -> Operation:
        """The parts of a stacked buffer into the heads of a result."""
        number, target, rows, firsts = one.source.buffer, one.target.buffer, self._rows(one.target), one.first_heads
        new, back = self._maker(target), self.kernels.heads_to_back_

        def unpack(state: State) -> None:
            held, into = state.buffers[number], state.buffers[target] or new(state)
            for y, x in zip(into.rows, held.rows, strict=True):
                back(y, x, rows, firsts, False)
            for first, x in zip(firsts, held.columns, strict=False):
                put_columns(into.columns[0][first : first + len(x)], x, rows)

        return unpack

    def _convert(self, one: Copy[Rows]) -> Operation:
        """All of a sum as a message or a result: the same memory where the dtypes are equal."""
        number, target = one.source.buffer, one.target.buffer
        nothing = self.shapes.allocation(self.buffers[number]).nothing
        allocation = self.shapes.allocation(self.buffers[target])
        shorter = self.shapes.rows(self.buffers[target]) < self.shapes.rows(self.buffers[number])
        size, dtype = self.shapes.rows(self.buffers[target]), allocation.dtype

        def convert(state: State) -> None:
            rows, columns = state.buffers[number] or nothing()
            if shorter:
                rows, columns = [x[:size] for x in rows], [x[:, :size].contiguous() for x in columns]
            state.buffers[target] = Tensors([x.to(dtype).contiguous() for x in rows], columns)

        return convert

    def _move(self, one: Copy[Rows]) -> Operation:
        """Rows and heads into rows and heads of a buffer, which the first copy into it allocates."""
        number, target = one.source.buffer, one.target.buffer
        rows, heads, into_rows = self._rows(one.source), one.source.heads, self._rows(one.target)
        into_heads = None if one.target.heads == self._heads(target) else slice(*one.target.heads)
        nothing = self.shapes.allocation(self.buffers[number]).nothing
        is_sum, dtype = self.buffers[number].role == "sum", self.shapes.allocation(self.buffers[target]).dtype
        new, take_rows, put_rows = self._maker(target), self.kernels.take_rows, self.kernels.put_rows_

        def move(state: State) -> None:
            held = state.buffers[number]
            if held is None:
                assert is_sum, _MISSING
                held = nothing()
            into, into_columns = state.buffers[target] or new(state)
            taken = rows_of(held.rows, rows, heads, take_rows)
            if into_heads is not None:
                into, into_columns = [x[:, into_heads] for x in into], [x[into_heads] for x in into_columns]
            put_rows(into, [x.to(dtype) for x in taken] if is_sum else taken, into_rows)
            if into_columns:
                for column, x in zip(into_columns, columns_of(held.columns, rows, heads), strict=True):
                    put_columns(column, x, into_rows)

        return move

    def _maker(self, number: int) -> Callable[[State], Tensors]:
        """A function that allocates a buffer."""
        allocation = self.shapes.allocation(self.buffers[number])
        allocate = allocation.nothing if number in self.zeroed else allocation.empty

        def new(state: State) -> Tensors:
            made = state.buffers[number] = allocate()
            return made

        return new

    # ---- launches

    def forward_launch(self, one: Launch[Rows]) -> Operation:
        """One forward call of the kernel library."""
        take_q, take_kv = map(self._taker, one.operands)
        run, batch, (result,), first_head = self.backend.forward, one.batch, one.results, one.first_head

        def launch(state: State) -> None:
            (q,), _ = take_q(state)
            (k, v), _ = take_kv(state)
            out, lse, max_logit = run(q, k, v, batch, state.options)
            state.buffers[result] = Tensors((out,), (lse,))
            state.max_logit.append((first_head, max_logit))

        return launch

    def backward_launch(self, one: Launch[Rows], free: Sequence[int]) -> Operation:
        """One backward call. `free`: operands without a later use. If the library can, they are freed once the kernels
        have read them, before the gradients are allocated.
        """
        take_q, take_kv, take_do, take_res = map(self._taker, one.operands)
        backend, batch, (dq, dkv) = self.backend, one.batch, one.results

        def operands(state: State) -> BackwardOperands:
            (q,), _ = take_q(state)
            (k, v), _ = take_kv(state)
            (dout,), dlse = take_do(state)
            (out,), (lse,) = take_res(state)
            for number in free:
                state.buffers[number] = None
            return BackwardOperands(dout, q, k, v, out, lse, dlse[0] if dlse else None)

        def launch(state: State) -> None:
            part = backward_letting_go(backend, [operands(state)], batch, state.options)
            state.buffers[dq], state.buffers[dkv] = Tensors((part.dq,), ()), Tensors((part.dk, part.dv), ())

        return launch

    # ---- sums

    def accumulate(self, one: Accumulate[Rows], *, last: bool) -> Operation:
        """Accumulate a partial result. The first one with all rows and heads of the sum becomes the sum. The sum is
        widened for later results, but not for the last one: the result is rounded once in both cases.
        """
        source, target = one.source, one.target
        number, total = source.buffer, target.buffer
        if number == OWN["sink"]:
            return self._accumulate_sink(one)
        take = None if self._is_whole(source) else (self._rows(source), source.heads)
        is_whole, into = self._is_whole(target), self._rows(target)
        spec = self.buffers[total]
        allocation = self.shapes.allocation(spec)
        final = self.shapes.dtype if last and spec.dtype == "input" else allocation.wide
        heads = None if target.heads == self._heads(total) else slice(*target.heads)
        take_rows, put_rows, merge, add = (
            self.kernels.take_rows,
            self.kernels.put_rows_,
            self.kernels.merge_,
            self.kernels.add_rows_,
        )
        wide = allocation.wide

        def accumulate(state: State) -> None:
            part = state.buffers[number]
            assert part is not None, _MISSING
            if take is not None:
                part = Tensors(rows_of(part.rows, *take, take_rows), columns_of(part.columns, *take))
            held = state.buffers[total]
            if held is None:
                if is_whole:
                    state.buffers[total] = part
                    return
                held = state.buffers[total] = allocation.nothing([x.dtype for x in part.rows])
                rows, columns = _of_heads(held, heads)
                put_rows(rows, part.rows, into)
                for column, x in zip(columns, part.columns, strict=True):
                    put_columns(column, x, into)
                return
            if any(x.dtype != final for x in held.rows):
                held = state.buffers[total] = Tensors([x.to(wide) for x in held.rows], held.columns)
            rows, columns = _of_heads(held, heads)
            if columns:
                merge(rows[0], columns[0], part.rows[0], part.columns[0], into)
            else:
                add(rows, part.rows, into)

        return accumulate

    def _accumulate_sink(self, one: Accumulate[Rows]) -> Operation:
        number, total = one.source.buffer, one.target.buffer
        first, last = one.source.heads
        rows, allocation = self._rows(one.target), self.shapes.allocation(self.buffers[total])
        if isinstance(rows, torch.Tensor) and not is_mask(rows):
            rows = rows.long()  # for PyTorch's own operators

        def accumulate(state: State) -> None:
            sink: torch.Tensor = state.buffers[number]
            held = state.buffers[total]
            if held is None:
                held = state.buffers[total] = allocation.nothing()
            size = len(rows) if is_mask(rows) else held.rows[0].shape[0]  # a mask has no spare row
            add_sink(held.rows[0][:size], held.columns[0][:, :size], sink[first:last], rows)

        return accumulate

    def free(self, one: Free) -> Operation:
        """Free buffers."""
        numbers = one.buffers

        def free(state: State) -> None:
            for number in numbers:
                state.buffers[number] = None

        return free


def _of_heads(held: Tensors, heads: slice | None) -> Tensors:
    if heads is None:
        return held
    return Tensors([x[:, heads] for x in held.rows], [x[heads] for x in held.columns])


def _by_buffer(recvs: Sequence[Recv]) -> list[list[Recv]]:
    """Receives by the buffer that they fill."""
    found: dict[int, list[Recv]] = {}
    for recv in recvs:
        found.setdefault(recv.buffer, []).append(recv)
    return list(found.values())


def _messages(
    peer: int, tag: int, allocation: Allocation, pieces: Sequence[int] | None = None, *, held: bool = False
) -> list[Message]:
    """A message for each tensor, with a separate tag. `pieces`: the rows of each piece of a tensor by row."""
    found: list[Message] = []
    for n, shape in enumerate(allocation.rows):
        row = math.prod(shape[1:]) * allocation.dtype.itemsize
        found.append(Message(peer, tag + n, tuple(row * size for size in pieces or [shape[0]]), held))
    return found + [
        Message(peer, tag + 2 + n, (math.prod(shape) * allocation.wide.itemsize,), held)
        for n, shape in enumerate(allocation.columns)
    ]
