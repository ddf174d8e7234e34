"""Copies as operations."""

from __future__ import annotations

from cp_fast.compile.instructions import Copy
from cp_fast.movers.rows import Rows
from cp_fast.runtime.pass_buffers import MISSING, PassBuffers
from cp_fast.runtime.row_selection import columns_of, put_columns, rows_of
from cp_fast.runtime.tensors import Operation, State, Tensors

__all__ = ["copy"]


def copy(buffers: PassBuffers, one: Copy[Rows]) -> Operation:
    """Copy rows and heads."""
    source, target = buffers.specs[one.source.buffer], buffers.specs[one.target.buffer]
    if target.parts:
        return _pack(buffers, one)
    if source.parts:
        return _unpack(buffers, one)
    if one.target.buffer in buffers.written_once and buffers.is_whole(one.target) and one.source.rows is None:
        return _convert(buffers, one)
    return _move(buffers, one)


def _pack(buffers: PassBuffers, one: Copy[Rows]) -> Operation:
    """Rows for the heads of several peers, into a stacked buffer."""
    number, target, rows, firsts = one.source.buffer, one.target.buffer, buffers.rows(one.source), one.first_heads
    _, heads = buffers.specs[target].all_heads
    front = buffers.kernels.gather_heads

    def pack(state: State) -> None:
        held = state.buffers[number]
        assert held is not None, MISSING
        columns = [columns_of(held.columns, rows, (first, first + heads)) for first in firsts if held.columns]
        packed = [front(x, rows, firsts, heads) for x in held.rows]
        state.buffers[target] = Tensors(packed, [x for some in columns for x in some])

    return pack


def _unpack(buffers: PassBuffers, one: Copy[Rows]) -> Operation:
    """The parts of a stacked buffer into the heads of a result."""
    number, target, rows, firsts = one.source.buffer, one.target.buffer, buffers.rows(one.target), one.first_heads
    new, back = buffers.maker(target), buffers.kernels.scatter_heads_

    def unpack(state: State) -> None:
        held, into = state.buffers[number], state.buffers[target] or new(state)
        for y, x in zip(into.rows, held.rows, strict=True):
            back(y, x, rows, firsts, False)
        for first, x in zip(firsts, held.columns, strict=False):
            put_columns(into.columns[0][first : first + len(x)], x, rows)

    return unpack


def _convert(buffers: PassBuffers, one: Copy[Rows]) -> Operation:
    """All of a sum as a message or a result: the same memory where the dtypes are equal."""
    number, target = one.source.buffer, one.target.buffer
    shapes, source, spec = buffers.shapes, buffers.specs[number], buffers.specs[target]
    nothing, dtype, size = shapes.allocation(source).nothing, shapes.allocation(spec).dtype, shapes.rows(spec)
    shorter = size < shapes.rows(source)

    def convert(state: State) -> None:
        rows, columns = state.buffers[number] or nothing()
        if shorter:
            rows, columns = [x[:size] for x in rows], [x[:, :size].contiguous() for x in columns]
        state.buffers[target] = Tensors([x.to(dtype).contiguous() for x in rows], columns)

    return convert


def _move(buffers: PassBuffers, one: Copy[Rows]) -> Operation:
    """Rows and heads into rows and heads of a buffer, which the first copy into it allocates."""
    number, target = one.source.buffer, one.target.buffer
    rows, heads, into_rows = buffers.rows(one.source), one.source.heads, buffers.rows(one.target)
    into_heads = None if one.target.heads == buffers.specs[target].all_heads else slice(*one.target.heads)
    nothing = buffers.shapes.allocation(buffers.specs[number]).nothing
    is_sum, dtype = buffers.specs[number].role == "sum", buffers.shapes.allocation(buffers.specs[target]).dtype
    new, gather, scatter = buffers.maker(target), buffers.kernels.gather, buffers.kernels.scatter_

    def move(state: State) -> None:
        held = state.buffers[number]
        if held is None:
            assert is_sum, MISSING
            held = nothing()
        into, into_columns = state.buffers[target] or new(state)
        taken = rows_of(held.rows, rows, heads, gather)
        if into_heads is not None:
            into, into_columns = [x[:, into_heads] for x in into], [x[into_heads] for x in into_columns]
        scatter(into, [x.to(dtype) for x in taken] if is_sum else taken, into_rows)
        if into_columns:
            for column, x in zip(into_columns, columns_of(held.columns, rows, heads), strict=True):
                put_columns(column, x, into_rows)

    return move
