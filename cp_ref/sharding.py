"""Cutting global tensors into the ranks' slices, and putting them together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from cp_ref.collectives import all_gather, all_to_all
from cp_ref.context import ContextParallel
from cp_ref.formats import sequence_axis
from cp_ref.spec import Fragment, check_choice, ownership
from cp_ref.spec.arguments import read_lengths
from cp_ref.spec.problem import QKV_FORMATS

__all__ = ["position_ids", "position_table", "shard", "unshard"]


def shard(
    x: torch.Tensor, *, cp: ContextParallel, qkv_format: str = "bshd", cu_seqlens_padded: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's slice of a global tensor that every rank has whole.

    Args:
        x: any tensor with the format's sequence axis: token ids [b, s] (bshd), activations [s, b, d] (sbhd), packed [t, ...] (thd).
        cu_seqlens_padded: thd only, int32 or int64 [b + 1]. Tokens behind the last of them are the tail: each rank gets an equal
            part of it, after its own tokens.

    Returns:
        The slice, contiguous. Differentiable: the gradient of x is the slice's, in its place, and zero elsewhere.

    Raises:
        ValueError: a length does not divide; it names the sequence, its length and the divisor.

    >>> from cp_ref import SimGroup
    >>> ids = torch.arange(8)[None]                                                # b 1, s 8: chunks 01 23 45 67
    >>> SimGroup(2).run(lambda member: shard(ids, cp=ContextParallel(member)).tolist())
    [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    """
    axis = _axis(x, qkv_format)
    rows = _global_rows(cp, cp.rank, x.shape[axis], qkv_format, cu_seqlens_padded)
    return x.index_select(axis, rows.to(x.device))


def unshard(
    x: torch.Tensor, *, cp: ContextParallel, qkv_format: str = "bshd", cu_seqlens_padded: torch.Tensor | None = None
) -> torch.Tensor:
    """The global tensor, on every rank, from every rank's slice: the inverse of `shard`. Collective.

    Differentiable, and so is collective in the backward pass too: the gradient of a slice is the sum over all ranks of the gradients
    of its place, as every rank's global tensor depends on it.

    >>> from cp_ref import SimGroup
    >>> ids = torch.arange(8)
    >>> cu = torch.tensor([0, 8])
    >>> def there_and_back(member):
    ...     cp = ContextParallel(member, layout="contiguous")
    ...     mine = shard(ids, cp=cp, qkv_format="thd", cu_seqlens_padded=cu)
    ...     return unshard(mine, cp=cp, qkv_format="thd", cu_seqlens_padded=cu).tolist()
    >>> SimGroup(2).run(there_and_back)
    [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]
    """
    axis = _axis(x, qkv_format)
    shapes = cp.comm.all_gather_object((tuple(x.shape), str(x.dtype)))
    for rank, shape in enumerate(shapes):
        if shape != shapes[cp.rank]:
            raise ValueError(f"x is {shapes[cp.rank]} on rank {cp.rank} and {shape} on rank {rank}; slices must be alike")
    size = x.shape[axis] * cp.size
    rows = [_global_rows(cp, rank, size, qkv_format, cu_seqlens_padded).to(x.device) for rank in range(cp.size)]
    return _Unshard.apply(x, cp, axis, rows)


class _Unshard(torch.autograd.Function):
    """Gather slices into their rows; backward: hand every rank the gradients of its rows, and add up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: ContextParallel, axis: int, rows: list[torch.Tensor]) -> torch.Tensor:
        ctx.cp, ctx.axis, ctx.rows = cp, axis, rows
        slices = all_gather(cp.comm, x)
        shape = list(x.shape)
        shape[axis] *= cp.size
        return x.new_empty(shape).index_copy_(axis, torch.cat(rows), torch.cat(slices, dim=axis))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parts = [grads[0].index_select(ctx.axis, rows) for rows in ctx.rows]
        return torch.stack(all_to_all(ctx.cp.comm, parts, parts)).sum(dim=0), None, None, None


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
        seqlen: bshd and sbhd only: the global sequence length.
        cu_seqlens_padded: thd only: int32 or int64 [b + 1].

    Returns:
        int64 [s/cp], or [t/cp] for thd (no tail).

    >>> from cp_ref import SimGroup
    >>> SimGroup(2).run(lambda member: position_ids(cp=ContextParallel(member), seqlen=8).tolist())
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    if qkv_format != "thd":
        if not isinstance(seqlen, int) or seqlen < 0:
            raise ValueError(f"seqlen is {seqlen!r}; qkv_format {qkv_format!r} needs the global sequence length")
        if cu_seqlens_padded is not None:
            raise ValueError(f"cu_seqlens_padded is given, but qkv_format is {qkv_format!r}; it belongs to 'thd'")
        slots = [seqlen]
    else:
        if seqlen is not None:
            raise ValueError(f"seqlen is {seqlen!r}, but qkv_format 'thd' takes its lengths from cu_seqlens_padded")
        slots = _thd_slots(cu_seqlens_padded)
    fragments = ownership(slots, cp.layout, qkv_format != "thd", cp.size, cp.rank)
    return position_table(fragments, torch.device("cpu" if device is None else device))


def position_table(fragments: Sequence[Fragment], device: torch.device) -> torch.Tensor:
    """The fragments' positions one after the other, int64."""
    parts = [torch.arange(f.start, f.stop, device=device) for f in fragments]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *parts])


def _axis(x: torch.Tensor, qkv_format: str) -> int:
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    axis = sequence_axis(qkv_format)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; it must be a tensor")
    if x.dim() <= axis:
        raise ValueError(f"x has shape {list(x.shape)}; qkv_format {qkv_format!r} has its sequence on axis {axis}")
    return axis


def _thd_slots(cu_seqlens_padded: torch.Tensor | None) -> list[int]:
    cumulative = read_lengths("cu_seqlens_padded", cu_seqlens_padded)
    if cumulative is None:
        raise ValueError("cu_seqlens_padded is None; qkv_format 'thd' needs it")
    return [b - a for a, b in zip(cumulative, cumulative[1:], strict=False)]


def _global_rows(
    cp: ContextParallel, rank: int, size: int, qkv_format: str, cu_seqlens_padded: torch.Tensor | None
) -> torch.Tensor:
    """Which rows of the global sequence axis (of `size`) a rank's slice has, in order; int64."""
    if qkv_format != "thd":
        if cu_seqlens_padded is not None:
            raise ValueError(f"cu_seqlens_padded is given, but qkv_format is {qkv_format!r}; it belongs to 'thd'")
        return position_table(ownership([size], cp.layout, True, cp.size, rank), torch.device("cpu"))
    slots = _thd_slots(cu_seqlens_padded)
    total = sum(slots)
    tail, rest = divmod(size - total, cp.size)
    if size < total or rest:
        raise ValueError(
            f"x has {size} tokens, cu_seqlens_padded ends at {total}: the tail of {size - total} must be a non-negative multiple "
            f"of cp_size = {cp.size}"
        )
    starts = [sum(slots[:n]) for n in range(len(slots))]
    parts = [
        torch.arange(starts[f.seq] + f.start, starts[f.seq] + f.stop)
        for f in ownership(slots, cp.layout, False, cp.size, rank)
    ]
    return torch.cat([*parts, torch.arange(total + rank * tail, total + (rank + 1) * tail)])
