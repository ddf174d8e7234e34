"""Sends, receives and waits as operations: messages that are posted together are one exchange.

A posted exchange runs on a separate stream. It begins when the current stream reaches this point, at the same moment as
the next kernel launch. An attention kernel fills every multiprocessor at once. If the kernel starts first, the messages
wait until its last blocks drain, and add to its time (seen with NCCL on H200s: 0.5 to 0.8 ms a step of 3.3). So the
current stream is kept busy on one multiprocessor for a moment: the messages start first, and the kernel hides them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from cp_fast.compile.instructions import Recv, Send
from cp_fast.movers.rows import Rows
from cp_fast.runtime.pass_buffers import PassBuffers
from cp_fast.runtime.prepared_exchange import Message, prepare
from cp_fast.runtime.row_selection import count, is_all
from cp_fast.runtime.tensors import Allocation, Operation, State
from cp_ref.spec import Group

__all__ = ["exchange", "wait"]

_HEAD_START = 16_000  # Cycles, about 9 us on an H200: the exchange's stream needs 2 to 4 us to begin.

Give = Callable[[State], list[torch.Tensor]]


def exchange(
    buffers: PassBuffers, where: str, sends: Sequence[Send[Rows]], recvs: Sequence[Recv], group: Group, *, hidden: bool
) -> Operation:
    """Post messages together. `hidden`: kernels are launched before the wait."""
    giving = [_giver(buffers, send) for send in sends]
    receiving = [_receiver(buffers, some) for some in _by_buffer(recvs)]
    out = [message for send in sends for message in _sent(buffers, send, held=not hidden)]
    back = [message for some in _by_buffer(recvs) for recv in some for message in _received(buffers, recv)]
    prepared = prepare(group, where, out, back)
    begins_first = hidden and buffers.shapes.device.type == "cuda"

    def post(state: State) -> None:
        given, arriving = list[torch.Tensor](), list[torch.Tensor]()
        for give in giving:
            given += give(state)
        for receive in receiving:
            arriving += receive(state)
        state.pending = work = prepared.post(state.group, given, arriving)
        if begins_first and not getattr(work, "by_copies", False):
            torch.cuda._sleep(_HEAD_START)  # On the stream; the host does not wait.

    return post


def wait(state: State) -> None:
    """Wait for the messages under way."""
    assert state.pending is not None
    state.pending.wait()
    state.pending = None
    for column, arrived in state.arrived:
        column.copy_(arrived)
    state.arrived.clear()


def _giver(buffers: PassBuffers, send: Send[Rows]) -> Give:
    part = send.part
    if part is not None:

        def give_part(state: State) -> list[torch.Tensor]:
            held = state.buffers[send.source.buffer]
            return [*(x[part] for x in held.rows), *held.columns[part : part + 1]]

        return give_part
    take = buffers.taker(send.source)

    def give(state: State) -> list[torch.Tensor]:
        rows, columns = take(state)
        return [*rows, *columns]

    return give


def _receiver(buffers: PassBuffers, recvs: Sequence[Recv]) -> Give:
    """Allocate room for all messages that fill one buffer, message after message."""
    number, spec = recvs[0].buffer, buffers.specs[recvs[0].buffer]
    allocation, size = buffers.shapes.allocation(spec), buffers.shapes.rows(spec)
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
                found.append(buffer := column.new_empty(column.shape[0], sum(map(count, rows))))
                parts = buffer.split([count(piece) for piece in rows], 1)
                state.arrived += [(column[:, piece], part) for piece, part in zip(rows, parts, strict=True)]
        return found

    return receive


def _sent(buffers: PassBuffers, send: Send[Rows], *, held: bool) -> list[Message]:
    spec = buffers.specs[send.source.buffer]
    size = count(buffers.rows(send.source))
    kept = held or spec.role == "own" or spec.parts > 0
    return _messages(send.peer, send.tag, buffers.shapes.allocation(spec, size, stacked=False), held=kept)


def _received(buffers: PassBuffers, recv: Recv) -> list[Message]:
    pieces = None if recv.rows is None else [count(rows) for rows in recv.rows]
    allocation = buffers.shapes.allocation(buffers.specs[recv.buffer], recv.size, stacked=False)
    return _messages(recv.peer, recv.tag, allocation, pieces)


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
