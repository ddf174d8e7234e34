"""Dtypes by name, and the wider ones that sums and LSEs have."""

from __future__ import annotations

import torch

__all__ = ["dtype_of", "wide_dtype"]


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of this name."""
    return getattr(torch, name)


def wide_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of sums and LSEs: float64 for float64, and float32 for all others."""
    return torch.float64 if dtype in ("float64", torch.float64) else torch.float32
