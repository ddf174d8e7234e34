"""Two rules of both packages: the dtype of sums and of log-sum-exps, and that in which rows move."""

from __future__ import annotations

import torch

__all__ = ["as_integers", "taken", "wide_dtype"]

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of these dtypes are added up: float64 if one of them is, else float32.

    >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float32, torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if torch.float64 in dtypes else torch.float32


def as_integers(x: torch.Tensor) -> torch.Tensor:
    """The same memory. 8-bit floats and large unsigned integers become integers of the same size, which every operator
    that moves rows supports; others are unchanged.

    >>> as_integers(torch.tensor([1, 65535], dtype=torch.uint16))
    tensor([ 1, -1], dtype=torch.int16)
    """
    if x.dtype.is_floating_point and x.element_size() == 1:
        return x.detach().view(torch.uint8)
    return x.view(_SIGNED[x.dtype]) if x.dtype in _SIGNED else x


def taken(x: torch.Tensor, axis: int, rows: torch.Tensor) -> torch.Tensor:
    """`x.index_select(axis, rows)`, for any dtype. Differentiable."""
    found = (x if x.requires_grad else as_integers(x)).index_select(axis, rows)
    return found if found.dtype == x.dtype else found.view(x.dtype)
