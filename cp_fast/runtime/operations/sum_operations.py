"""Accumulations, of partial results and of sinks, and frees as operations."""

from __future__ import annotations

import torch

from cp_fast.compile.executable_plan import Accumulations
from cp_fast.compile.instructions import OWN, Accumulate, Free
from cp_fast.movers.rows import Rows
from cp_fast.movers.torch_movers.torch_merges import log_add_exp
from cp_fast.runtime.pass_buffers import MISSING, PassBuffers
from cp_fast.runtime.row_selection import columns_of, is_mask, put_columns, rows_of
from cp_fast.runtime.tensors import Operation, State, Tensors

__all__ = ["accumulate", "add_sink", "free"]


def accumulate(buffers: PassBuffers, one: Accumulate[Rows], *, of: Accumulations | None) -> Operation:
    """Accumulate a partial result; `of`: how its sum is accumulated, None for a sink. The first one with all rows and
    heads of the sum becomes the sum. Rows that are new to the sum are written. The sum is widened for rows that get
    several further results; else the result is rounded once in both cases.
    """
    source, target = one.source, one.target
    number, total = source.buffer, target.buffer
    if number == OWN["sink"]:
        return _accumulate_sink(buffers, one)
    assert of is not None
    take = None if buffers.is_whole(source) else (buffers.rows(source), source.heads)
    is_whole, into = buffers.is_whole(target), buffers.rows(target)
    spec = buffers.specs[total]
    allocation = buffers.shapes.allocation(spec)
    filled, written = of.filled == buffers.shapes.rows(spec), id(one) in of.written
    final = buffers.shapes.dtype if id(one) in of.rounded and spec.dtype == "input" else allocation.wide
    heads = None if target.heads == spec.all_heads else slice(*target.heads)
    kernels, wide = buffers.kernels, allocation.wide
    gather, scatter, merge = kernels.gather, kernels.scatter_, kernels.merge_

    def accumulate(state: State) -> None:
        part = state.buffers[number]
        assert part is not None, MISSING
        if take is not None:
            part = Tensors(rows_of(part.rows, *take, gather), columns_of(part.columns, *take))
        held = state.buffers[total]
        if held is None and is_whole:
            state.buffers[total] = part
            return
        if held is None or written:
            if held is None:
                dtypes = [x.dtype for x in part.rows]
                held = allocation.empty(dtypes) if filled else allocation.nothing(dtypes)
            elif any(x.dtype != y.dtype for x, y in zip(held.rows, part.rows, strict=True)):
                held, part = (Tensors([x.to(wide) for x in some.rows], some.columns) for some in (held, part))
            state.buffers[total] = held
            rows, columns = _of_heads(held, heads)
            scatter(rows, part.rows, into)
            for column, x in zip(columns, part.columns, strict=True):
                put_columns(column, x, into, scatter)
            return
        if any(x.dtype != final for x in held.rows):
            held = state.buffers[total] = Tensors([x.to(wide) for x in held.rows], held.columns)
        rows, columns = _of_heads(held, heads)
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


def _of_heads(held: Tensors, heads: slice | None) -> Tensors:
    if heads is None:
        return held
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
