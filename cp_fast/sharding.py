"""Cutting global tensors into the ranks' slices, and putting them together again. `cp_ref.sharding` has the worked
examples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from cp_fast.comm import all_to_all
from cp_fast.context import ContextParallel
from cp_fast.devices import check_usable, read_device
from cp_fast.planning.columns import spread
from cp_ref.spec import check_context, gathered_spans, position_spans, slice_axis, slice_spans

__all__ = ["numbers", "position_ids", "shard", "unshard"]


def shard(
    x: torch.Tensor, *, cp: ContextParallel, qkv_format: str = "bshd", cu_seqlens_padded: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's slice of a global tensor that every rank has whole.

    Args:
        x: any tensor with the format's sequence axis: token ids [b, s] (bshd), activations [s, b, d] (sbhd), packed [t,
            ...] (thd).
        cp, qkv_format: as in `attention`.
        cu_seqlens_padded: thd only, GLOBAL, int32 or int64 [b + 1]. Tokens behind the last of them are the tail: each
            rank gets an equal part of it, after its own tokens.

    Returns:
        The slice, contiguous. Differentiable: the gradient of x is the slice's, in its place, and zero elsewhere.

    Raises:
        ValueError: a length does not divide; it names the sequence, its length and the divisor.
    """
    check_context(cp, ContextParallel)
    axis = slice_axis(x, qkv_format)
    rows = slice_spans(cp.layout, cp.size, cp.rank, x.shape[axis], qkv_format, cu_seqlens_padded)
    return x.index_select(axis, numbers(rows, x.device))


def unshard(
    x: torch.Tensor, *, cp: ContextParallel, qkv_format: str = "bshd", cu_seqlens_padded: torch.Tensor | None = None
) -> torch.Tensor:
    """The global tensor, on every rank, from every rank's slice: the inverse of `shard`. Collective.

    Differentiable, and so collective in the backward pass too: the gradient of a slice is the sum over all ranks of the
    gradients of its place, as every rank's global tensor depends on it. So where every rank takes the same loss of it,
    gradients are cp_size times those of that loss.

    Args:
        x: this rank's slice, as `shard` gives it; alike on all ranks.
        cp, qkv_format, cu_seqlens_padded: as in `shard`.

    Raises:
        ValueError: the ranks' slices differ in shape or dtype (on every rank), or as `shard`.
    """
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
        whole = _as_bytes(x.new_empty(shape))
        with cp.alone("unshard"):
            parts = all_to_all(cp.comm, [_as_bytes(x)] * cp.size)
        for of_rank, part in zip(rows, parts, strict=True):
            whole.index_copy_(axis, of_rank, part)
        return _as_was(whole, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parts = [grads[0].index_select(ctx.axis, rows) for rows in ctx.rows]
        with ctx.cp.alone("unshard, backward"):
            total, *others = all_to_all(ctx.cp.comm, parts)
        for other in others:
            total = total + other
        return total, None, None, None


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes, others as they are: not every operator that moves rows knows them."""
    return x.detach().view(torch.uint8) if x.dtype.is_floating_point and x.element_size() == 1 else x


def _as_was(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.view(dtype)


def position_ids(
    *,
    cp: ContextParallel,
    qkv_format: str = "bshd",
    seqlen: int | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """This rank's positions inside each sequence, for RoPE.

    Args:
        cp, qkv_format: as in `attention`.
        seqlen: bshd and sbhd only: the global sequence length.
        cu_seqlens_padded: thd only: GLOBAL, int32 or int64 [b + 1].
        device: where the positions are made; the CPU by default.

    Returns:
        int64 [s/cp], or [t/cp] for thd (no tail).

    Raises:
        ValueError, TypeError: the lengths are missing, do not divide or do not belong to the format.
    """
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
    return torch.from_numpy(spread(edges[:, 0], edges[:, 1] - edges[:, 0])).to(device)
