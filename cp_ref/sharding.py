"""Cutting global tensors into the ranks' slices, and putting them together again."""

from __future__ import annotations

from typing import Any

import torch

from cp_ref.common import slices
from cp_ref.common.cutting import gathered, positions_on, slice_of
from cp_ref.common.processes import during
from cp_ref.common.rolling import rolled
from cp_ref.context import ContextParallel
from cp_ref.spec import agreed_cut, check_context, read_cut, sequences_of

__all__ = ["position_ids", "roll", "shard", "unshard"]


@slices.shard
def shard(
    x: torch.Tensor, *, cp: ContextParallel, qkv_format: str, cu_seqlens_padded: torch.Tensor | None, plan: Any
) -> torch.Tensor:
    check_context(cp, ContextParallel)
    return slice_of(x, read_cut(cp, plan, x, qkv_format, cu_seqlens_padded, whole=True), cp.rank)


@slices.unshard
def unshard(
    x: torch.Tensor,
    *,
    cp: ContextParallel,
    qkv_format: str,
    cu_seqlens_padded: torch.Tensor | None,
    seqlen: int | None,
    plan: Any,
) -> torch.Tensor:
    check_context(cp, ContextParallel)
    with during("unshard"):
        cut = agreed_cut(cp, plan, x, qkv_format, cu_seqlens_padded, seqlen)
    return gathered(x, cut, cp, during)


@slices.roll
def roll(
    x: torch.Tensor,
    shifts: int,
    *,
    cp: ContextParallel,
    qkv_format: str,
    cu_seqlens_padded: torch.Tensor | None,
    seqlen: int | None,
    plan: Any,
    fill_value: float,
) -> torch.Tensor:
    check_context(cp, ContextParallel)
    with during("roll"):
        cut = agreed_cut(cp, plan, x, qkv_format, cu_seqlens_padded, seqlen, (shifts, fill_value))
    return rolled(x, cut, sequences_of(cut, plan, cu_seqlens_padded), shifts, fill_value, cp, during)


@slices.position_ids
def position_ids(
    *,
    cp: ContextParallel,
    qkv_format: str,
    seqlen: int | None,
    cu_seqlens_padded: torch.Tensor | None,
    device: torch.device | str | None,
    plan: Any,
    rank: int | None,
) -> torch.Tensor:
    check_context(cp, ContextParallel)
    return positions_on(device, cp, plan, qkv_format, seqlen, cu_seqlens_padded, rank)
