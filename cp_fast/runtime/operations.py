"""The operations of instructions: functions of a call's buffers with all sizes, views and prepared messages in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cp_fast.compile.program import Accumulate, Accumulations, Copy, Free, Launch, Recv, Send
from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, LaunchOptions, LaunchScores, Outs
from cp_fast.movers.mover_protocol import Rows
from cp_fast.movers.torch_movers import log_add_exp
from cp_fast.runtime.pass_buffers import (
    MISSING,
    Allocation,
    Operation,
    PassBuffers,
    State,
    Tensors,
    columns_of,
    count,
    is_all,
    is_mask,
    put_columns,
)
from cp_fast.runtime.prepared_exchange import MessageSpec, prepare
from cp_fast.runtime.row_positions import RowPositions
from cp_ref.groups.group import Group

__all__ = [
    "accumulate",
    "add_sink",
    "backward_launch",
    "copy",
    "exchange",
    "forward_launch",
    "free",
    "go_together",
    "wait",
]

# ---- Copy
#
# Copies as operations.


def copy(buffers: PassBuffers, some: Sequence[Copy[Rows]]) -> Operation:
    """Copy rows and heads: several copies that `go_together`."""
    one = some[0]
    if buffers.specs[one.target.buffer].parts:
        return _pack(buffers, some)
    if buffers.specs[one.source.buffer].parts:
        return _unpack(buffers, some)
    return _convert(buffers, one) if _is_converted(buffers, one) else _move(buffers, some)


def go_together(buffers: PassBuffers, one: Copy[Rows], other: Copy[Rows]) -> bool:
    """Whether one launch can make both copies, one after the other: they move the same rows of different buffers."""
    if other.target.buffer in (one.target.buffer, one.source.buffer) or other.source.buffer == one.target.buffer:
        return False
    moves = _moved_rows(buffers, one)
    return moves is not None and moves == _moved_rows(buffers, other)


def _moved_rows(buffers: PassBuffers, one: Copy[Rows]) -> tuple[object, ...] | None:
    """The key that copies of one launch share; None for a copy without a launch."""
    if _is_converted(buffers, one):
        return None
    packs, unpacks = (buffers.specs[view.buffer].parts > 0 for view in (one.target, one.source))
    view = one.source if packs else one.target
    rows = buffers.rows(view)
    where = (rows.start, rows.stop) if isinstance(rows, slice) else (id(rows),)
    return packs, unpacks, len(one.first_heads), buffers.shapes.rows(buffers.specs[view.buffer]), where


def _is_converted(buffers: PassBuffers, one: Copy[Rows]) -> bool:
    """Whether the target is all of the source, perhaps of another dtype."""
    stacked = buffers.specs[one.target.buffer].parts or buffers.specs[one.source.buffer].parts
    whole = one.source.rows is None and buffers.is_whole(one.target)
    return not stacked and whole and one.target.buffer in buffers.written_once


def _pack(buffers: PassBuffers, some: Sequence[Copy[Rows]]) -> Operation:
    """Rows for the heads of several peers, into stacked buffers."""
    rows, gather = buffers.rows(some[0].source), buffers.movers.gather_heads
    each = [(one.source.buffer, one.target.buffer, one.first_heads) for one in some]
    heads = {target: buffers.specs[target].all_heads[1] for _, target, _ in each}

    def pack(state: State) -> None:
        xs, firsts, sizes = list[torch.Tensor](), list[int](), list[int]()
        for source, target, first_heads in each:
            for x in state.buffers[source].rows:
                xs.append(x)
                firsts += first_heads
                sizes.append(heads[target])
        packed = iter(gather(xs, rows, firsts, sizes))
        for source, target, first_heads in each:
            held, size = state.buffers[source], heads[target]
            columns = [columns_of(held.columns, rows, slice(n, n + size)) for n in first_heads if held.columns]
            found = [next(packed) for _ in held.rows]
            state.buffers[target] = Tensors(found, [x for parts in columns for x in parts])

    return pack


def _unpack(buffers: PassBuffers, some: Sequence[Copy[Rows]]) -> Operation:
    """The parts of stacked buffers into the heads of results."""
    rows, scatter, put = buffers.rows(some[0].target), buffers.movers.scatter_heads_, buffers.movers.scatter_
    each = [(one.source.buffer, one.target.buffer, one.first_heads, buffers.maker(one.target.buffer)) for one in some]

    def unpack(state: State) -> None:
        outs, xs, firsts = list[torch.Tensor](), list[torch.Tensor](), list[int]()
        for source, target, first_heads, new in each:
            held, into = state.buffers[source], state.buffers[target] or new(state)
            outs += into.rows
            xs += held.rows
            firsts += first_heads * len(held.rows)
            for first, x in zip(first_heads, held.columns, strict=False):
                put_columns(into.columns[0][first : first + len(x)], x, rows, put)
        scatter(outs, xs, rows, firsts)

    return unpack


def _convert(buffers: PassBuffers, one: Copy[Rows]) -> Operation:
    """All of a sum as a message or a result: the same memory where the dtypes are equal."""
    number, target = one.source.buffer, one.target.buffer
    shapes, source, spec = buffers.shapes, buffers.specs[number], buffers.specs[target]
    nothing, dtypes, size = shapes.allocation(source).nothing, shapes.allocation(spec).dtypes, shapes.rows(spec)
    shorter = size < shapes.rows(source)

    def convert(state: State) -> None:
        rows, columns = state.buffers[number] or nothing()
        if shorter:
            rows, columns = [x[:size] for x in rows], [x[:, :size].contiguous() for x in columns]
        state.buffers[target] = Tensors([x.contiguous() for x in _as(dtypes, rows)], columns)

    return convert


def _move(buffers: PassBuffers, some: Sequence[Copy[Rows]]) -> Operation:
    """Rows and heads into rows and heads of buffers, which the first copy into each allocates."""
    moves, into_rows = [_Move.of(buffers, one) for one in some], buffers.rows(some[0].target)
    scatter = buffers.movers.scatter_

    def move(state: State) -> None:
        outs, xs = list[torch.Tensor](), list[torch.Tensor]()
        for one in moves:
            held = state.buffers[one.source]
            if held is None:
                assert one.is_sum, MISSING
                held = one.nothing()
            into, into_columns = state.buffers[one.target] or one.new(state)
            taken, columns = one.take(held)
            if one.into_heads is not None:
                into, into_columns = [x[:, one.into_heads] for x in into], [x[one.into_heads] for x in into_columns]
            outs += into
            xs += _as(one.dtypes, taken) if one.is_sum else taken
            for column, x in zip(into_columns, columns, strict=True):
                put_columns(column, x, into_rows, scatter)
        scatter(outs, xs, into_rows)

    return move


def _as(dtypes: Sequence[torch.dtype], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of these dtypes."""
    return [x if x.dtype == dtype else x.to(dtype) for x, dtype in zip(tensors, dtypes, strict=True)]


class _Move(NamedTuple):
    """One copy of a `_move`."""

    source: int
    target: int
    take: Callable[[Tensors], Tensors]
    into_heads: slice | None  # None for all.
    is_sum: bool
    dtypes: tuple[torch.dtype, ...]
    nothing: Callable[[], Tensors]
    new: Callable[[State], Tensors]

    @staticmethod
    def of(buffers: PassBuffers, one: Copy[Rows]) -> _Move:
        source, target = one.source.buffer, one.target.buffer
        spec, into = buffers.specs[source], buffers.specs[target]
        nothing, dtypes = buffers.shapes.allocation(spec).nothing, buffers.shapes.allocation(into).dtypes
        take, into_heads, new = buffers.part(one.source), buffers.heads(one.target), buffers.maker(target)
        return _Move(source, target, take, into_heads, spec.role == "sum", dtypes, nothing, new)


# ---- Accumulate
#
# Accumulations, of partial results and of sinks, and frees as operations.


def accumulate(buffers: PassBuffers, one: Accumulate[Rows], *, of: Accumulations | None) -> Operation:
    """Accumulate a partial result; `of`: how its sum is accumulated, None for a sink. The first one with all rows and
    heads of the sum becomes the sum. Rows that are new to the sum are written. The sum is widened for rows that get
    several further results; else the result is rounded once in both cases.
    """
    source, target = one.source, one.target
    number, total = source.buffer, target.buffer
    if one.of_sink:
        return _accumulate_sink(buffers, one)
    assert of is not None
    take = None if buffers.is_whole(source) else buffers.part(source)
    is_whole, into = buffers.is_whole(target), buffers.rows(target)
    spec = buffers.specs[total]
    allocation = buffers.shapes.allocation(spec)
    filled, written = of.filled == buffers.shapes.rows(spec), id(one) in of.written
    finals = allocation.dtypes if id(one) in of.rounded else (allocation.wide,) * len(allocation.dtypes)
    heads = buffers.heads(target)
    movers, wide = buffers.movers, allocation.wide
    scatter, merge = movers.scatter_, movers.merge_

    def accumulate(state: State) -> None:
        part = state.buffers[number]
        assert part is not None, MISSING
        if take is not None:
            part = take(part)
        held = state.buffers[total]
        if held is None and is_whole:
            state.buffers[total] = part
            return
        if held is None or written:
            if held is None:
                dtypes = [x.dtype for x in part.rows]
                held = allocation.maker(dtypes)() if filled else allocation.nothing(dtypes)
            elif any(x.dtype != y.dtype for x, y in zip(held.rows, part.rows, strict=True)):
                held, part = (Tensors([x.to(wide) for x in some.rows], some.columns) for some in (held, part))
            state.buffers[total] = held
            rows, columns = held if heads is None else _of_heads(held, heads)
            scatter(rows, part.rows, into)
            for column, x in zip(columns, part.columns, strict=True):
                put_columns(column, x, into, scatter)
            return
        if any(x.dtype != final for x, final in zip(held.rows, finals, strict=True)):
            held = state.buffers[total] = Tensors([x.to(wide) for x in held.rows], held.columns)
        rows, columns = held if heads is None else _of_heads(held, heads)
        if columns:
            merge(rows[0], columns[0], part.rows[0], part.columns[0], into)
        else:
            scatter(rows, part.rows, into, add=True)

    return accumulate


def _accumulate_sink(buffers: PassBuffers, one: Accumulate[Rows]) -> Operation:
    number, total = one.source.buffer, one.target.buffer
    first, last = one.source.heads
    rows, allocation = buffers.rows(one.target), buffers.shapes.allocation(buffers.specs[total])
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


def free(one: Free) -> Operation:
    """Free buffers."""
    numbers = one.buffers

    def free(state: State) -> None:
        for number in numbers:
            state.buffers[number] = None

    return free


def _of_heads(held: Tensors, heads: slice) -> Tensors:
    return Tensors([x[:, heads] for x in held.rows], [x[heads] for x in held.columns])


def add_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor, rows: Rows) -> None:
    """Let the denominator of these rows gain exp(sink[h]); once, when all tiles are merged. A row that saw nothing
    has lse = sink. Of a mask of all rows, the others keep what they have.
    """
    gain = sink.to(lse.dtype)[:, None]
    if is_mask(rows):
        gain, rows = torch.where(rows, gain, float("-inf")), slice(None)
    old = lse[:, rows]
    new = log_add_exp(old, gain)
    weight = torch.exp(old - new).masked_fill(old == float("-inf"), 0.0).t().unsqueeze(-1)
    if isinstance(rows, slice):
        out[rows].mul_(weight)
        old.copy_(new)
    else:
        out.index_copy_(0, rows, out.index_select(0, rows).mul_(weight))
        lse.index_copy_(1, rows, new)


# ---- Launch
#
# Launches as operations: one call of the kernel library.


def forward_launch(buffers: PassBuffers, backend: Backend, positions: RowPositions, one: Launch[Rows]) -> Operation:
    """One forward call of the kernel library."""
    take_q, take_kv = (buffers.taker(view, strided=backend.writes_rows) for view in one.operands)
    batch, (result,), first_head = one.batch, one.results, one.first_head
    new, into = buffers.maker(result), one.into
    place = None if into is None else (buffers.rows(into), slice(*into.heads))

    def launch(state: State) -> None:
        (q,), _ = take_q(state)
        (k, v), _ = take_kv(state)
        options = state.options if state.score_tensors is None else _with_places(state, positions, one)
        if place is None:
            out, lse, max_logit = backend.forward(q, k, v, batch, options)
            state.buffers[result] = Tensors((out,), (lse,))
        else:
            (out,), (lse,) = state.buffers[result] or new(state)
            some, heads = place
            *_, max_logit = backend.forward(q, k, v, batch, options, Outs(out[some, heads], lse[heads, some]))
        state.max_logit.append((first_head, max_logit))

    return launch


def backward_launch(
    buffers: PassBuffers, backend: Backend, positions: RowPositions, one: Launch[Rows], free: Sequence[int]
) -> Operation:
    """One backward call. `free`: operands without a later use. If the library can, they are freed once the kernels
    have read them, before the gradients are allocated.
    """
    take_q, take_kv, take_do, take_res = map(buffers.taker, one.operands)
    batch, (dq, dkv) = one.batch, one.results

    def operands(state: State) -> BackwardOperands:
        (q,), _ = take_q(state)
        (k, v), _ = take_kv(state)
        (dout,), dlse = take_do(state)
        (out,), (lse,) = take_res(state)
        for number in free:
            state.buffers[number] = None
        return BackwardOperands(dout, q, k, v, out, lse, dlse[0] if dlse else None)

    def launch(state: State) -> None:
        options = state.options if state.score_tensors is None else _with_places(state, positions, one)
        part = backend.backward([operands(state)], batch, options)
        state.buffers[dq], state.buffers[dkv] = Tensors((part.dq,), ()), Tensors((part.dk, part.dv), ())

    return launch


def _with_places(state: State, positions: RowPositions, one: Launch[Rows]) -> LaunchOptions:
    """The options of a launch whose scores depend on the places of its rows and heads."""
    assert state.score_tensors is not None
    return state.options._replace(score_inputs=LaunchScores(positions.of(one), one.first_head, state.score_tensors))


# ---- Send, Recv, Wait
#
# Sends, receives and waits as operations: messages that are posted together are one exchange.
#
# A posted exchange runs on a separate stream. It begins when the current stream reaches this point, at the same moment
# as the next kernel launch. An attention kernel fills every multiprocessor at once. If the kernel starts first, the
# messages wait until its last blocks drain, and add to its time (seen with NCCL on H200s: 0.5 to 0.8 ms a step of 3.3).
# So the current stream is kept busy on one multiprocessor for a moment: the messages start first, and the kernel hides
# them.


_HEAD_START = 16_000  # Cycles, about 9 us on an H200: the exchange's stream needs 2 to 4 us to begin.

InOrder = Sequence[Sequence[torch.Tensor]]
"""The tensors of some messages, in the order in which the messages were prepared."""


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
        given = [x for give in giving for some in give(state) for x in some]
        arriving = [x for receive in receiving for some in receive(state) for x in some]
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


def _giver(buffers: PassBuffers, send: Send[Rows]) -> Callable[[State], InOrder]:
    """Take what a message sends, contiguous."""
    take, part = buffers.taker(send.source), send.part
    if part is not None:

        def give_part(state: State) -> InOrder:
            held = state.buffers[send.source.buffer]
            return [x[part] for x in held.rows], held.columns[part : part + 1]

        return give_part
    if buffers.specs[send.source.buffer].role == "own" and buffers.is_whole(send.source):  # a layer's may have strides

        def give_own(state: State) -> InOrder:
            rows, columns = take(state)
            return [x.contiguous() for x in rows], columns

        return give_own
    return take


def _receiver(buffers: PassBuffers, recvs: Sequence[Recv]) -> Callable[[State], InOrder]:
    """Allocate room for all messages that fill one buffer, message after message."""
    number, spec, new = recvs[0].buffer, buffers.specs[recvs[0].buffer], buffers.maker(recvs[0].buffer)
    pieces = [recv.rows or (slice(0, recv.size),) for recv in recvs]
    if spec.parts:
        parts = [recv.part for recv in recvs if recv.part is not None]

        def receive_parts(state: State) -> InOrder:
            rows, columns = new(state)
            return [some for n in parts for some in ([x[n] for x in rows], columns[n : n + 1])]

        return receive_parts
    if len(recvs) == 1 and is_all(pieces[0][0], buffers.shapes.rows(spec)):
        return new

    def receive(state: State) -> InOrder:
        held = state.buffers[number] or new(state)
        found = list[Sequence[torch.Tensor]]()
        for rows in pieces:
            found.append([x[piece] for x in held.rows for piece in rows])
            for column in held.columns:
                found.append([buffer := column.new_empty(column.shape[0], sum(map(count, rows)))])
                parts = buffer.split([count(piece) for piece in rows], 1)
                state.arrived += [(column[:, piece], part) for piece, part in zip(rows, parts, strict=True)]
        return found

    return receive


def _sent(buffers: PassBuffers, send: Send[Rows], *, held: bool) -> list[MessageSpec]:
    spec = buffers.specs[send.source.buffer]
    size = count(buffers.rows(send.source))
    held = held or spec.role == "own" or spec.parts > 0
    return _messages(send.peer, send.tag, buffers.shapes.allocation(spec, size, stacked=False), held=held)


def _received(buffers: PassBuffers, recv: Recv) -> list[MessageSpec]:
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
) -> list[MessageSpec]:
    """A message for each tensor, with a separate tag. `pieces`: the rows of each piece of a tensor by row."""
    found: list[MessageSpec] = []
    for n, shape in enumerate(allocation.rows):
        row = math.prod(shape[1:]) * allocation.dtypes[n].itemsize
        found.append(MessageSpec(peer, tag + n, tuple(row * size for size in pieces or [shape[0]]), held))
    return found + [
        MessageSpec(peer, tag + 2 + n, (math.prod(shape) * allocation.wide.itemsize,), held)
        for n, shape in enumerate(allocation.columns)
    ]
