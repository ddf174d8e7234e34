"""Helpers for packed sequences, declared: which tokens a rank holds, how many of them are real, and copying these."""

from __future__ import annotations

from typing import Any

import torch

from cp_ref.calls.declared import declare
from cp_ref.thd_helpers.thd_checks import (
    FLOATS,
    MOST_ROWS,
    Tensors,
    check_both,
    check_count,
    check_device,
    check_flag,
    check_lengths,
    check_tensor,
    check_written,
    device_of,
    tensors_of,
)

__all__ = [
    "check_copy",
    "check_partition",
    "check_rank_lengths",
    "check_reorder",
    "get_cu_seqlens_on_cp_rank",
    "thd_copy_valid_tokens_from_per_split_to_rank_local",
    "thd_cp_rank_order_to_sequence_order",
    "thd_get_partitioned_indices",
    "thd_sequence_order_to_cp_rank_order",
]


@declare
def thd_get_partitioned_indices(
    cu_seqlens_padded: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Return the global row of each of this rank's tokens, in the order of its slice: `x[indices]` equals `shard` for
    layout dual_chunk.

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
    """Bring rows from sequence order to the slices of all ranks in rank order (the input of an all-to-all with equal
    parts).

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
    """Bring the slices of all ranks from rank order (the result of an all-gather) to sequence order: the inverse of
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


@declare
def get_cu_seqlens_on_cp_rank(
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> torch.Tensor:
    """Count how many real tokens of each sequence a rank holds, in either or both of its chunks, as cumulative lengths.

    A sequence has n real tokens in P slots, and chunks of L = P / (2 * cp_size) slots. Chunk c has min(max(n - c * L,
    0), L) real tokens. The rank's first half is chunk c = cp_rank, its second 2 * cp_size - 1 - cp_rank.

    Args:
        cu_seqlens: GLOBAL cumulative lengths of the real tokens, int32 or int64 [b + 1].
        cu_seqlens_padded: GLOBAL cumulative lengths with padding, int32 or int64 [b + 1]; each length is a multiple of
            2 * cp_size, and not less than the real one. On one rank (cp_size 1) only halves need an even length: with
            first_half and second_half equal, any length will do.
        cp_size, cp_rank: the number of ranks, and which one.
        first_half, second_half: whether to count the rank's early chunk, and its late one.

    Returns:
        [b + 1], of cu_seqlens' dtype and device: the cumulative numbers of real tokens. Their place in the slice is
        given by cu_seqlens_padded // cp_size (of a half tensor: that // 2).

    Raises:
        ValueError, TypeError: a length does not divide, or is less than the real one (naming the sequence).

    TransformerEngine: `get_cu_seqlens_on_cp_rank`, but there the padded lengths are the rank's own (these, divided by
    cp_size). Such a call with real tokens beyond a rank's share is refused here.

    >>> five_of_eight = torch.tensor([0, 5]), torch.tensor([0, 8])           # the picture above
    >>> get_cu_seqlens_on_cp_rank(*five_of_eight, cp_size=2, cp_rank=1, first_half=True, second_half=True).tolist()
    [0, 3]
    >>> get_cu_seqlens_on_cp_rank(*five_of_eight, cp_size=2, cp_rank=1, first_half=False, second_half=True).tolist()
    [0, 1]
    """
    raise NotImplementedError


@declare
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    """Copy each sequence's valid tokens from a step's result into the rank's accumulator, in place.

    The all-gather schedule attends twice over the whole local slice, once for the early chunks and once for the late
    ones; each result is right in its own rows, and undefined elsewhere. This copies the right rows:

        slice, local            0 1 2 3 | 4 5          sequences of 4 and 2 slots, chunks of 2 and 1
        early chunks            x x . . | x .          cu_seqlens_padded [0, 4, 6]
        late chunks             . . x x | . x          cu_seqlens_padded [2, 5, 6]: each start moved by a chunk

    Args:
        out: [t, ...]. Changed in place: rows cu_seqlens_padded[s] to cu_seqlens_padded[s] + n[s] - 1 for every sequence
            s, n[s] its number of valid tokens; nothing else, not padding, not the tail.
        inp: of out's shape. Of out's dtype (any), or both are floating point, and values are converted (bfloat16
            results into a float32 accumulator).
        cu_seqlens_padded: LOCAL: where each sequence's tokens begin in out and inp, int32 or int64 [b + 1]. It may
            begin past 0.
        cu_seqlens: LOCAL: cumulative numbers of valid tokens, int32 or int64 [b + 1], from 0.

    Raises:
        ValueError, TypeError: more valid tokens than slots (naming the sequence), shapes or dtypes that do not fit, or
            out and inp that overlap in memory.

    TransformerEngine: `tex.thd_copy_valid_tokens_from_per_split_to_rank_local`.

    >>> out = torch.zeros(6, dtype=torch.int64)
    >>> thd_copy_valid_tokens_from_per_split_to_rank_local(
    ...     out, torch.tensor([10, 11, 12, 13, 20, 21]), torch.tensor([2, 5, 6]), torch.tensor([0, 2, 3])
    ... )
    >>> out.tolist()                                                        # the late chunks of the picture
    [0, 0, 12, 13, 0, 21]
    """
    raise NotImplementedError


def check_rank_lengths(
    cu_seqlens: Any, cu_seqlens_padded: Any, cp_size: Any, cp_rank: Any, first_half: Any, second_half: Any
) -> None:
    """The arguments of `get_cu_seqlens_on_cp_rank`."""
    check_count("cp_size", cp_size, 1)
    check_count("cp_rank", cp_rank, 0, below=cp_size)
    check_flag("first_half", first_half)
    check_flag("second_half", second_half)
    check_both(cu_seqlens, cu_seqlens_padded, device_of(cu_seqlens))


def check_copy(out: Any, inp: Any, cu_seqlens_padded: Any, cu_seqlens: Any) -> None:
    """The arguments of `thd_copy_valid_tokens_from_per_split_to_rank_local`."""
    check_tensor("out", out)
    check_tensor("inp", inp)
    if out.ndim == 0 or inp.shape != out.shape:
        raise ValueError(f"inp has shape {list(inp.shape)} and out {list(out.shape)}; both must be [t, ...]")
    if inp.dtype != out.dtype and not (inp.dtype in FLOATS and out.dtype in FLOATS):
        raise TypeError(
            f"inp has dtype {inp.dtype} and out {out.dtype}; they must be equal, or both among float16, bfloat16, "
            "float32, float64"
        )
    check_device(inp=inp, out=out)
    check_written("out", out)
    check_both(cu_seqlens, cu_seqlens_padded, out.device)
