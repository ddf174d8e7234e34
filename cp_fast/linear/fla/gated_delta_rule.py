"""The gated delta rule on flash-linear-attention, cut where states come in.

The order of the calls is that of its `chunk_gated_delta_rule_fwd` and `chunk_gated_delta_rule_bwd`, 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.linear.affine_maps import Maps
from cp_fast.linear.fla.fla_functions import (
    chunk_bwd_dv_local,
    chunk_fwd_o,
    chunk_gated_delta_rule_bwd_dhu,
    chunk_gated_delta_rule_fwd_h,
    chunk_gated_delta_rule_fwd_intra,
    prepare_wy_repr_bwd,
    recompute_w_u_fwd,
)
from cp_fast.linear.fla.fla_run import FlaRun, sums, sums_back
from cp_fast.linear.fla.kernels.gradient_kernels import chunk_gradients
from cp_fast.linear.fla.kernels.map_kernels import forward_maps, reverse_maps
from cp_fast.linear.linear_kernels import FragmentRows, LinearGradients, LinearInputs

__all__ = ["GatedBackward", "GatedForward"]


class GatedForward(FlaRun):
    def __init__(self, inputs: LinearInputs, fragments: FragmentRows) -> None:
        super().__init__(inputs, fragments)
        self.g = sums(self.g_in, self.rows)
        self.w, self.u, a = chunk_gated_delta_rule_fwd_intra(self.k, self.v, self.g, self.beta, **self.how)
        self.kept = self.g, a

    def maps(self, chosen: Sequence[int]) -> Maps:
        return Maps(*forward_maps(self.k[0], self.w[0], self.u[0], self.spans(chosen), g=self.g[0]))

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        h, new, states = chunk_gated_delta_rule_fwd_h(
            self.k, self.w, self.u, g=self.g, initial_state=initial, output_final_state=final, **self.states_how
        )
        out = chunk_fwd_o(self.q, self.k, new, h, g=self.g, scale=self.scale, **self.how)
        return out[0], states


class GatedBackward(FlaRun):
    def __init__(
        self,
        inputs: LinearInputs,
        fragments: FragmentRows,
        kept: Sequence[torch.Tensor],
        initial: torch.Tensor | None,
        dout: torch.Tensor,
    ) -> None:
        super().__init__(inputs, fragments)
        (self.g, self.a), self.initial, self.dout, self.states = kept, initial, dout[None], None
        self.w, self.u = recompute_w_u_fwd(self.k, self.v, self.beta, self.a, g=self.g, **self.rows.given)
        self.dv = chunk_bwd_dv_local(self.q, self.k, self.dout, g=self.g, scale=self.scale, **self.how)

    def reverse_maps(self, chosen: Sequence[int], dfinal: torch.Tensor | None) -> torch.Tensor:
        q, k, w, dout, dv, g = (x[0] for x in (self.q, self.k, self.w, self.dout, self.dv, self.g))
        return reverse_maps(q, k, w, dout, dv, self.spans(chosen), dfinal, self.scale, g=g)

    def meanwhile(self) -> None:
        self.states = chunk_gated_delta_rule_fwd_h(
            self.k, self.w, self.u, g=self.g, initial_state=self.initial, **self.states_how
        )[:2]

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        if self.states is None:
            self.meanwhile()
        assert self.states is not None
        h, new = self.states
        dh, dinitial, dv = chunk_gated_delta_rule_bwd_dhu(
            self.q, self.k, self.w, self.dout, self.dv, g=self.g, h0=self.initial, dht=dfinal, scale=self.scale,
            **self.states_how,
        )  # fmt: skip
        dq, dk, dw, dg = chunk_gradients(
            self.q[0], self.k[0], new[0], self.g[0], h[0], self.dout[0], dh[0], dv[0], self.scale, *self.rows[:2]
        )
        dk_wy, dv, dbeta, dg_wy = prepare_wy_repr_bwd(
            self.k, self.v, self.beta, self.a, dw if dw is None else dw[None], dv, g=self.g, **self.rows.given
        )
        dg = sums_back(dg[None] + dg_wy, self.rows)
        return LinearGradients(dq, dk + dk_wy[0], dv[0], dg, dbeta[0], dinitial)
