"""The recurrence of Mamba-2 on flash-linear-attention, cut where states come in.

The order of the calls is that of its `chunk_simple_gla_fwd` and `chunk_simple_gla_bwd`, 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.linear.affine_maps import Maps
from cp_fast.linear.fla.fla_functions import (
    chunk_bwd_dh,
    chunk_bwd_dv,
    chunk_fwd_h,
    chunk_fwd_o,
)
from cp_fast.linear.fla.fla_run import CHUNK, FlaRun, sums, sums_back
from cp_fast.linear.fla.kernels.gradient_kernels import chunk_gradients
from cp_fast.linear.fla.kernels.map_kernels import forward_maps, reverse_maps
from cp_fast.linear.linear_kernels import FragmentRows, LinearGradients, LinearInputs

__all__ = ["SimpleBackward", "SimpleForward"]


class SimpleForward(FlaRun):
    def __init__(self, inputs: LinearInputs, fragments: FragmentRows) -> None:
        super().__init__(inputs, fragments)
        self.g = sums(self.g_in, self.rows)
        self.kept = (self.g,)

    def maps(self, chosen: Sequence[int]) -> Maps:
        return Maps(*forward_maps(self.k[0], None, self.v[0], self.spans(chosen), g=self.g[0]))

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        h, states = _states_before(self, initial, final=final)
        out = chunk_fwd_o(self.q, self.k, self.v, h, g=self.g, scale=self.scale, **self.how)
        return out[0], states


class SimpleBackward(FlaRun):
    def __init__(
        self,
        inputs: LinearInputs,
        fragments: FragmentRows,
        kept: Sequence[torch.Tensor],
        initial: torch.Tensor | None,
        dout: torch.Tensor,
    ) -> None:
        super().__init__(inputs, fragments)
        (self.g,), self.initial, self.dout, self.h = kept, initial, dout[None], None

    def reverse_maps(self, chosen: Sequence[int], dfinal: torch.Tensor | None) -> torch.Tensor:
        q, k, dout, g = (x[0] for x in (self.q, self.k, self.dout, self.g))
        return reverse_maps(q, k, None, dout, None, self.spans(chosen), dfinal, self.scale, g=g)

    def meanwhile(self) -> None:
        self.h, _ = _states_before(self, self.initial, in_float32=True)

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        if self.h is None:
            self.meanwhile()
        assert self.h is not None
        q, k = (x.repeat_interleave(self.v.shape[2] // self.q.shape[2], dim=2) for x in (self.q, self.k))
        dh, dinitial = chunk_bwd_dh(
            q, k, self.v, self.dout, self.initial, dfinal, self.scale, g=self.g, cu_seqlens=self.rows.cu_seqlens,
            chunk_size=CHUNK, states_in_fp32=True,
        )  # fmt: skip
        dq, dk, _, dg = chunk_gradients(
            self.q[0], self.k[0], self.v[0], self.g[0], self.h[0], self.dout[0], dh[0], None, self.scale, *self.rows[:2]
        )
        dv = chunk_bwd_dv(self.q, self.k, self.dout, dh, g=self.g, scale=self.scale, **self.how)
        return LinearGradients(dq, dk, dv[0], sums_back(dg[None], self.rows), None, dinitial)


def _states_before(
    run: SimpleForward | SimpleBackward,
    initial: torch.Tensor | None,
    *,
    final: bool = False,
    in_float32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states before every chunk, and the final ones."""
    k = run.k.repeat_interleave(run.v.shape[2] // run.k.shape[2], dim=2)
    return chunk_fwd_h(
        k, run.v, g=run.g, h0=initial, output_final_state=final, cu_seqlens=run.rows.cu_seqlens, chunk_size=CHUNK,
        states_in_fp32=in_float32,
    )  # fmt: skip
