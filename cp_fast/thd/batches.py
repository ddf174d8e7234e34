"""Preparing a training batch: pad each sequence so that it divides, then give every rank its part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cp_fast.context import ContextParallel
from cp_fast.kernels import ops_autograd  # noqa: F401  (registers the gradients)
from cp_fast.kernels.checks import end_of, sizes_of
from cp_fast.thd.slices import cut_batched, cut_packed
from cp_ref.common.thd import batches
from cp_ref.common.thd.checks import check_room
from cp_ref.spec import check_context

__all__ = ["get_batch_on_this_cp_rank", "pad_thd_sequences_for_cp"]


@batches.pad_thd_sequences_for_cp
def pad_thd_sequences_for_cp(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    divisibility_factor: int,
    padding_token_id: int,
    padding_label_id: int,
    padded_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fills = padding_token_id, padding_label_id
    batches.check_padding(input_ids, labels, cu_seqlens, divisibility_factor, *fills, padded_tokens)
    if padded_tokens is None:
        sizes_of("cu_seqlens", cu_seqlens)
        check_room("input_ids", len(input_ids), "cu_seqlens", end_of(cu_seqlens))
    slots = (cu_seqlens.diff() + (divisibility_factor - 1)) // divisibility_factor * divisibility_factor
    cu_seqlens_padded = torch.nn.functional.pad(slots.cumsum(0, dtype=cu_seqlens.dtype), (1, 0))
    if padded_tokens is None:
        padded_tokens = int(cu_seqlens_padded[-1]) + len(input_ids) - int(cu_seqlens[-1])
    padded_ids, padded_labels = (
        torch.ops.cp_attention.pad_sequences(x, cu_seqlens, cu_seqlens_padded, padded_tokens, fill)
        for x, fill in zip((input_ids, labels), fills, strict=True)
    )
    return padded_ids, padded_labels, cu_seqlens_padded


@batches.get_batch_on_this_cp_rank
def get_batch_on_this_cp_rank(
    batch: Mapping[str, Any], *, cp: ContextParallel, qkv_format: str, cu_seqlens_padded: torch.Tensor | None
) -> dict[str, Any]:
    check_context(cp, ContextParallel)
    cut = batches.entries_to_cut(batch, qkv_format)
    tensors = list(cut.values())
    if qkv_format == "thd":
        parts = cut_packed(tensors, cp, cu_seqlens_padded)
    else:
        parts = cut_batched(tensors, cp, qkv_format, cu_seqlens_padded)
    return dict(batch) | dict(zip(cut, parts, strict=True))
