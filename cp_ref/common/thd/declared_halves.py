"""Reading one half of every sequence of a rank's slice.

In layout dual_chunk a rank holds two chunks of every sequence, an early and a late one. Under a causal mask, in a ring
step, the queries see all of an earlier rank's early chunk and nothing of its late one. A later rank's keys are seen by
the late chunk of queries alone, which sees them all. So a ring works on halves:

    diagonal        all rows      x  all keys          own keys, causal
    lower tile      all rows      x  first halves      keys of an earlier rank, no mask
    upper tile      second halves x  all keys          keys of a later rank, no mask

LOCAL lengths: cu_seqlens_padded here are those of the rank's slice, the global ones divided by cp_size.

    x, cu_seqlens_padded = [0, 4, 6]      a b A B | c C          t = 6
    half 0                                a b | c                t / 2 = 3, cumulative lengths [0, 2, 3]
    half 1                                A B | C
"""

from __future__ import annotations

from typing import Any

import torch

from cp_ref.common.declared import declare
from cp_ref.common.thd.checks import MOST_ROWS, check_count, check_lengths, check_lse, device_of, half_of, token_axis
from cp_ref.common.thd.tuples import Tensors, tensors_of

__all__ = ["check_read_half", "check_read_second_half_lse", "thd_read_half_tensor", "thd_read_second_half_lse"]


@declare
def thd_read_half_tensor(x: Tensors, cu_seqlens_padded: torch.Tensor, half: int) -> Tensors:
    """The first or the second half of every sequence.

    Args:
        x: [t], [t, d] or [t, h, d], or [2, t, h, d] (K and V in one tensor); any dtype. t is even. Or a
            tuple of such tensors (K and V) with the same t, which `cp_fast` reads in one launch.
        cu_seqlens_padded: LOCAL cumulative lengths with padding (of x itself), int32 or int64 [b + 1]; every length is
            even.
        half: 0 for the first half, 1 for the second.

    Returns:
        A new tensor (a tuple for a tuple) with t / 2 tokens: a half of each sequence, in order, then the same half of
        the tail. Its cumulative lengths are cu_seqlens_padded // 2. Differentiable.

    Raises:
        ValueError, TypeError: an odd length (naming the sequence), an odd t, another half, fewer tokens than lengths.

    TransformerEngine: `tex.thd_read_half_tensor`.

    >>> x = torch.tensor([10, 11, 12, 13, 20, 21])
    >>> thd_read_half_tensor(x, torch.tensor([0, 4, 6]), half=0).tolist()
    [10, 11, 20]
    >>> thd_read_half_tensor(x, torch.tensor([0, 4, 6]), half=1).tolist()
    [12, 13, 21]
    """
    raise NotImplementedError


@declare
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool, max_seqlen: int
) -> torch.Tensor:
    """The LSE of the second half of every sequence, which the backward pass of an upper tile needs.

    Args:
        lse: float32 or float64, [h, t] if lse_packed, else [b, h, s].
        cu_seqlens_padded: LOCAL cumulative lengths with padding (of whole sequences, not of the halves), int32 or int64
            [b + 1]; every length is even.
        lse_packed: which of the two shapes lse has.
        max_seqlen: the size of the result's last axis: the sum of all half lengths (packed) or the longest half
            (padded), or more.

    Returns:
        [h, max_seqlen] or [b, h, max_seqlen], of lse's dtype; 0 where there is no token.

    Raises:
        ValueError, TypeError: an odd length (naming the sequence), another shape or dtype, a max_seqlen too small.

    TransformerEngine: `tex.thd_read_second_half_lse`.

    >>> packed = torch.tensor([[10.0, 11.0, 12.0, 13.0, 20.0, 21.0]])
    >>> thd_read_second_half_lse(packed, torch.tensor([0, 4, 6]), True, 3).tolist()
    [[12.0, 13.0, 21.0]]
    >>> padded = torch.tensor([[[10.0, 11.0, 12.0, 13.0]], [[20.0, 21.0, 0.0, 0.0]]])
    >>> thd_read_second_half_lse(padded, torch.tensor([0, 4, 6]), False, 2).tolist()
    [[[12.0, 13.0]], [[21.0, 0.0]]]
    """
    raise NotImplementedError


def check_read_half(x: Any, cu_seqlens_padded: Any, half: Any) -> list[torch.Tensor]:
    """The arguments of `thd_read_half_tensor` -> the tensors of x."""
    xs = tensors_of(x, kv_axis=True)
    for one in xs:
        half_of("x", one, token_axis("x", one))
    check_count("half", half, 0, below=2)
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, xs[0].device)
    return xs


def check_read_second_half_lse(lse: Any, cu_seqlens_padded: Any, lse_packed: Any, max_seqlen: Any) -> None:
    """The arguments of `thd_read_second_half_lse`."""
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, device_of(lse))
    check_lse("lse", lse, len(cu_seqlens_padded) - 1, None, None, lse_packed)
    check_count("max_seqlen", max_seqlen, 0, at_most=MOST_ROWS)
