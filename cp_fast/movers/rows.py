"""Rows of a packed buffer: a slice if they are contiguous (no copy), else an index on the device."""

from __future__ import annotations

import torch

__all__ = ["Rows", "take"]

Rows = slice | torch.Tensor


def take(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """x's rows: a view for a slice, a copy for an index."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
