"""Affine maps of the recurrent state, `S_out = M @ S_in + B`, for every head of several fragments.

The maps of mamba2 are multiples of the identity: there M has one number for a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Maps", "apply"]


class Maps(NamedTuple):
    """The maps of n fragments.

    >>> maps = Maps(torch.full((1, 1), 0.5), torch.ones(1, 1, 2, 3))
    >>> apply(maps.m, torch.ones(1, 1, 2, 3)) + maps.b
    tensor([[[[1.5000, 1.5000, 1.5000],
              [1.5000, 1.5000, 1.5000]]]])
    """

    m: torch.Tensor  # [n, h_v, d_k, d_k]; one factor [n, h_v] for mamba2
    b: torch.Tensor  # [n, h_v, d_k, d_v]


def apply(m: torch.Tensor, state: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """M @ S, or M^T @ S, for every fragment and head: m [n, h_v, d_k, d_k] or [n, h_v], state [n, h_v, d_k, d_v]."""
    if m.dim() == 2:
        return m[..., None, None] * state
    return (m.mT if transposed else m) @ state
