"""The recurrence of Mamba-2 on flash-linear-attention, cut where states come in.

The order of the calls is that of its `chunk_simple_gla_fwd` and `chunk_simple_gla_bwd`, 0.6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cp_fast.linear.affine_maps import Maps
from cp_fast.linear.fla.fla_functions import (
    chunk_bwd_dv,
    chunk_bwd_kernel_dh,
    chunk_fwd_kernel_h,
    chunk_fwd_o,
)
from cp_fast.linear.fla.fla_run import CHUNK, FlaRun, sums, sums_back
from cp_fast.linear.fla.kernels.gradient_kernels import chunk_gradients
from cp_fast.linear.fla.kernels.map_kernels import forward_maps, reverse_maps
from cp_fast.linear.linear_kernels import FragmentRows, LinearGradients, LinearInputs

__all__ = ["SimpleBackward", "SimpleForward"]

# Its functions of these kernels read the number of chunks from the device.
_CONSTANTS = {"BT": CHUNK, "BS": CHUNK, "USE_G": True} | dict.fromkeys(
    ["USE_G_GAMMA", "USE_GK", "USE_GV", "STATE_V_FIRST"], False
)


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
