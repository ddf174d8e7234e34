"""The passes of each kind. Importing this imports flash-linear-attention and Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from cp_fast.kernels.linear.fla.fla_pieces import PiecewiseBackward, PiecewiseForward
from cp_fast.kernels.linear.fla.fla_run import (
    CHUNK,
    FlaRun,
    chunk_bwd_dv,
    chunk_bwd_dv_local,
    chunk_bwd_kernel_dh,
    chunk_fwd_kernel_h,
    chunk_fwd_o,
    chunk_gated_delta_rule_bwd_dhu,
    chunk_gated_delta_rule_fwd_h,
    chunk_gated_delta_rule_fwd_intra,
    chunk_gla_fwd_o_gk,
    chunk_kda_bwd_dAv,
    chunk_kda_bwd_intra,
    chunk_kda_bwd_wy_dqkg_fused,
    chunk_kda_fwd_intra,
    prepare_wy_repr_bwd,
    recompute_kda,
    recompute_w_u_fwd,
    sums,
    sums_back,
)
from cp_fast.kernels.linear.fla.triton_kernels import (
    LARGEST,
    chunk_gradients,
    forward_maps,
    reverse_maps,
    states_before,
)
from cp_fast.kernels.linear.linear_kernels import (
    FragmentRows,
    LinearGradients,
    LinearInputs,
    Maps,
)

__all__ = [
    "BACKWARD",
    "FORWARD",
    "LARGEST",
    "GatedBackward",
    "GatedForward",
    "KdaBackward",
    "KdaForward",
    "SimpleBackward",
    "SimpleForward",
    "states_before",
]

# ---- the gated delta rule
#
# The gated delta rule on flash-linear-attention, cut where states come in.
#
# The order of the calls is that of its `chunk_gated_delta_rule_fwd` and `chunk_gated_delta_rule_bwd`, 0.6.


class GatedForward(FlaRun):
    """The forward pass of the gated delta rule; see `ForwardRun`."""

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
    """Its backward pass; see `BackwardRun`."""

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


# ---- Kimi Delta Attention
#
# Kimi Delta Attention on flash-linear-attention, cut where states come in.
#
# The order of the calls is that of its `chunk_kda_fwd` and `chunk_kda_bwd`, 0.6.


class KdaForward(FlaRun):
    """The forward pass of Kimi Delta Attention; see `ForwardRun`."""

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
    """Its backward pass; see `BackwardRun`."""

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


# ---- Mamba-2
#
# The recurrence of Mamba-2 on flash-linear-attention, cut where states come in.
#
# The order of the calls is that of its `chunk_simple_gla_fwd` and `chunk_simple_gla_bwd`, 0.6.


# Its functions of these kernels read the number of chunks from the device.
_CONSTANTS = {"BT": CHUNK, "BS": CHUNK, "USE_G": True} | dict.fromkeys(
    ["USE_G_GAMMA", "USE_GK", "USE_GV", "STATE_V_FIRST"], False
)


class SimpleForward(FlaRun):
    """The forward pass of Mamba-2; see `ForwardRun`."""

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
    """Its backward pass; see `BackwardRun`."""

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
        dh, dinitial = _gradients_after(self, dfinal)
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
    k, v = run.k.repeat_interleave(run.v.shape[2] // run.k.shape[2], dim=2), run.v
    (_, n, h, d_k), d_v = k.shape, v.shape[-1]
    before = k.new_empty(1, run.chunks, h, d_k, d_v, dtype=torch.float32 if in_float32 else k.dtype)
    after = k.new_empty(run.count, h, d_k, d_v, dtype=torch.float32) if final else None
    chunk_fwd_kernel_h[_blocks(run)](
        k=k, v=v, h=before, g=run.g, g_gamma=None, gk=None, gv=None, h0=initial, ht=after,
        cu_seqlens=run.rows.cu_seqlens, split_offsets=run.rows.chunk_offsets, T=n, H=h, K=d_k, V=d_v, **_CONSTANTS,
    )  # fmt: skip
    return before, after


def _gradients_after(run: SimpleBackward, dfinal: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of the states after every chunk, and of the initial ones."""
    v = run.v
    q = run.q.repeat_interleave(v.shape[2] // run.q.shape[2], dim=2)
    (_, n, h, d_k), d_v = q.shape, v.shape[-1]
    after = q.new_empty(1, run.chunks, h, d_k, d_v, dtype=torch.float32)
    dinitial = None if run.initial is None else torch.empty_like(run.initial, dtype=torch.float32)
    chunk_bwd_kernel_dh[_blocks(run)](
        q=q, g=run.g, g_gamma=None, gk=None, gv=None, do=run.dout, dh=after, dht=dfinal, dh0=dinitial,
        cu_seqlens=run.rows.cu_seqlens, split_offsets=run.rows.chunk_offsets, scale=run.scale, T=n, HQ=h, H=h, K=d_k,
        V=d_v, NG=1, **_CONSTANTS,
    )  # fmt: skip
    return after, dinitial


def _blocks(run: FlaRun) -> Callable[[dict[str, int]], tuple[int]]:
    """A program for each block of each state of a fragment."""
    states, d_k, d_v = run.count * run.v.shape[2], run.q.shape[-1], run.v.shape[-1]
    return lambda tuned: (-(-d_k // tuned["BK"]) * -(-d_v // tuned["BV"]) * states,)


# ---- the passes of each kind


FORWARD = {
    "gated_delta_rule": partial(PiecewiseForward, GatedForward),
    "kda": partial(PiecewiseForward, KdaForward),
    "mamba2": SimpleForward,  # its kernels of states have four times as many programs
}
BACKWARD = {
    "gated_delta_rule": partial(PiecewiseBackward, GatedBackward),
    "kda": partial(PiecewiseBackward, KdaBackward),
    "mamba2": SimpleBackward,
}
