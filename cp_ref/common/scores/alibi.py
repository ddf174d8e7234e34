"""ALiBi: scores fall with the distance of query and key, at a slope of each head.

Press, Smith, Lewis: "Train short, test long: attention with linear biases enables input length extrapolation", ICLR
2022; with flash-attn's `alibi_slopes`, whose diagonal of distance 0 is aligned to the last query and the last key.
"""

from __future__ import annotations

import torch

__all__ = ["alibi_bias"]


def alibi_bias(
    slopes: torch.Tensor,
    document: torch.Tensor,
    head: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    shift: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The addition of ALiBi to scores: -slope * |i + shift - j|.

    Args:
        slopes: float32 [h_q], or [b, h_q] with a row for each document.
        document, head, q_idx, kv_idx: int32 or int64 tensors that broadcast against a block of scores.
        shift: len_kv - len_q of the document, in real tokens.
        dtype: of the scores.

    Returns:
        dtype, of the broadcast shape.

    >>> i, j, zero = torch.arange(2)[:, None], torch.arange(3), torch.zeros((), dtype=torch.int64)
    >>> alibi_bias(torch.tensor([0.5]), zero, zero, i, j, torch.tensor(1), torch.float32).tolist()
    [[-0.5, -0.0, -0.5], [-1.0, -0.5, -0.0]]
    """
    slope = slopes[head.long()] if slopes.dim() == 1 else slopes[document.long(), head.long()]
    return -slope.to(dtype) * (q_idx + shift - kv_idx).abs().to(dtype)
