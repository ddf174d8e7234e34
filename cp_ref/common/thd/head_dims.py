"""Head dims for kernels that need d_qk == d_v (multi-head latent attention has 192 and 128).

    V, d_v 2, for d_qk 3       kernel's output           trimmed
    | 1 2 |      | 1 2 0 |     | a b 0 |                 | a b |
    | 3 4 |  ->  | 3 4 0 |  -> | c d 0 |             ->  | c d |

Columns of the output depend on the same columns of V alone, so the added ones give zeros, and scores, LSE and the other
columns do not change. The gradient of added columns is dropped, and that of trimmed columns is zero.
"""

from __future__ import annotations

import torch

from cp_ref.common.thd.checks import check_count, check_tensor

__all__ = ["pad_v", "trim_out"]


def pad_v(v: torch.Tensor, d_qk: int) -> torch.Tensor:
    """V with zeros appended on its last axis, as wide as Q and K.

    Args:
        v: [..., d_v], any dtype and format.
        d_qk: the head dim of Q and K, at least d_v. (Where d_v is larger, it is Q and K that need padding.)

    Returns:
        [..., d_qk]; v itself where nothing is missing. Differentiable.

    Raises:
        ValueError, TypeError: d_qk is less than d_v, or no integer.

    TransformerEngine: what `DotProductAttention` does for FlashAttention 2 with d_qk != d_v.

    >>> pad_v(torch.tensor([[1, 2], [3, 4]]), d_qk=3).tolist()
    [[1, 2, 0], [3, 4, 0]]
    """
    d_v = _last_size("v", v)
    check_count("d_qk", d_qk, 1)
    if d_qk < d_v:
        raise ValueError(f"d_qk is {d_qk} and v has head dim {d_v}; d_qk must not be less")
    return v if d_qk == d_v else torch.cat([v, v.new_zeros(*v.shape[:-1], d_qk - d_v)], dim=-1)


def trim_out(out: torch.Tensor, d_v: int) -> torch.Tensor:
    """The output without the columns that `pad_v` added.

    Args:
        out: [..., d_qk], any dtype and format.
        d_v: V's own head dim, at most d_qk.

    Returns:
        [..., d_v], a view. Differentiable.

    Raises:
        ValueError, TypeError: d_v is more than out has, or no integer.

    TransformerEngine: what `DotProductAttention` does for FlashAttention 2 with d_qk != d_v.

    >>> trim_out(torch.tensor([[1, 2, 0], [3, 4, 0]]), d_v=2).tolist()
    [[1, 2], [3, 4]]
    """
    size = _last_size("out", out)
    check_count("d_v", d_v, 1)
    if d_v > size:
        raise ValueError(f"d_v is {d_v} and out has head dim {size}; d_v must not be more")
    return out[..., :d_v]


def _last_size(name: str, x: torch.Tensor) -> int:
    check_tensor(name, x)
    if x.ndim == 0:
        raise ValueError(f"{name} has shape []; it must be [..., d]")
    return x.shape[-1]
