"""Helpers for packed sequences (thd): the small steps of context-parallel attention on variable lengths.

The names, arguments and results of `cp_ref.thd`, at the speed of memory: registered operators (`torch.compile` goes
through them), with implementations in CUDA, C++, Numba CUDA and PyTorch; `cp_fast.movers` selects one.

GLOBAL lengths are those of the whole packed buffer. LOCAL lengths are those of a rank's slice: the global ones divided
by cp_size. They are on the device of the data, or on the CPU. No helper waits:

    lengths on the CPU   their values are checked, and a ValueError names the sequence; they go to a GPU through pinned
                         memory (but not into the capture of a CUDA graph: a ValueError)
    lengths on a GPU     shapes and dtypes are checked; the kernels check the values where they run. A broken rule ends
                         in a device-side assertion, which PyTorch reports at the next call that waits

The helpers accept any number of sequences, sequences of length 0, a tail after the last one, int32 and int64 lengths.
Data has any strides. If the last axis is not dense, operands to be read are copied first, and operands to be changed in
place are refused. Operands that overlap the latter are refused too. The helpers that change something in place are not
differentiable, and refuse tensors that require grad; the two reorders and `thd_read_half_tensor` are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.movers import operators  # noqa: F401  (registers the operators)
from cp_fast.movers.operands import end_of, sizes_of
from cp_ref.batches.sharding import shard
from cp_ref.calls.declared import refuse_names
from cp_ref.calls.plan_arguments import check_plan
from cp_ref.problems.call_checks import check_context
from cp_ref.problems.cuts import check_known
from cp_ref.schedules.values import check_choice, check_flag, shown
from cp_ref.schedules.words import QKV_FORMATS
from cp_ref.thd_helpers import thd_batches, thd_corrections, thd_indices
from cp_ref.thd_helpers.thd_checks import (
    Tensors,
    as_list,
    check_given,
    check_lengths,
    check_room,
    check_tail,
    check_tensor,
    like,
    pad_v,
    trim_out,
)
from cp_ref.thd_helpers.thd_corrections import ACTIONS

__all__ = [
    "get_batch_on_this_cp_rank",
    "get_cu_seqlens_on_cp_rank",
    "pad_thd_sequences_for_cp",
    "pad_v",
    "thd_copy_valid_tokens_from_per_split_to_rank_local",
    "thd_cp_rank_order_to_sequence_order",
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
    "thd_sequence_order_to_cp_rank_order",
    "trim_out",
]

_INSTEAD = (
    "cp_fast.position_ids(cp=cp, qkv_format='thd', cu_seqlens_padded=...) gives the positions of this rank's rows"
)
__getattr__ = refuse_names(
    __name__, {"generate_positional_ids_for_cp": f"{_INSTEAD}, or of the whole batch over one rank"}
)


# ---- the helpers that are one operator each
#
# An argument is checked here if it cannot reach the operator: other types than tensors, integers or flags, and tensors
# whose gradient autograd would lack. The operators check everything else (`cp_fast.movers.operands`).


_MOST = 2**63 - 1
_Check = Callable[[str, Any], None]


@thd_indices.thd_get_partitioned_indices
def thd_get_partitioned_indices(
    cu_seqlens_padded: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    return _call("partition_indices", cu_seqlens_padded, total_tokens, cp_size, cp_rank)


@thd_indices.thd_sequence_order_to_cp_rank_order
def thd_sequence_order_to_cp_rank_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    return like(x, _call("reorder", as_list(x), cu_seqlens_padded, cp_size, True))


@thd_indices.thd_cp_rank_order_to_sequence_order
def thd_cp_rank_order_to_sequence_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    return like(x, _call("reorder", as_list(x), cu_seqlens_padded, cp_size, False))


@thd_indices.get_cu_seqlens_on_cp_rank
def get_cu_seqlens_on_cp_rank(
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> torch.Tensor:
    return _call("rank_lengths", cu_seqlens, cu_seqlens_padded, cp_size, cp_rank, first_half, second_half)


@thd_indices.thd_copy_valid_tokens_from_per_split_to_rank_local
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    _call("copy_valid_", out, inp, cu_seqlens_padded, cu_seqlens)


@thd_corrections.thd_read_half_tensor
def thd_read_half_tensor(x: Tensors, cu_seqlens_padded: torch.Tensor, half: int) -> Tensors:
    return like(x, _call("read_half", as_list(x), cu_seqlens_padded, half))


@thd_corrections.thd_read_second_half_lse
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool, max_seqlen: int
) -> torch.Tensor:
    return _call("read_second_half_lse", lse, cu_seqlens_padded, lse_packed, max_seqlen)


@thd_corrections.thd_second_half_lse_correction
def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool
) -> None:
    _call("lse_correction_", lse, lse_step, cu_seqlens_padded, lse_packed)


@thd_corrections.thd_out_correction
def thd_out_correction(
    out: torch.Tensor,
    out_step: torch.Tensor,
    lse: torch.Tensor,
    lse_step: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    _call("out_correction_", out, out_step, lse, lse_step, cu_seqlens_padded, only_second_half, lse_packed)


@thd_corrections.thd_grad_correction
def thd_grad_correction(
    grad: torch.Tensor, grad_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, first_half: str, second_half: str
) -> None:
    _call("grad_correction_", grad, grad_step, cu_seqlens_padded, first_half, second_half)


def _call(operator: str, *arguments: Any) -> Any:
    """Call `torch.ops.cp_attention.<operator>`, after a check that every argument has the type of the operator's
    schema.
    """
    for (name, check), value in zip(_CHECKS[operator], arguments, strict=True):
        check(name, value)
    return getattr(torch.ops.cp_attention, operator)(*arguments)


def _check_integer(name: str, value: Any) -> None:
    """Raise unless `value` is a valid integer for an operator."""
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be an integer")
    if isinstance(value, int) and not -_MOST <= value <= _MOST:
        raise ValueError(f"{name} is {shown(value)}; it must fit into 64 bits")


def _check_operand(name: str, x: Any) -> None:
    """Raise unless x is a strided tensor that requires no gradient: these helpers have none."""
    check_tensor(name, x)
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            f"{name} requires grad, and this helper is not differentiable; call it inside an "
            "autograd.Function or under torch.no_grad()"
        )


_BY_TYPE: dict[str, _Check] = {
    "Tensor": _check_operand,
    "List[Tensor]": lambda name, value: None,  # `as_list` has checked them.
    "int": _check_integer,
    "SymInt": _check_integer,
    "bool": check_flag,
    "str": lambda name, value: check_choice(name, value, ACTIONS),
}


def _checks_of(operator: str) -> tuple[tuple[str, _Check], ...]:
    arguments = getattr(torch.ops.cp_attention, operator).default._schema.arguments
    return tuple((a.name, check_given if a.name.startswith("cu_seqlens") else _BY_TYPE[str(a.type)]) for a in arguments)


_CHECKS = {
    operator: _checks_of(operator)
    for operator in (
        "partition_indices",
        "rank_lengths",
        "reorder",
        "read_half",
        "read_second_half_lse",
        "copy_valid_",
        "lse_correction_",
        "out_correction_",
        "grad_correction_",
    )
}


# ---- preparing a training batch: pad each sequence so that it divides, then give every rank its part


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
