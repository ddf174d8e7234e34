"""The tokens of each rank (layout dual_chunk), and the two orders that a whole packed buffer can have.

cp_size 2, cu_seqlens_padded = [0, 8, 12], 14 rows: each sequence is cut into 2 * cp_size equal chunks. Rank r holds
chunk r and chunk 2 * cp_size - 1 - r of every sequence, then the r-th part of the tail.

    sequence order    0 1 | 2 3 | 4 5 | 6 7 || 8 | 9 | 10 | 11 || 12 | 13
    owner              0     1     1     0     0   1    1    0     0    1

    CP rank order     0 1   6 7   8   11  12   |   2 3   4 5   9   10   13
                      the slice of rank 0      |   the slice of rank 1
"""

from __future__ import annotations

from typing import Any

import torch

from cp_ref.common.declared import declare
from cp_ref.common.thd.checks import MOST_ROWS, check_count, check_lengths, device_of
from cp_ref.common.thd.tuples import Tensors, tensors_of

__all__ = [
    "check_partition",
    "check_reorder",
    "thd_cp_rank_order_to_sequence_order",
    "thd_get_partitioned_indices",
    "thd_sequence_order_to_cp_rank_order",
]


@declare
def thd_get_partitioned_indices(
    cu_seqlens_padded: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """The global row of each of this rank's tokens, in the order of its slice: `x[indices]` equals `shard` for layout
    dual_chunk.

    Args:
        cu_seqlens_padded: GLOBAL cumulative lengths with padding, int32 or int64 [b + 1]. Each length is a multiple of
            2 * cp_size; it may be 0. One rank (cp_size 1) holds sequences of any length.
        total_tokens: rows of the global buffer, its tail behind cu_seqlens_padded[-1] included. The tail's length is a
            multiple of cp_size.
        cp_size, cp_rank: the number of ranks, and which one.

    Returns:
        [total_tokens / cp_size] on the device and in the dtype of cu_seqlens_padded: the rank's tokens, sequence after
        sequence, and then its part of the tail.

    Raises:
        ValueError, TypeError: a length does not divide (naming the sequence, its length and the divisor), or an
            argument is out of its range.

    TransformerEngine: `tex.thd_get_partitioned_indices`, without a tail.

    >>> cu_seqlens_padded = torch.tensor([0, 8, 12])       # chunks 01 23 45 67 and 8 9 10 11; the tail is 12 13
    >>> thd_get_partitioned_indices(cu_seqlens_padded, 14, cp_size=2, cp_rank=0).tolist()
    [0, 1, 6, 7, 8, 11, 12]
    >>> thd_get_partitioned_indices(cu_seqlens_padded, 14, cp_size=2, cp_rank=1).tolist()
    [2, 3, 4, 5, 9, 10, 13]
    """
    raise NotImplementedError


@declare
def thd_sequence_order_to_cp_rank_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    """From sequence order to the slices of all ranks in rank order (the input of an all-to-all with equal parts).

    Args:
        x: [t, ...], any dtype: the global buffer, which may have a tail. Or a tuple of such tensors (K and V) with
            the same t, which `cp_fast` moves in one launch.
        cu_seqlens_padded: GLOBAL cumulative lengths with padding, int32 or int64 [b + 1]; see
            `thd_get_partitioned_indices`.
        cp_size: the number of ranks.

    Returns:
        A new tensor of x's shape (a tuple for a tuple): `torch.cat` of `shard(x)` over all ranks. So a rank's
        part of the tail lies after its own tokens, not at the end of the buffer. Differentiable.

    Raises:
        ValueError, TypeError: as `thd_get_partitioned_indices`.

    TransformerEngine: `tex.thd_sequence_order_to_cp_rank_order`, without a tail.

    >>> x = torch.tensor([10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23])
    >>> thd_sequence_order_to_cp_rank_order(x, torch.tensor([0, 8, 12]), cp_size=2).tolist()
    [10, 11, 16, 17, 20, 23, 12, 13, 14, 15, 21, 22]
    """
    raise NotImplementedError


@declare
def thd_cp_rank_order_to_sequence_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    """From the slices of all ranks in rank order (the result of an all-gather) to sequence order: the inverse of
    `thd_sequence_order_to_cp_rank_order`.

    Args:
        x: [t, ...], any dtype: the ranks' slices, each with its part of the tail. Or a tuple of such tensors (K and V)
            with the same t, which `cp_fast` moves in one launch.
        cu_seqlens_padded: GLOBAL cumulative lengths with padding, int32 or int64 [b + 1]; see
            `thd_get_partitioned_indices`.
        cp_size: the number of ranks.

    Returns:
        A new tensor of x's shape (a tuple for a tuple), the tail at its end. Differentiable.

    Raises:
        ValueError, TypeError: as `thd_get_partitioned_indices`.

    TransformerEngine: `tex.thd_cp_rank_order_to_sequence_order`, without a tail.

    >>> x = torch.tensor([10, 11, 16, 17, 20, 23, 12, 13, 14, 15, 21, 22])
    >>> thd_cp_rank_order_to_sequence_order(x, torch.tensor([0, 8, 12]), cp_size=2).tolist()
    [10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23]
    """
    raise NotImplementedError


def check_partition(cu_seqlens_padded: Any, total_tokens: Any, cp_size: Any, cp_rank: Any) -> None:
    """The arguments of `thd_get_partitioned_indices`."""
    check_count("cp_size", cp_size, 1)
    check_count("cp_rank", cp_rank, 0, below=cp_size)
    check_count("total_tokens", total_tokens, 0, at_most=MOST_ROWS)
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, device_of(cu_seqlens_padded))
    if total_tokens > torch.iinfo(cu_seqlens_padded.dtype).max:
        raise ValueError(f"total_tokens is {total_tokens}; {cu_seqlens_padded.dtype} lengths cannot count so many")


def check_reorder(x: Any, cu_seqlens_padded: Any, cp_size: Any) -> list[torch.Tensor]:
    """The arguments of the two reorders -> the tensors of x."""
    xs = tensors_of(x)
    check_count("cp_size", cp_size, 1)
    if xs[0].ndim == 0:
        raise ValueError("x has shape []; it must be [t, ...]")
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, xs[0].device)
    return xs
