"""Copies as operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cp_fast.compile.instructions import Copy
from cp_fast.movers.rows import Rows
from cp_fast.runtime.pass_buffers import MISSING, PassBuffers
from cp_fast.runtime.row_selection import columns_of, put_columns, rows_of
from cp_fast.runtime.tensors import Operation, State, Tensors

__all__ = ["copy", "go_together"]


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
    """What copies of one launch have in common; None for a copy without a launch."""
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
    rows, gather = buffers.rows(some[0].source), buffers.kernels.gather_heads
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
            columns = [columns_of(held.columns, rows, (n, n + size)) for n in first_heads if held.columns]
            found = [next(packed) for _ in held.rows]
            state.buffers[target] = Tensors(found, [x for parts in columns for x in parts])

    return pack


def _unpack(buffers: PassBuffers, some: Sequence[Copy[Rows]]) -> Operation:
    """The parts of stacked buffers into the heads of results."""
    rows, scatter, put = buffers.rows(some[0].target), buffers.kernels.scatter_heads_, buffers.kernels.scatter_
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
    nothing, dtype, size = shapes.allocation(source).nothing, shapes.allocation(spec).dtype, shapes.rows(spec)
    shorter = size < shapes.rows(source)

    def convert(state: State) -> None:
        rows, columns = state.buffers[number] or nothing()
        if shorter:
            rows, columns = [x[:size] for x in rows], [x[:, :size].contiguous() for x in columns]
        state.buffers[target] = Tensors([x.to(dtype).contiguous() for x in rows], columns)

    return convert


def _move(buffers: PassBuffers, some: Sequence[Copy[Rows]]) -> Operation:
    """Rows and heads into rows and heads of buffers, which the first copy into each allocates."""
    moves, into_rows = [_Move.of(buffers, one) for one in some], buffers.rows(some[0].target)
    gather, scatter = buffers.kernels.gather, buffers.kernels.scatter_

    def move(state: State) -> None:
        outs, xs = list[torch.Tensor](), list[torch.Tensor]()
        for one in moves:
            held = state.buffers[one.source]
            if held is None:
                assert one.is_sum, MISSING
                held = one.nothing()
            into, into_columns = state.buffers[one.target] or one.new(state)
            taken = rows_of(held.rows, one.rows, one.heads, gather)
            if one.into_heads is not None:
                into, into_columns = [x[:, one.into_heads] for x in into], [x[one.into_heads] for x in into_columns]
            outs += into
            xs += [x.to(one.dtype) for x in taken] if one.is_sum else taken
            if into_columns:
                for column, x in zip(into_columns, columns_of(held.columns, one.rows, one.heads), strict=True):
                    put_columns(column, x, into_rows, scatter)
        scatter(outs, xs, into_rows)

    return move


class _Move(NamedTuple):
    """One copy of a `_move`."""

    source: int
    target: int
    rows: Rows
    heads: tuple[int, int]
    into_heads: slice | None  # None for all.
    is_sum: bool
    dtype: torch.dtype
    nothing: Callable[[], Tensors]
    new: Callable[[State], Tensors]

    @staticmethod
    def of(buffers: PassBuffers, one: Copy[Rows]) -> _Move:
        source, target = one.source.buffer, one.target.buffer
        spec, into = buffers.specs[source], buffers.specs[target]
        heads = None if one.target.heads == into.all_heads else slice(*one.target.heads)
        nothing, dtype = buffers.shapes.allocation(spec).nothing, buffers.shapes.allocation(into).dtype
        rows, new = buffers.rows(one.source), buffers.maker(target)
        return _Move(source, target, rows, one.source.heads, heads, spec.role == "sum", dtype, nothing, new)
