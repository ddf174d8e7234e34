"""Preparing a training batch: pad each sequence so that it divides, then give every rank its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.movers import operators  # noqa: F401  (registers the operators)
from cp_fast.movers.operands import end_of, sizes_of
from cp_ref.contract import thd_batches
from cp_ref.contract.call_checks import check_context
from cp_ref.contract.cuts import check_known
from cp_ref.contract.plan_arguments import check_plan
from cp_ref.contract.sharding import shard
from cp_ref.contract.thd_checks import check_given, check_lengths, check_room, check_tail
from cp_ref.schedules.values import check_choice
from cp_ref.schedules.words import QKV_FORMATS

__all__ = ["get_batch_on_this_cp_rank", "pad_thd_sequences_for_cp"]


@thd_batches.pad_thd_sequences_for_cp
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
    thd_batches.check_padding(input_ids, labels, cu_seqlens, divisibility_factor, *fills, padded_tokens)
    if input_ids.ndim == 2:
        flat = pad_thd_sequences_for_cp(input_ids[0], labels[0], cu_seqlens, divisibility_factor, *fills, padded_tokens)
        return flat[0][None], flat[1][None], flat[2]
    if padded_tokens is None:
        sizes_of("cu_seqlens", cu_seqlens)
        check_room("input_ids", len(input_ids), "cu_seqlens", end_of(cu_seqlens))
    slots = (cu_seqlens.long().diff() + (divisibility_factor - 1)) // divisibility_factor * divisibility_factor
    wide = torch.nn.functional.pad(slots.cumsum(0), (1, 0))
    if padded_tokens is None:
        padded_tokens = int(wide[-1]) + len(input_ids) - int(cu_seqlens[-1])
    if padded_tokens > torch.iinfo(cu_seqlens.dtype).max:
        raise ValueError(f"padded_tokens is {padded_tokens}; {cu_seqlens.dtype} lengths cannot count so many")
    padded_ids, padded_labels = (
        torch.ops.cp_attention.pad_sequences(x, cu_seqlens, wide, padded_tokens, fill)
        for x, fill in zip((input_ids, labels), fills, strict=True)
    )
    return padded_ids, padded_labels, wide.to(cu_seqlens.dtype)


@thd_batches.get_batch_on_this_cp_rank
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
    in_format = qkv_format if plan is None else plan.problem.qkv_format

    def cut(xs: Sequence[torch.Tensor], fills: Sequence[int]) -> list[torch.Tensor]:
        if plan is None and qkv_format == "thd":  # lengths on a GPU are not read; they divide, so nothing is filled
            return _cut_packed(xs, cp, cu_seqlens_padded)
        return [shard(x, cp=cp, **lengths, fill_value=fill) for x, fill in zip(xs, fills, strict=True)]

    return thd_batches.cut_entries(batch, in_format, cp, plan, cu_seqlens_padded, cut)


def _cut_packed(
    xs: Sequence[torch.Tensor], cp: ContextParallel, cu_seqlens_padded: torch.Tensor | None
) -> list[torch.Tensor]:
    """thd, all tensors in one launch for layout dual_chunk."""
    check_known(cp.layout)
    if not xs:
        return []
    check_given("cu_seqlens_padded", cu_seqlens_padded)
    assert cu_seqlens_padded is not None
    by_device: dict[torch.device, list[int]] = {}
    for number, x in enumerate(xs):
        by_device.setdefault(x.device, []).append(number)
    parts = list(xs)
    for numbers in by_device.values():
        here = [xs[number] for number in numbers]
        if cp.layout == "dual_chunk":
            cut = torch.ops.cp_attention.partition(here, cu_seqlens_padded, cp.size, cp.rank)
        else:
            cut = _cut_contiguous(here, cp, cu_seqlens_padded)
        for number, part in zip(numbers, cut, strict=True):
            parts[number] = part
    return parts


def _cut_contiguous(
    xs: Sequence[torch.Tensor], cp: ContextParallel, cu_seqlens_padded: torch.Tensor
) -> list[torch.Tensor]:
    """Layout contiguous: the rank's part of the sequences' tokens, then its part of the tail."""
    tokens = xs[0].shape[0]
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, xs[0].device)
    sizes_of("cu_seqlens_padded", cu_seqlens_padded)
    end = end_of(cu_seqlens_padded)
    check_tail("x.shape[0]", tokens, end, cp.size)
    if end is None:
        rows = _contiguous_rows(cu_seqlens_padded[-1].long(), tokens, cp)
        return [x.index_select(0, rows) for x in xs]
    if end % cp.size:
        raise ValueError(
            f"the packed buffer has length {end}, padding included, but layout 'contiguous' at cp_size {cp.size} needs "
            f"a multiple of cp_size = {cp.size}"
        )
    own, tail = end // cp.size, (tokens - end) // cp.size
    start = end + cp.rank * tail
    return [torch.cat([x[cp.rank * own : (cp.rank + 1) * own], x[start : start + tail]]) for x in xs]


def _contiguous_rows(end: torch.Tensor, tokens: int, cp: ContextParallel) -> torch.Tensor:
    """The same as rows, int64 [tokens / cp_size], where the end of the sequences is known to the GPU alone."""
    right = (end >= 0) & (end <= tokens) & (end % cp.size == 0)
    rule = f"cu_seqlens_padded must end by {tokens}, at a multiple of cp_size = {cp.size}"
    torch.ops.aten._assert_async.msg(right, f"cp_fast get_batch_on_this_cp_rank: {rule}")
    row, own = torch.arange(tokens // cp.size, device=end.device), end // cp.size
    tail = (tokens - end) // cp.size
    return torch.where(row < own, cp.rank * own + row, end + cp.rank * tail + row - own)
