"""Rows of a packed buffer: a slice where they are contiguous (no copy), an index on the device where they are not."""

from __future__ import annotations

from typing import TypeGuard

import torch

__all__ = ["Rows", "is_mask", "take"]

Rows = slice | torch.Tensor


def take(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """x's rows: a view for a slice, a copy for an index."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def is_mask(rows: Rows) -> TypeGuard[torch.Tensor]:
    """Whether these are not row numbers, but a mask of all rows, bool [t]: of another length it cannot be.

    >>> is_mask(torch.tensor([True, False])), is_mask(torch.tensor([0])), is_mask(slice(0, 1))
    (True, False, False)
    """
    return isinstance(rows, torch.Tensor) and rows.dtype == torch.bool
