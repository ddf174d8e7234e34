"""The common part of all passes on flash-linear-attention: fragments as its kernels take them, and sums of decays.

Its tensors have a batch of one in front. Its sums of g are in powers of 2, and begin at 0 in every chunk of 64 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from fla.ops.common import chunk_delta_h, chunk_h, chunk_o  # pyright: ignore[reportMissingImports]
from fla.ops.gated_delta_rule import chunk_fwd, wy_fast  # pyright: ignore[reportMissingImports]
from fla.ops.gla import chunk as gla  # pyright: ignore[reportMissingImports]
from fla.ops.kda import chunk_bwd as kda_bwd  # pyright: ignore[reportMissingImports]
from fla.ops.kda import chunk_intra as kda_intra  # pyright: ignore[reportMissingImports]
from fla.ops.kda import wy_fast as kda_wy_fast  # pyright: ignore[reportMissingImports]
from fla.ops.utils import cumsum, prepare_chunk_indices, prepare_chunk_offsets  # pyright: ignore[reportMissingImports]

from cp_fast.kernels.linear.fla.direct_launch import direct, launch_of
from cp_fast.kernels.linear.linear_kernels import FragmentRows, LinearInputs

__all__ = [
    "CHUNK",
    "FlaRun",
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
    "sums",
    "sums_back",
]

# ---- what is launched
#
# The functions and kernels of flash-linear-attention 0.6 that run here, launched directly.


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


# ---- what all passes have in common


CHUNK = 64
_LOG2_E = 1.4426950216293335  # in float32, as flash-linear-attention has it


class _Rows(NamedTuple):
    """The arguments that tell its kernels the fragments."""

    cu_seqlens: torch.Tensor
    chunk_indices: torch.Tensor
    chunk_offsets: torch.Tensor  # the first chunk of each fragment, and the number of chunks

    @property
    def given(self) -> dict[str, torch.Tensor]:
        return {"cu_seqlens": self.cu_seqlens, "chunk_indices": self.chunk_indices}


def _rows(fragments: FragmentRows) -> _Rows:
    if (known := fragments.tables.get("fla")) is None:
        on_host = torch.tensor(fragments.cu, device="cpu")
        made = (on_host, prepare_chunk_indices(on_host, CHUNK), prepare_chunk_offsets(on_host, CHUNK))
        known = fragments.tables["fla"] = _Rows(*(x.to(fragments.device) for x in made))
    return known


def _spans(fragments: FragmentRows, chosen: Sequence[int]) -> torch.Tensor:
    """The rows of the chosen fragments, int64 [c, 2]."""
    key = "spans", tuple(chosen)
    if (known := fragments.tables.get(key)) is None:
        rows = [fragments.cu[i : i + 2] for i in chosen]
        known = fragments.tables[key] = torch.tensor(rows, dtype=torch.int64, device=fragments.device).view(-1, 2)
    return known


def sums(g: torch.Tensor, rows: _Rows) -> torch.Tensor:
    return chunk_local_cumsum(g, chunk_size=CHUNK, scale=_LOG2_E, **rows.given)


def sums_back(dg: torch.Tensor, rows: _Rows) -> torch.Tensor:
    return chunk_local_cumsum(dg, chunk_size=CHUNK, reverse=True, **rows.given)[0]


class FlaRun:
    """The inputs of all passes, with a batch of one in front."""

    def __init__(self, inputs: LinearInputs, fragments: FragmentRows) -> None:
        self.fragments, self.rows, self.scale = fragments, _rows(fragments), inputs.scale
        self.q, self.k, self.v, self.g_in = (x[None] for x in inputs[:4])
        self.beta = None if inputs.beta is None else inputs.beta[None]
        self.how: dict[str, Any] = {"chunk_size": CHUNK, **self.rows.given}
        self.count, self.chunks = len(fragments), self.rows.chunk_indices.shape[0]
        self.states_how = {"chunk_offsets": self.rows.chunk_offsets, **self.how}

    def spans(self, chosen: Sequence[int]) -> torch.Tensor:
        return _spans(self.fragments, chosen)
