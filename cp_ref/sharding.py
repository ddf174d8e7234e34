"""Cutting global tensors into the ranks' slices, and putting them together again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from cp_ref.common import slices
from cp_ref.common.collectives import all_gather, all_reduce_sum
from cp_ref.common.devices import check_usable, read_device
from cp_ref.common.processes import during
from cp_ref.common.slices import as_bytes, as_was
from cp_ref.context import ContextParallel
from cp_ref.spec import check_context, gathered_spans, position_spans, slice_axis, slice_spans

__all__ = ["numbers", "position_ids", "shard", "unshard"]


@slices.shard
def shard(
    x: torch.Tensor, *, cp: ContextParallel, qkv_format: str, cu_seqlens_padded: torch.Tensor | None
) -> torch.Tensor:
    check_context(cp, ContextParallel)
    axis = slice_axis(x, qkv_format)
    rows = slice_spans(cp.layout, cp.size, cp.rank, x.shape[axis], qkv_format, cu_seqlens_padded)
    return x.index_select(axis, numbers(rows, x.device))


@slices.unshard
def unshard(
    x: torch.Tensor, *, cp: ContextParallel, qkv_format: str, cu_seqlens_padded: torch.Tensor | None
) -> torch.Tensor:
    check_context(cp, ContextParallel)
    axis, spans = gathered_spans(cp, x, qkv_format, cu_seqlens_padded)
    rows = [numbers(of_rank, x.device) for of_rank in spans]
    return cast(Any, _Unshard).apply(x, cp, axis, rows)  # torch leaves apply untyped


class _Unshard(torch.autograd.Function):
    """Gather slices into their rows; backward: add up all ranks' gradients, and take the own rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: ContextParallel, axis: int, rows: list[torch.Tensor]) -> torch.Tensor:
        ctx.cp, ctx.axis, ctx.rows = cp, axis, rows
        with during("unshard"):
            slices = all_gather(cp.comm, as_bytes(x))
        shape = list(x.shape)
        shape[axis] *= cp.size
        whole = slices[0].new_empty(shape)
        return as_was(whole.index_copy_(axis, torch.cat(rows), torch.cat(slices, dim=axis)), x.dtype)

    @staticmethod
    @once_differentiable  # which makes ctx positional-only
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with during("unshard, backward"):
            total = all_reduce_sum(ctx.cp.comm, grads[0])
        return total.index_select(ctx.axis, ctx.rows[ctx.cp.rank]), None, None, None


@slices.position_ids
def position_ids(
    *,
    cp: ContextParallel,
    qkv_format: str,
    seqlen: int | None,
    cu_seqlens_padded: torch.Tensor | None,
    device: torch.device | str | None,
) -> torch.Tensor:
    check_context(cp, ContextParallel)
    where = read_device("cpu" if device is None else device)
    check_usable(where)
    return numbers(position_spans(cp.layout, cp.size, cp.rank, qkv_format, seqlen, cu_seqlens_padded), where)


def numbers(spans: Iterable[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """The numbers of half-open spans, one after the other, int64.

    >>> numbers([(0, 2), (6, 8)], torch.device("cpu")).tolist()
    [0, 1, 6, 7]
    """
    parts = [torch.arange(start, stop, device=device) for start, stop in spans]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *parts])
