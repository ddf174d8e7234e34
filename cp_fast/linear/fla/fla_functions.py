"""The functions and kernels of flash-linear-attention 0.6 that run here, launched directly."""

from __future__ import annotations

from fla.ops.common import chunk_delta_h, chunk_h, chunk_o  # pyright: ignore[reportMissingImports]
from fla.ops.gated_delta_rule import chunk_fwd, wy_fast  # pyright: ignore[reportMissingImports]
from fla.ops.gla import chunk as gla  # pyright: ignore[reportMissingImports]
from fla.ops.kda import chunk_bwd as kda_bwd  # pyright: ignore[reportMissingImports]
from fla.ops.kda import chunk_intra as kda_intra  # pyright: ignore[reportMissingImports]
from fla.ops.kda import wy_fast as kda_wy_fast  # pyright: ignore[reportMissingImports]
from fla.ops.utils import cumsum  # pyright: ignore[reportMissingImports]

from cp_fast.linear.fla.direct_launch import direct, launch_of

__all__ = [
    "chunk_bwd_dv",
    "chunk_bwd_dv_local",
    "chunk_bwd_kernel_dh",
    "chunk_fwd_kernel_h",
    "chunk_fwd_o",
    "chunk_gated_delta_rule_bwd_dhu",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_gated_delta_rule_fwd_intra",
    "chunk_gla_fwd_o_gk",
    "chunk_kda_bwd_dAv",
    "chunk_kda_bwd_intra",
    "chunk_kda_bwd_wy_dqkg_fused",
    "chunk_kda_fwd_intra",
    "chunk_local_cumsum",
    "prepare_wy_repr_bwd",
    "recompute_kda",
    "recompute_w_u_fwd",
]

chunk_bwd_kernel_dh = launch_of(chunk_h.chunk_bwd_kernel_dh)
chunk_bwd_dv = direct(chunk_o.chunk_bwd_dv)
chunk_bwd_dv_local = direct(chunk_o.chunk_bwd_dv_local)
chunk_fwd_kernel_h = launch_of(chunk_h.chunk_fwd_kernel_h)
chunk_fwd_o = direct(chunk_o.chunk_fwd_o)
chunk_gated_delta_rule_bwd_dhu = direct(chunk_delta_h.chunk_gated_delta_rule_bwd_dhu)
chunk_gated_delta_rule_fwd_h = direct(chunk_delta_h.chunk_gated_delta_rule_fwd_h)
chunk_gated_delta_rule_fwd_intra = direct(chunk_fwd.chunk_gated_delta_rule_fwd_intra)
chunk_gla_fwd_o_gk = direct(gla.chunk_gla_fwd_o_gk)
chunk_kda_bwd_dAv = direct(kda_bwd.chunk_kda_bwd_dAv)
chunk_kda_bwd_intra = direct(kda_intra.chunk_kda_bwd_intra)
chunk_kda_bwd_wy_dqkg_fused = direct(kda_bwd.chunk_kda_bwd_wy_dqkg_fused)
chunk_kda_fwd_intra = direct(kda_intra.chunk_kda_fwd_intra)
chunk_local_cumsum = direct(cumsum.chunk_local_cumsum)
prepare_wy_repr_bwd = direct(wy_fast.prepare_wy_repr_bwd)
recompute_kda = direct(kda_wy_fast.recompute_w_u_fwd)
recompute_w_u_fwd = direct(wy_fast.recompute_w_u_fwd)
