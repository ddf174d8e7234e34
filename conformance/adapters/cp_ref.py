"""`cp_ref` on all levels."""

from __future__ import annotations

from typing import Any

import torch

import cp_ref as package
from conformance.adapters.band_tiles import out_of_nothing
from conformance.case import wide_dtype
from cp_ref.reference.executor.merge_partials import merge as merge_two
from cp_ref.reference.executor.tile_attention import tile_backward as exact_backward
from cp_ref.reference.executor.tile_attention import tile_forward, visible_pairs
from cp_ref.schedules.areas import UNBOUNDED
from cp_ref.schedules.problem import ScoreSpec

__all__ = [
    "ContextParallel", "Unsupported", "attention", "causal_conv1d", "compress_keys", "compressed_attention",
    "index_loss", "linear_attention", "make_plan", "merge", "position_ids", "select_keys", "shard", "sparse_attention",
    "supports", "thd", "tile", "tile_backward", "unshard",
]  # fmt: skip

ContextParallel, Unsupported, supports = package.ContextParallel, package.Unsupported, package.supports
attention, make_plan = package.attention, package.make_plan
linear_attention, causal_conv1d = package.linear_attention, package.causal_conv1d
sparse_attention, select_keys, index_loss = package.sparse_attention, package.select_keys, package.index_loss
compress_keys, compressed_attention = package.compress_keys, package.compressed_attention
shard, unshard, position_ids, thd = package.shard, package.unshard, package.position_ids, package.thd

chooses_schedule = True


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """By `cp_ref.reference.executor.merge_partials`, in the LSE's dtype, one part after the other."""
    out, lse = parts[0][0].to(parts[0][1].dtype), parts[0][1].t()
    for out_step, lse_step in parts[1:]:
        out, lse = merge_two(out, lse, out_step.to(lse.dtype), lse_step.t())
    return out, lse.t()


def tile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """By `cp_ref.reference.executor.tile_attention.tile_forward`, in float32 or wider."""
    if not len(q) or not len(k):
        return out_of_nothing(q, v)
    wide_q, wide_k, wide_v, visible, kept = _operands(q, k, v, options)
    out, lse, _ = tile_forward(wide_q, wide_k, wide_v, visible, kept)
    return out.to(q.dtype), lse.t()


def tile_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """By `cp_ref.reference.executor.tile_attention.tile_backward`."""
    if not len(q) or not len(k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    wide_q, wide_k, wide_v, visible, kept = _operands(q, k, v, options)
    dout, out = dout.to(wide_q.dtype), out.to(wide_q.dtype)
    grads = exact_backward(wide_q, wide_k, wide_v, dout, lse.t(), (dout * out).sum(-1), visible, kept)
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(q.dtype) for x in grads[1:])
    return grads[0].to(q.dtype), dk, dv


def _operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> Any:
    wide = wide_dtype(q.dtype)
    shift, (left, right) = len(k) - len(q), (options.pop("left"), options.pop("right"))
    lo, hi = -UNBOUNDED if left is None else shift - left, UNBOUNDED if right is None else shift + right
    visible = visible_pairs(slice(0, len(q)), slice(0, len(k)), lo, hi, q.device)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).to(wide) for x in (k, v))
    return q.to(wide), k, v, visible, ScoreSpec(**options)
