"""Head dims that a kernel lacks run with the next larger one: zero columns change no score and no product.

With zero columns in q and k every score stays what it was; with zero columns in v, out and dout the result's further
columns are zero and delta = sum(dout * out) stays. The columns of x stay exact, at the cost of a copy and of the wider
products.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

__all__ = ["copied_if_unaligned", "round_up", "trim", "widen"]


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is n or more.

    >>> round_up(75, 8), round_up(80, 8)
    (80, 80)
    """
    return -(-n // multiple) * multiple


def widen(x: torch.Tensor, d: int) -> torch.Tensor:
    """Widen x [rows, heads, up to d] with zero columns up to d."""
    return x if x.shape[2] == d else pad(x, (0, d - x.shape[2]))


def trim(x: torch.Tensor, d: int) -> torch.Tensor:
    """Trim x [rows, heads, d or more] to its first d columns, contiguous."""
    return x if x.shape[2] == d and x.is_contiguous() else x[..., :d].contiguous()


def copied_if_unaligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if its rows are not 16-byte aligned: kernels load 16 bytes at a time."""
    elements = 16 // x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % elements == 0 for s in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)
