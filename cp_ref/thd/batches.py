"""Preparing a training batch: pad each sequence so that it divides, then give every rank its part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cp_ref.api.reference_context import ContextParallel
from cp_ref.common.plan_arguments import check_plan
from cp_ref.common.sharding.shard import shard
from cp_ref.common.thd import batches
from cp_ref.common.thd.checks import MOST_ROWS, check_count, check_room
from cp_ref.spec import QKV_FORMATS, check_choice, check_context
from cp_ref.thd.rows import Runs, read_runs

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
    real = read_runs("cu_seqlens", cu_seqlens, input_ids.device)
    check_room("input_ids", len(input_ids), "cu_seqlens", real.end())
    slots = (real.sizes + divisibility_factor - 1) // divisibility_factor * divisibility_factor
    padded = Runs(slots.cumsum(0) - slots, slots)
    if padded_tokens is None:
        padded_tokens = padded.end() + len(input_ids) - real.end()
    check_count("padded_tokens", padded_tokens, padded.end(), at_most=MOST_ROWS)
    if padded_tokens > torch.iinfo(cu_seqlens.dtype).max:
        raise ValueError(f"padded_tokens is {padded_tokens}; {cu_seqlens.dtype} lengths cannot count so many")

    new_rows = Runs(padded.starts, real.sizes).rows()

    def spread(x: torch.Tensor, fill: int) -> torch.Tensor:
        result, tail = x.new_full((padded_tokens,), fill), x[real.end() :][: padded_tokens - padded.end()]
        result[new_rows] = x[: real.end()]
        result[padded.end() : padded.end() + len(tail)] = tail
        return result

    cu_seqlens_padded = torch.cat([slots.new_zeros(1), slots.cumsum(0)]).to(cu_seqlens)
    return spread(input_ids, padding_token_id), spread(labels, padding_label_id), cu_seqlens_padded


@batches.get_batch_on_this_cp_rank
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
        batches.check_lengths_divide(cp, cu_seqlens_padded)
    in_format = qkv_format if plan is None else plan.problem.qkv_format
    return batches.cut_entries(batch, in_format, lambda xs: [shard(x, cp=cp, **lengths) for x in xs])
