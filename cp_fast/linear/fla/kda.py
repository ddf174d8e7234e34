"""Kimi Delta Attention on flash-linear-attention, cut where states come in.

The order of the calls is that of its `chunk_kda_fwd` and `chunk_kda_bwd`, 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.linear.affine_maps import Maps
from cp_fast.linear.fla.fla_functions import (
    chunk_gated_delta_rule_bwd_dhu,
    chunk_gated_delta_rule_fwd_h,
    chunk_gla_fwd_o_gk,
    chunk_kda_bwd_dAv,
    chunk_kda_bwd_intra,
    chunk_kda_bwd_wy_dqkg_fused,
    chunk_kda_fwd_intra,
    recompute_kda,
)
from cp_fast.linear.fla.fla_run import FlaRun, sums, sums_back
from cp_fast.linear.fla.kernels.map_kernels import forward_maps, reverse_maps
from cp_fast.linear.linear_kernels import FragmentRows, LinearGradients, LinearInputs

__all__ = ["KdaBackward", "KdaForward"]


class KdaForward(FlaRun):
    def __init__(self, inputs: LinearInputs, fragments: FragmentRows) -> None:
        super().__init__(inputs, fragments)
        self.g = sums(self.g_in, self.rows)
        self.w, self.u, _, self.kg, self.scores, a = chunk_kda_fwd_intra(
            self.q, self.k, self.v, gk=self.g, beta=self.beta, scale=self.scale, **self.how
        )
        self.kept = self.g, self.scores, a

    def maps(self, chosen: Sequence[int]) -> Maps:
        return Maps(*forward_maps(self.kg[0], self.w[0], self.u[0], self.spans(chosen), gk=self.g[0]))

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        h, new, states = chunk_gated_delta_rule_fwd_h(
            self.kg, self.w, self.u, gk=self.g, initial_state=initial, output_final_state=final, **self.states_how
        )
        out = chunk_gla_fwd_o_gk(self.q, new, self.g, self.scores, h, self.scale, **self.how)
        return out[0], states


class KdaBackward(FlaRun):
    def __init__(
        self,
        inputs: LinearInputs,
        fragments: FragmentRows,
        kept: Sequence[torch.Tensor],
        initial: torch.Tensor | None,
        dout: torch.Tensor,
    ) -> None:
        super().__init__(inputs, fragments)
        (self.g, scores, self.a), self.initial, self.dout = kept, initial, dout[None]
        self.w, u, self.qg, self.kg = recompute_kda(
            self.k, self.v, self.beta, self.a, self.g, q=self.q, **self.rows.given
        )
        self.h, self.new, _ = chunk_gated_delta_rule_fwd_h(
            self.kg, self.w, u, gk=self.g, initial_state=initial, **self.states_how
        )
        self.dscores, self.dv = chunk_kda_bwd_dAv(
            self.q, self.k, self.new, self.dout, A=scores, scale=self.scale, **self.how
        )

    def reverse_maps(self, chosen: Sequence[int], dfinal: torch.Tensor | None) -> torch.Tensor:
        q, k, w, dout, dv, g = (x[0] for x in (self.qg, self.kg, self.w, self.dout, self.dv, self.g))
        return reverse_maps(q, k, w, dout, dv, self.spans(chosen), dfinal, self.scale, gk=g)

    def meanwhile(self) -> None:
        pass

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        dh, dinitial, dv = chunk_gated_delta_rule_bwd_dhu(
            self.qg, self.kg, self.w, self.dout, self.dv, gk=self.g, h0=self.initial, dht=dfinal, scale=self.scale,
            **self.states_how,
        )  # fmt: skip
        dq, dk, dv, dbeta, dg, da = chunk_kda_bwd_wy_dqkg_fused(
            q=self.q, k=self.k, v=self.v, v_new=self.new, g=self.g, beta=self.beta, A=self.a, h=self.h, do=self.dout,
            dh=dh, dv=dv, scale=self.scale, **self.how,
        )  # fmt: skip
        dq, dk, dbeta, dg = chunk_kda_bwd_intra(
            q=self.q, k=self.k, g=self.g, beta=self.beta, dAqk=self.dscores, dAkk=da, dq=dq, dk=dk, db=dbeta, dg=dg,
            **self.how,
        )  # fmt: skip
        heads, groups = self.q.shape[2], self.v.shape[2] // self.q.shape[2]
        dq, dk = (x[0].unflatten(1, (heads, groups)).sum(2) if groups > 1 else x[0] for x in (dq, dk))
        return LinearGradients(dq, dk, dv[0], sums_back(dg, self.rows), dbeta[0], dinitial)
