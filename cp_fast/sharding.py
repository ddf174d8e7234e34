"""Cutting global tensors into the ranks' slices, and putting them together again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from cp_fast.context import ContextParallel
from cp_ref.common import slices
from cp_ref.common.collectives import all_gather, all_to_all
from cp_ref.common.devices import check_usable, read_device
from cp_ref.common.slices import as_bytes, as_was
from cp_ref.spec import check_context, gathered_spans, position_spans, ranges, slice_axis, slice_spans

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
    with cp.alone("unshard"):
        axis, spans = gathered_spans(cp, x, qkv_format, cu_seqlens_padded)
    return _Unshard.apply(x, cp, axis, [numbers(of_rank, x.device) for of_rank in spans])


class _Unshard(torch.autograd.Function):
    """Every rank's slice into its rows; backward: every rank's gradients of the own rows, added up in rank order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: ContextParallel, axis: int, rows: list[torch.Tensor]) -> torch.Tensor:
        ctx.cp, ctx.axis, ctx.rows = cp, axis, rows
        shape = list(x.shape)
        shape[axis] *= cp.size
        whole = as_bytes(x.new_empty(shape))
        with cp.alone("unshard"):
            parts = all_gather(cp.comm, as_bytes(x))
        for of_rank, part in zip(rows, parts, strict=True):
            whole.index_copy_(axis, of_rank, part)
        return as_was(whole, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parts = [grads[0].index_select(ctx.axis, rows) for rows in ctx.rows]
        with ctx.cp.alone("unshard, backward"):
            total, *others = all_to_all(ctx.cp.comm, parts)
        for other in others:
            total = total + other
        return total, None, None, None


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
    """The numbers of half-open spans, one after the other, int64; one copy to the device, however many spans.

    >>> numbers([(0, 2), (6, 8)], torch.device("cpu")).tolist()
    [0, 1, 6, 7]
    """
    edges = np.array(list(spans), dtype=np.int64).reshape(-1, 2)
    return torch.from_numpy(ranges(edges[:, 0], edges[:, 1] - edges[:, 0])).to(device)
