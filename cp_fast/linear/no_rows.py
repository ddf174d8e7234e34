"""The passes of a rank without tokens: nothing to launch, and maps of others may go through it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.linear.affine_maps import Maps
from cp_fast.linear.linear_kernels import LinearGradients, LinearInputs

__all__ = ["NoRowsBackward", "NoRowsForward"]


class _NoRows:
    """Empty tensors of the right shapes."""

    def __init__(self, inputs: LinearInputs) -> None:
        self._inputs = inputs
        d_k, (_, h_v, d_v) = inputs.q.shape[-1], inputs.v.shape
        dtype = torch.float64 if inputs.v.dtype == torch.float64 else torch.float32
        m = (0, h_v) if inputs.kind == "mamba2" else (0, h_v, d_k, d_k)
        self._maps = Maps(inputs.v.new_empty(m, dtype=dtype), inputs.v.new_empty(0, h_v, d_k, d_v, dtype=dtype))


class NoRowsForward(_NoRows):
    """See `ForwardRun`."""

    kept: tuple[torch.Tensor, ...] = ()

    def maps(self, chosen: Sequence[int]) -> Maps:
        """None."""
        return self._maps

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """No rows, no states."""
        return self._inputs.v, self._maps.b if final else None


class NoRowsBackward(_NoRows):
    """See `BackwardRun`."""

    def reverse_maps(self, chosen: Sequence[int], dfinal: torch.Tensor | None) -> torch.Tensor:
        """None."""
        return self._maps.b

    def meanwhile(self) -> None:
        """Nothing."""

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        """No rows, no states."""
        q, k, v, g, beta, *_ = self._inputs
        return LinearGradients(q, k, v, g, beta, self._maps.b)
