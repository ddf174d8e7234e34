"""Composition of maps in the order of their documents: the states that enter a rank's fragments."""

from __future__ import annotations

import torch

from cp_fast.linear.affine_maps import Maps, apply
from cp_fast.linear.state_tables import StateTables

__all__ = ["compose_in_waves"]


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
