"""Bugs in cutting and gathering, which both packages share."""

from __future__ import annotations

from typing import Any

import torch

from cp_ref.contract.cuts import Cut

__all__ = ["from_zero", "own_gradient", "reversed_slice"]


def reversed_slice(slice_of: Any, x: torch.Tensor, cut: Cut, rank: int, *fill: Any) -> torch.Tensor:
    """The rows of every slice in reverse order."""
    return slice_of(x, cut, rank, *fill).flip(1 if cut.qkv_format == "bshd" else 0)


def from_zero(positions: Any, *arguments: Any) -> Any:
    """Positions counted on the rank, and not in the sequence."""
    found = positions(*arguments)
    return (found.reshape(-1) * 0 + 1).cumsum(0).reshape(found.shape) - 1


def own_gradient(gathered: Any, x: torch.Tensor, cut: Cut, cp: Any) -> torch.Tensor:
    """The other ranks' gradients are left out."""
    whole = gathered(x, cut, cp)

    def of_own_rows(grad: torch.Tensor) -> torch.Tensor:
        axis = 1 if cut.qkv_format == "bshd" else 0
        rows = cut.of(cp.rank)
        index = torch.from_numpy(rows[rows < cut.size])
        return torch.zeros_like(grad).index_copy(axis, index, grad.index_select(axis, index))

    if whole.requires_grad and cut.batch is None:
        whole.register_hook(of_own_rows)
    return whole
