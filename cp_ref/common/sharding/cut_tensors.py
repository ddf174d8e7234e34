"""Global tensors and slices: how both packages cut a tensor, and put slices together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from cp_ref.common.context import ContextParallel
from cp_ref.common.derivatives import differentiable_once
from cp_ref.common.groups.collectives import all_gather, all_to_all
from cp_ref.common.named_device import check_usable, read_device
from cp_ref.common.wide_dtype import as_integers, taken
from cp_ref.spec import Column, Cut, read_positions

__all__ = ["gathered", "in_format", "lined_up", "numbers", "positions_on", "rows_axis", "slice_of"]


def numbers(values: Column, device: torch.device) -> torch.Tensor:
    """A column of integers on a device, int64."""
    return torch.as_tensor(values, dtype=torch.int64, device="cpu").to(device)


def slice_of(x: torch.Tensor, cut: Cut, rank: int, fill_value: float = 0) -> torch.Tensor:
    """One rank's slice of a global tensor. Differentiable."""
    axis, rows = rows_axis(cut), lined_up(x, cut)
    if (missing := cut.cp_size * cut.rows * (cut.batch or 1) - rows.shape[axis]) > 0:
        shape = list(rows.shape)
        shape[axis] = missing
        rows = torch.cat([rows, rows.new_full(shape, fill_value) if fill_value else rows.new_zeros(shape)], axis)
    return in_format(taken(rows, axis, numbers(cut.of(rank), x.device)), cut)


def gathered(x: torch.Tensor, cut: Cut, cp: ContextParallel) -> torch.Tensor:
    """The global tensor of which this rank has slice x. Collective, as its backward pass is."""
    rows = lined_up(x, cut)
    index = [numbers(cut.of(rank), x.device) for rank in range(cp.size)]
    whole = cast(Any, _Gather).apply(rows, cp, rows_axis(cut), index)  # torch leaves apply untyped
    return in_format(whole.narrow(rows_axis(cut), 0, cut.size * (cut.batch or 1)), cut)


def positions_on(device: torch.device | str | None, cp: ContextParallel, plan: Any, *lengths: Any) -> torch.Tensor:
    """The result of `position_ids`; lengths: its arguments for `read_positions`."""
    positions = read_positions(cp, plan, *lengths)
    where = read_device(("cpu" if plan is None else plan.device) if device is None else device)
    check_usable(where)
    return numbers(positions, where)


class _Gather(torch.autograd.Function):
    """Every rank's slice into its rows; backward: all ranks' gradients of this rank's rows, added up in rank order."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cp: ContextParallel, axis: int, index: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        ctx.cp, ctx.axis, ctx.index = cp, axis, index
        shape = list(x.shape)
        shape[axis] *= cp.size
        whole = as_integers(x.new_empty(shape))
        with cp.alone("unshard"):
            parts = all_gather(cp.comm, as_integers(x))
        for rows, part in zip(index, parts, strict=True):
            whole.index_copy_(axis, rows, part)
        return whole if whole.dtype == x.dtype else whole.view(x.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parts = [grads[0].index_select(ctx.axis, rows) for rows in ctx.index]
        with ctx.cp.alone("unshard, backward"):
            total, *others = all_to_all(ctx.cp.comm, parts)
        for other in others:
            total = total + other
        return total, None, None, None


def rows_axis(cut: Cut) -> int:
    """The axis of a lined-up tensor that has its rows."""
    return 1 if cut.batch is None and cut.qkv_format == "bshd" else 0


def lined_up(x: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The tensor with all rows that are cut as one on one axis."""
    if cut.batch is None:
        return x
    return (x if cut.qkv_format == "bshd" else x.transpose(0, 1)).flatten(0, 1)


def in_format(rows: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The inverse of `lined_up`, contiguous."""
    if cut.batch is None:
        return rows.contiguous()
    x = rows.reshape(cut.batch, len(rows) // max(cut.batch, 1), *rows.shape[1:])
    return (x if cut.qkv_format == "bshd" else x.transpose(0, 1)).contiguous()
