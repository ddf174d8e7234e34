"""Shifting every sequence inside itself, across ranks: labels and multi-token prediction. For both packages."""

from __future__ import annotations

from typing import Any, cast

import torch

from cp_ref.common.context import ContextParallel
from cp_ref.common.derivatives import differentiable_once
from cp_ref.common.groups.collectives import all_to_all
from cp_ref.common.sharding.cut_tensors import in_format, lined_up, numbers, rows_axis
from cp_ref.common.wide_dtype import as_integers
from cp_ref.spec import Column, Cut, PairGroup, Parcel, roll_of

__all__ = ["rolled"]

Numbers = tuple[torch.Tensor, ...]


def rolled(
    x: torch.Tensor, cut: Cut, starts: Column, shifts: int, fill_value: float, cp: ContextParallel
) -> torch.Tensor:
    """This rank's slice of the shifted tensor, of which it has slice x. Collective, as its backward pass is."""
    roll = roll_of(cut, starts, shifts, cp.rank)
    sends, recvs = (tuple(numbers(rows, x.device) for rows in side) for side in (roll.sends, roll.recvs))
    flat = lined_up(x, cut).movedim(rows_axis(cut), 0)
    moved = cast(Any, _Roll).apply(flat, cp, sends, recvs, roll.most, fill_value)  # torch leaves apply untyped
    return in_format(moved.movedim(0, rows_axis(cut)), cut)


class _Roll(torch.autograd.Function):
    """Rows to the ranks that take them; backward: their gradients to the ranks that had them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cp: ContextParallel, sends: Numbers, recvs: Numbers, most: int, fill: float
    ) -> torch.Tensor:  # fmt: skip
        ctx.cp, ctx.sends, ctx.recvs, ctx.most = cp, sends, recvs, most
        with cp.alone("roll"):
            return _moved(x.detach(), cp, sends, recvs, most, fill)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with ctx.cp.alone("roll, backward"):
            grad = _moved(grads[0], ctx.cp, ctx.recvs, ctx.sends, ctx.most, 0)
        return grad, *[None] * 5


def _moved(
    x: torch.Tensor, cp: ContextParallel, sends: Numbers, recvs: Numbers, most: int, fill: float
) -> torch.Tensor:
    """Rows `sends[r]` of x go to rank r, rows `recvs[r]` of the result come from it, and all others are `fill`."""
    group, filled = cp.comm, torch.full_like(x, fill, memory_format=torch.contiguous_format)
    x, result = as_integers(x), as_integers(filled)  # the same memory
    result.index_copy_(0, recvs[cp.rank], x.index_select(0, sends[cp.rank]))
    if isinstance(group, PairGroup):  # Two hops need parts of one size.
        parts = [x.new_zeros(most, *x.shape[1:]) for _ in sends]
        for part, rows in zip(parts, sends, strict=True):
            part[: len(rows)] = x.index_select(0, rows)[:most]
        buffers = all_to_all(group, parts) if most else parts
    else:
        buffers = [x.new_empty(len(rows), *x.shape[1:]) for rows in recvs]
        group.exchange(
            [Parcel(r, 0, x.index_select(0, rows)) for r, rows in enumerate(sends) if len(rows) and r != cp.rank],
            [Parcel(r, 0, buffers[r]) for r, rows in enumerate(recvs) if len(rows) and r != cp.rank],
        ).wait()
    for r, rows in enumerate(recvs):
        if r != cp.rank:
            result.index_copy_(0, rows, buffers[r][: len(rows)])
    return filled
