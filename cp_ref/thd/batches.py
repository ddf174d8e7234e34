"""Preparing a training batch: pad each sequence so that it divides, then give every rank its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cp_ref.api.reference_context import ContextParallel
from cp_ref.common.plan_arguments import check_plan
from cp_ref.common.sharding.shard import shard
from cp_ref.common.thd import declared_batches
from cp_ref.common.thd.checks import MOST_ROWS, check_count, check_room
from cp_ref.common.thd.row_tables import unpadded_rows
from cp_ref.common.wide_dtype import as_integers
from cp_ref.spec import QKV_FORMATS, check_choice, check_context
from cp_ref.thd.packed_lengths import end_of, lengths_on

__all__ = ["get_batch_on_this_cp_rank", "pad_thd_sequences_for_cp"]


@declared_batches.pad_thd_sequences_for_cp
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
    declared_batches.check_padding(input_ids, labels, cu_seqlens, divisibility_factor, *fills, padded_tokens)
    if input_ids.ndim == 2:
        flat = pad_thd_sequences_for_cp(input_ids[0], labels[0], cu_seqlens, divisibility_factor, *fills, padded_tokens)
        return flat[0][None], flat[1][None], flat[2]
    real = lengths_on("cu_seqlens", cu_seqlens, input_ids.device)
    check_room("input_ids", len(input_ids), "cu_seqlens", end_of(real))
    slots = (real.diff() + divisibility_factor - 1) // divisibility_factor * divisibility_factor
    padded = torch.cat([slots.new_zeros(1), slots.cumsum(0)])
    if padded_tokens is None:
        padded_tokens = end_of(padded) + len(input_ids) - end_of(real)
    check_count("padded_tokens", padded_tokens, end_of(padded), at_most=MOST_ROWS)
    if padded_tokens > torch.iinfo(cu_seqlens.dtype).max:
        raise ValueError(f"padded_tokens is {padded_tokens}; {cu_seqlens.dtype} lengths cannot count so many")

    source = unpadded_rows(padded, real, len(input_ids), padded_tokens)
    given = source >= 0  # the others are padding

    def spread(x: torch.Tensor, fill: int) -> torch.Tensor:
        result = x.new_full((padded_tokens,), fill)
        as_integers(result)[given] = as_integers(x)[source[given]]
        return result

    return spread(input_ids, padding_token_id), spread(labels, padding_label_id), padded.to(cu_seqlens)


@declared_batches.get_batch_on_this_cp_rank
def get_batch_on_this_cp_rank(
    batch: Mapping[str, Any],
    *,
    cp: ContextParallel,
    qkv_format: str,
    cu_seqlens_padded: torch.Tensor | None,
    plan: Any,
) -> dict[str, Any]:
    check_context(cp, ContextParallel)
    check_plan(plan)
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    lengths: dict[str, Any] = {"qkv_format": qkv_format, "cu_seqlens_padded": cu_seqlens_padded, "plan": plan}
    if plan is None and cu_seqlens_padded is not None and qkv_format == "thd":
        declared_batches.check_lengths_divide(cp, cu_seqlens_padded)
    in_format = qkv_format if plan is None else plan.problem.qkv_format

    def cut(xs: Sequence[torch.Tensor], fills: Sequence[int]) -> list[torch.Tensor]:
        return [shard(x, cp=cp, **lengths, fill_value=fill) for x, fill in zip(xs, fills, strict=True)]

    return declared_batches.cut_entries(batch, in_format, cp, plan, cu_seqlens_padded, cut)
