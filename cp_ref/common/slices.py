"""`shard`, `unshard` and `position_ids`, declared; and how tensors of 8-bit floats are moved."""

from __future__ import annotations

import torch

from cp_ref.common.context import ContextParallel
from cp_ref.common.declared import declare

__all__ = ["as_bytes", "as_was", "position_ids", "shard", "unshard"]


@declare
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

    >>> from cp_ref import SimGroup
    >>> ids = torch.arange(8)[None]                                                # b 1, s 8: chunks 01 23 45 67
    >>> SimGroup(2).run(lambda member: shard(ids, cp=ContextParallel(member)).tolist())
    [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    """
    raise NotImplementedError


@declare
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
    raise NotImplementedError


@declare
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

    >>> from cp_ref import SimGroup
    >>> SimGroup(2).run(lambda member: position_ids(cp=ContextParallel(member), seqlen=8).tolist())
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    raise NotImplementedError


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes, others as they are: not every operator that moves rows knows them."""
    return x.detach().view(torch.uint8) if x.dtype.is_floating_point and x.element_size() == 1 else x


def as_was(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of `as_bytes` as the dtype that they were."""
    return x if x.dtype == dtype else x.view(dtype)
