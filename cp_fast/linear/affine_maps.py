"""Affine maps of the recurrent state, `S_out = M @ S_in + B`, for every head of several fragments.

The maps of mamba2 are multiples of the identity: there M has one number for a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_fast.linear.state_tables import StateTables

__all__ = [
    "Maps",
    "apply",
    "compose_in_waves",
]

# ---- maps


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


# ---- their composition
#
# Composition of maps in the order of their documents: the states that enter a rank's fragments.


def compose_in_waves(
    tables: StateTables, maps: Maps, states: torch.Tensor | None, fragments: int, *, transposed: bool
) -> torch.Tensor:
    """See `LinearKernels.compose`: the i-th maps of all scans are applied at once."""
    now = None if states is None else states[tables.documents]
    entering = maps.b.new_zeros(fragments, *maps.b.shape[1:])
    for read, maps_of in tables.waves:
        if read is not None and now is not None:
            entering[read[0]] = now[read[1]]
        if maps_of is None:
            break
        slots, scans = maps_of
        after = maps.b[slots]
        if now is None:
            now = after.new_zeros(len(tables.documents), *after.shape[1:])
        else:
            after = after + _product(maps.m[slots], now[scans], transposed=transposed)
        now[scans] = after
    return entering


def _product(m: torch.Tensor, state: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """In float64 on a GPU, where a product of float32 may be one of TF32."""
    if m.device.type != "cuda":
        return apply(m, state, transposed=transposed)
    return apply(m.double(), state.double(), transposed=transposed).to(state.dtype)
