"""Between the user's tensor formats and packed rows [t, h, d], sequence after sequence.

    bshd [b, s, h, d]   rows of sequence 0, then of sequence 1, ...: a reshape
    sbhd [s, b, h, d]   the same after exchanging the first two axes
    thd  [t, h, d]      packed already

The LSE of packed rows is [t, h]; users get [b, h, s] for bshd and sbhd, [h, t] for thd.
"""

from __future__ import annotations

import torch

__all__ = ["lse_from_packed", "lse_to_packed", "to_format", "to_packed"]


def to_packed(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """x in `qkv_format` -> [t, h, d]."""
    if qkv_format == "thd":
        return x
    if qkv_format == "sbhd":
        x = x.transpose(0, 1)
    return x.reshape(-1, *x.shape[2:])


def to_format(x: torch.Tensor, qkv_format: str, batch_size: int) -> torch.Tensor:
    """[t, h, d] -> `qkv_format`: the inverse of `to_packed`."""
    if qkv_format == "thd":
        return x
    x = x.reshape(batch_size, -1, *x.shape[1:])
    return x.transpose(0, 1).contiguous() if qkv_format == "sbhd" else x


def lse_from_packed(lse: torch.Tensor, qkv_format: str, batch_size: int) -> torch.Tensor:
    """[t, h] -> [h, t] for thd, [b, h, s] for bshd and sbhd."""
    if qkv_format == "thd":
        return lse.t().contiguous()
    return lse.reshape(batch_size, -1, lse.shape[1]).transpose(1, 2).contiguous()


def lse_to_packed(lse: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """The inverse of `lse_from_packed`."""
    if qkv_format == "thd":
        return lse.t()
    return lse.transpose(1, 2).reshape(-1, lse.shape[1])
