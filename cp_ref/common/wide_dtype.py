"""The dtype of sums and of log-sum-exps: the one rule of both packages."""

from __future__ import annotations

import torch

__all__ = ["wide_dtype"]


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of these dtypes are added up: float64 if one of them is, else float32.

    >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float32, torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if torch.float64 in dtypes else torch.float32
