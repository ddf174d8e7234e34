"""Level `helpers`: every THD helper against its definition by row numbers, on buffers that show what it must not touch.

There is one record for each helper: how a call of it is built, its meaning, and the calls that have no answer. Lengths
are GLOBAL or LOCAL, as the helper needs them (see `cp_ref.thd`). Helpers that know ranks count `slots` in units of
2 * cp_size tokens. Helpers that know halves count them in units of 2 tokens, one for each half. For the others, and
where one rank has everything, a unit is 1 token. A definition lists row numbers in plain Python, sequence by sequence,
and moves or computes these rows in one step. For arithmetic the caller passes float64.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from conformance.case import dtype_of, wide_dtype
from conformance.problems.helper_calls import (
    Arguments,
    Built,
    HelperCall,
    HelperRecord,
    Lengths,
    any_bits,
    by_head,
    check_fits,
    check_lse,
    check_tail,
    chunk_lengths,
    chunk_unit,
    half_rows,
    halved,
    lengths_of,
    lse_index,
    lse_sizes,
    normal,
    random_lse,
    rank_rows,
    require,
    row_index,
    token_shape,
)

# ---- rows of ranks


def _build_partition(case: HelperCall, device: str) -> Built:
    lengths = Lengths(case, chunk_unit(case), device)
    arguments = {"cu_seqlens_padded": lengths.padded, "total_tokens": lengths.tokens}
    return Built(arguments | {"cp_size": case.cp_size, "cp_rank": case.rank})


def _partition(cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    rows = rank_rows(cu_seqlens_padded.tolist(), total_tokens, cp_size, cp_rank)
    return torch.tensor(rows, dtype=cu_seqlens_padded.dtype, device=cu_seqlens_padded.device)


def _partition_rule(a: Arguments) -> None:
    chunk_lengths(a)
    check_tail(a, a["total_tokens"], a["cp_size"])


def _build_reorder(case: HelperCall, device: str) -> Built:
    lengths = Lengths(case, chunk_unit(case), device)
    x = any_bits(case, (lengths.tokens, *case.dims), device)
    return Built({"x": x, "cu_seqlens_padded": lengths.padded, "cp_size": case.cp_size})


def _rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int) -> Tensor:
    lengths = cu_seqlens_padded.tolist()
    rows = [row for rank in range(cp_size) for row in rank_rows(lengths, len(x), cp_size, rank)]
    return row_index(rows, x)


def _to_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int) -> Tensor:
    return x[_rank_order(x, cu_seqlens_padded, cp_size)]


def _to_sequence_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int) -> Tensor:
    result = torch.empty_like(x)
    result[_rank_order(x, cu_seqlens_padded, cp_size)] = x
    return result


def _reorder_rule(a: Arguments) -> None:
    chunk_lengths(a)
    check_tail(a, len(a["x"]), a["cp_size"])


def _build_copy_valid(case: HelperCall, device: str) -> Built:
    lengths, generator = Lengths(case, 2, device), case.generator()
    shape = (lengths.tokens, *case.dims)
    out, inp = (any_bits(case, shape, device, generator) for _ in range(2))
    arguments = {"out": out, "inp": inp, "cu_seqlens_padded": lengths.padded}
    return Built(arguments | {"cu_seqlens": lengths.cumulative(lengths.real)}, target="out", lengths="cu_seqlens")


def _copy_valid(out: Tensor, inp: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor) -> None:
    rows: list[int] = []
    for start, (first, last) in zip(cu_seqlens_padded.tolist()[:-1], pairwise(cu_seqlens.tolist()), strict=True):
        rows += range(start, start + last - first)
    index = row_index(rows, out)
    out[index] = inp[index].to(out.dtype)


def _copy_valid_rule(a: Arguments) -> None:
    check_fits(lengths_of(a, "cu_seqlens"), lengths_of(a, "cu_seqlens_padded", first=None))
    check_tail(a, len(a["out"]), 1)


_OF_ROWS = {
    "thd_get_partitioned_indices": HelperRecord(_build_partition, _partition, _partition_rule),
    "thd_sequence_order_to_cp_rank_order": HelperRecord(_build_reorder, _to_rank_order, _reorder_rule),
    "thd_cp_rank_order_to_sequence_order": HelperRecord(_build_reorder, _to_sequence_order, _reorder_rule),
    "thd_copy_valid_tokens_from_per_split_to_rank_local": HelperRecord(
        _build_copy_valid, _copy_valid, _copy_valid_rule
    ),
}


# ---- halves of sequences
#
# Helpers for the halves of every sequence, in a ring: read one half; put the results of one step into the sums of all
# steps, which are LSEs, outputs and gradients.


_ACTIONS = ("add", "copy", "none")


def _build_read_half(case: HelperCall, device: str) -> Built:
    lengths = Lengths(case, 2, device)
    x = any_bits(case, token_shape(case, lengths.tokens), device)
    return Built({"x": x, "cu_seqlens_padded": lengths.padded, "half": case.choices[0] % 2})


def _read_half(x: Tensor, cu_seqlens_padded: Tensor, half: int) -> Tensor:
    axis = 1 if x.ndim == 4 else 0
    end = int(cu_seqlens_padded[-1])
    tail = (x.shape[axis] - end) // 2
    rows = half_rows(cu_seqlens_padded, half)[0] + list(range(end + half * tail, end + (half + 1) * tail))
    return x.index_select(axis, row_index(rows, x))


def _read_half_rule(a: Arguments) -> None:
    lengths_of(a, "cu_seqlens_padded", 2)
    check_tail(a, a["x"].shape[1 if a["x"].ndim == 4 else 0], 2)


def _build_read_lse(case: HelperCall, device: str) -> Built:
    lengths = Lengths(case, 2, device)
    shape, room = lse_sizes(case, lengths)
    known = lengths.lse_values(shape[-2], room, case.packed, (1,))
    lse = random_lse(shape, known, case.generator(), wide_dtype(case.dtype), device)
    needed = lengths.starts[-1] // 2 if case.packed else max(lengths.slots, default=0) // 2
    arguments = {"lse": lse, "cu_seqlens_padded": lengths.padded, "lse_packed": case.packed}
    return Built(arguments | {"max_seqlen": needed + case.spare})


def _read_lse(lse: Tensor, cu_seqlens_padded: Tensor, lse_packed: bool, max_seqlen: int) -> Tensor:
    result = lse.new_zeros(*lse.shape[:-1], max_seqlen)
    source = by_head(lse, lse_packed)[:, *lse_index(lse, cu_seqlens_padded, lse_packed, "second")]
    by_head(result, lse_packed)[:, *lse_index(lse, cu_seqlens_padded, lse_packed, "halves")] = source
    return result


def _read_lse_rule(a: Arguments) -> None:
    sizes = lengths_of(a, "cu_seqlens_padded", 2)
    check_lse(a["lse"], a["lse_packed"], sizes)
    needed = (sum(sizes) if a["lse_packed"] else max(sizes, default=0)) // 2
    require(a["max_seqlen"] >= needed, f"max_seqlen must be at least {needed}: {a['max_seqlen']}")


def _build_correct_lse(case: HelperCall, device: str) -> Built:
    lengths, generator = Lengths(case, 2, device), case.generator()
    halves = halved(case, lengths, device)
    shape, room = lse_sizes(case, lengths)
    step_shape, step_room = lse_sizes(case, lengths, half=True)
    touched = lengths.lse_values(shape[-2], room, case.packed, (1,))
    lse = random_lse(shape, torch.ones_like(touched), generator, wide_dtype(case.dtype), device)
    known = halves.lse_values(shape[-2], step_room, case.packed)
    step = random_lse(step_shape, known, generator, wide_dtype(case.dtype), device)
    arguments = {"lse": lse, "lse_step": step, "cu_seqlens_padded": lengths.padded, "lse_packed": case.packed}
    return Built(arguments, target="lse", touched=touched)


def _correct_lse(lse: Tensor, lse_step: Tensor, cu_seqlens_padded: Tensor, lse_packed: bool) -> None:
    whole, step = by_head(lse, lse_packed), by_head(lse_step, lse_packed)
    at = lse_index(lse, cu_seqlens_padded, lse_packed, "second")
    step_at = lse_index(lse, cu_seqlens_padded, lse_packed, "halves")
    whole[:, *at] = (whole[:, *at].exp() + step[:, *step_at].exp()).log()


def _correct_lse_rule(a: Arguments) -> None:
    sizes, packed = lengths_of(a, "cu_seqlens_padded", 2), a["lse_packed"]
    check_lse(a["lse"], packed, sizes)
    check_lse(a["lse_step"], packed, [n // 2 for n in sizes], a["lse"].shape[-1] // 2)


def _build_correct_out(case: HelperCall, device: str) -> Built:
    lengths, generator = Lengths(case, 2, device), case.generator()
    only_second = case.choices[0] > 0
    source = halved(case, lengths, device) if only_second else lengths
    dims = case.dims if len(case.dims) == 2 else (1, 2)
    shape, room = lse_sizes(_with_heads(case, dims[0]), lengths)
    step_shape, step_room = lse_sizes(_with_heads(case, dims[0]), lengths, half=only_second)
    halves = (1,) if only_second else (0, 1)
    known = lengths.lse_values(dims[0], room, case.packed, halves)
    final = random_lse(shape, known, generator, wide_dtype(case.dtype), device)
    known = source.lse_values(dims[0], step_room, case.packed)
    step_lse = random_lse(step_shape, known, generator, wide_dtype(case.dtype), device)
    # The final LSE is over all steps, so it is no less than the LSE of any step.
    final = torch.where(final.isnan(), final, final.nan_to_num(neginf=0.0) + 12.0)
    out_step = normal((source.tokens, *dims), generator, dtype_of(case.dtype), device)
    out_step = out_step.masked_fill(~source.rows()[:, None, None], torch.nan)
    if case.packed:  # A step without keys for a row may leave any values there.
        out_step = out_step.masked_fill((step_lse.t() == -torch.inf)[..., None], torch.nan)
    rows = lengths.rows(halves)
    out = normal((lengths.tokens, *dims), generator, _target_dtype(case), device)
    arguments = {"out": out, "out_step": out_step, "lse": final, "lse_step": step_lse}
    arguments |= {"cu_seqlens_padded": lengths.padded, "only_second_half": only_second, "lse_packed": case.packed}
    return Built(arguments, target="out", touched=rows[:, None, None].expand(out.shape))


def _with_heads(case: HelperCall, heads: int) -> HelperCall:
    return replace(case, dims=(heads,))


def _target_dtype(case: HelperCall) -> torch.dtype:
    """The dtype of the result that a step's part is added to."""
    return wide_dtype(case.dtype) if case.wide else dtype_of(case.dtype)


def _correct_out(
    out: Tensor,
    out_step: Tensor,
    lse: Tensor,
    lse_step: Tensor,
    cu_seqlens_padded: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    if only_second_half:
        rows, step_rows = half_rows(cu_seqlens_padded, 1)
    else:
        rows = step_rows = list(range(int(cu_seqlens_padded[-1])))
    parts = ("second", "halves") if only_second_half else ("whole", "whole")
    final, step = (
        by_head(x, lse_packed)[:, *lse_index(x, cu_seqlens_padded, lse_packed, part)].t()[..., None]
        for x, part in zip((lse, lse_step), parts, strict=True)
    )
    share = torch.exp(step - final) * out_step[row_index(step_rows, out)]
    out[row_index(rows, out)] += torch.where(step == -torch.inf, 0.0, share)


def _correct_out_rule(a: Arguments) -> None:
    half = 2 if a["only_second_half"] else 1
    sizes, packed, tokens = lengths_of(a, "cu_seqlens_padded", half), a["lse_packed"], len(a["out"])
    check_tail(a, tokens, half)
    check_lse(a["lse"], packed, sizes, tokens)
    check_lse(a["lse_step"], packed, [n // half for n in sizes], tokens // half)


def _build_correct_grad(case: HelperCall, device: str) -> Built:
    lengths, generator = Lengths(case, 2, device), case.generator()
    first, second = (_ACTIONS[choice] for choice in case.choices)
    idle = (first, second).count("none")
    source = halved(case, lengths, device) if idle == 1 else lengths
    grad = normal(token_shape(case, lengths.tokens), generator, _target_dtype(case), device)
    step = normal(token_shape(case, source.tokens), generator, dtype_of(case.dtype), device)
    axis = 1 if grad.ndim == 4 else 0
    used = source.rows() if idle < 2 else torch.zeros_like(source.rows())
    step = step.masked_fill(~_along(used, step.ndim, axis), torch.nan)
    rows = lengths.rows(tuple(n for n, action in enumerate((first, second)) if action != "none"))
    touched = _along(rows, grad.ndim, axis).expand(grad.shape)
    arguments = {"grad": grad, "grad_step": step, "cu_seqlens_padded": lengths.padded}
    return Built(arguments | {"first_half": first, "second_half": second}, target="grad", touched=touched)


def _along(mask: torch.Tensor, ndim: int, axis: int) -> torch.Tensor:
    return mask.view([-1 if n == axis else 1 for n in range(ndim)])


def _correct_grad(
    grad: Tensor, grad_step: Tensor, cu_seqlens_padded: Tensor, first_half: str, second_half: str
) -> None:
    axis = 1 if grad.ndim == 4 else 0
    target, source = grad.movedim(axis, 0), grad_step.movedim(axis, 0)
    for half, action in enumerate((first_half, second_half)):
        if action == "none":
            continue
        rows, rows_of_half = half_rows(cu_seqlens_padded, half)
        at, step_at = (
            row_index(rows, grad),
            row_index(rows_of_half if "none" in (first_half, second_half) else rows, grad),
        )
        target[at] = source[step_at] if action == "copy" else target[at] + source[step_at]


def _correct_grad_rule(a: Arguments) -> None:
    lengths_of(a, "cu_seqlens_padded", 2)
    check_tail(a, a["grad"].shape[1 if a["grad"].ndim == 4 else 0], 2)


_OF_HALVES = {
    "thd_read_half_tensor": HelperRecord(_build_read_half, _read_half, _read_half_rule),
    "thd_read_second_half_lse": HelperRecord(_build_read_lse, _read_lse, _read_lse_rule),
    "thd_second_half_lse_correction": HelperRecord(_build_correct_lse, _correct_lse, _correct_lse_rule, moves=False),
    "thd_out_correction": HelperRecord(_build_correct_out, _correct_out, _correct_out_rule, moves=False),
    "thd_grad_correction": HelperRecord(_build_correct_grad, _correct_grad, _correct_grad_rule, moves=False),
}


# ---- batches and lengths
#
# Helpers for a batch and its lengths, and for the head dimension of v and out.


def _build_pad_sequences(case: HelperCall, device: str) -> Built:
    lengths, generator = Lengths(case, 1, device), case.generator()
    shape = (lengths.tokens,) if case.packed else (1, lengths.tokens)
    ids, labels = (torch.randint(1, 9, shape, generator=generator).to(device) for _ in range(2))
    arguments = {"input_ids": ids, "labels": labels, "cu_seqlens": lengths.padded}
    factor = 2 * case.cp_size
    arguments |= {"divisibility_factor": factor, "padding_token_id": case.choices[0]}
    if device != "cpu":  # The host would have to wait for the sum of the lengths.
        arguments["padded_tokens"] = sum(-(-n // factor) * factor for n in lengths.slots) + lengths.tail
    return Built(arguments | {"padding_label_id": -100 + case.choices[1]}, lengths="cu_seqlens")


def _pad_sequences(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int,
    padding_label_id: int,
    padded_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    sequences = list(pairwise(cu_seqlens.tolist()))
    slots = [-(-(stop - start) // divisibility_factor) * divisibility_factor for start, stop in sequences]

    def padded(x: Tensor, fill: int) -> Tensor:
        values, result = x.flatten().tolist(), []
        for (start, stop), room in zip(sequences, slots, strict=True):
            result += values[start:stop] + [fill] * (room - (stop - start))
        result += values[int(cu_seqlens[-1]) :]
        size = len(result) if padded_tokens is None else padded_tokens
        result = (result + [fill] * (size - len(result)))[:size]
        return torch.tensor(result, dtype=x.dtype, device=x.device).view(*x.shape[:-1], size)

    lengths = torch.tensor([0, *accumulate(slots)], dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return padded(input_ids, padding_token_id), padded(labels, padding_label_id), lengths


def _pad_sequences_rule(a: Arguments) -> None:
    sizes, factor = lengths_of(a, "cu_seqlens"), a["divisibility_factor"]
    check_tail(a, a["input_ids"].shape[-1], 1, "cu_seqlens")
    needed = sum(-(-n // factor) * factor for n in sizes)
    require(a.get("padded_tokens", needed) >= needed, f"padded_tokens must be at least {needed}")


def _build_batch(case: HelperCall, device: str) -> Built:
    lengths, generator = Lengths(case, chunk_unit(case), device), case.generator()
    qkv_format = ("thd", "bshd", "sbhd")[case.choices[0]]
    tokens = lengths.tokens if qkv_format == "thd" else 2 * case.cp_size * (1 + case.tail)
    packed = (tokens,) if case.packed or tokens < 2 else (1, tokens)
    shape = {"thd": packed, "bshd": (2, tokens), "sbhd": (tokens, 2)}[qkv_format]
    batch: dict[str, Any] = {
        name: torch.randint(0, 99, shape, generator=generator).to(device) for name in ("tokens", "labels")
    }
    batch |= {"loss_mask": torch.rand(shape, generator=generator).to(device), "epoch": 3, "attention_mask": None}
    batch |= {"position_ids": batch["tokens"].clone()}
    padded = lengths.padded if qkv_format == "thd" else None
    return Built({"batch": batch, "qkv_format": qkv_format, "cu_seqlens_padded": padded})


def _batch_of_rank(
    batch: dict[str, Any], qkv_format: str, cu_seqlens_padded: Tensor | None, cp_size: int, rank: int
) -> dict[str, Any]:
    """One rank's part of a batch whose tensors all have the format's sequence axis."""

    def cut(x: Tensor) -> Tensor:
        axis = 1 if qkv_format == "bshd" or (qkv_format == "thd" and x.ndim == 2) else 0
        lengths = [0, x.shape[axis]] if cu_seqlens_padded is None else cu_seqlens_padded.tolist()
        return x.index_select(axis, row_index(rank_rows(lengths, x.shape[axis], cp_size, rank), x))

    return {name: cut(x) if isinstance(x, Tensor) else x for name, x in batch.items()}


def _build_rank_lengths(case: HelperCall, device: str) -> Built:
    one_half = case.choices[0] > 0
    lengths = Lengths(case, 2 * case.cp_size if one_half else chunk_unit(case), device)
    arguments = {"cu_seqlens": lengths.cumulative(lengths.real), "cu_seqlens_padded": lengths.padded}
    arguments |= {"cp_size": case.cp_size, "cp_rank": case.rank}
    return Built(arguments | {"first_half": case.choices[0] != 1, "second_half": case.choices[0] != 2})


def _rank_lengths(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int, first_half: bool, second_half: bool
) -> Tensor:
    chunks = [cp_rank] * first_half + [2 * cp_size - 1 - cp_rank] * second_half
    held = []
    for (a, b), (start, stop) in zip(pairwise(cu_seqlens.tolist()), pairwise(cu_seqlens_padded.tolist()), strict=True):
        size = (stop - start) // (2 * cp_size)
        whole = cp_size == 1 and first_half and second_half
        held.append(b - a if whole else sum(min(max(b - a - number * size, 0), size) for number in chunks))
    return torch.tensor([0, *accumulate(held)], dtype=cu_seqlens.dtype, device=cu_seqlens.device)


def _rank_lengths_rule(a: Arguments) -> None:
    one_half = a["first_half"] != a["second_half"]
    slots = lengths_of(a, "cu_seqlens_padded", 2 * a["cp_size"]) if one_half else chunk_lengths(a)
    check_fits(lengths_of(a, "cu_seqlens"), slots)


def _build_pad_v(case: HelperCall, device: str) -> Built:
    v = any_bits(case, (3, *case.dims, 4), device)
    return Built({"v": v, "d_qk": 4 + case.spare})


def _pad_v(v: Tensor, d_qk: int) -> Tensor:
    result = torch.zeros(*v.shape[:-1], d_qk, dtype=v.dtype, device=v.device)
    result[..., : v.shape[-1]] = v
    return result


def _build_trim_out(case: HelperCall, device: str) -> Built:
    out = any_bits(case, (3, *case.dims, 4 + case.spare), device)
    return Built({"out": out, "d_v": 4})


def _trim_out(out: Tensor, d_v: int) -> Tensor:
    return out.narrow(-1, 0, d_v)


_OF_BATCHES = {
    "pad_thd_sequences_for_cp": HelperRecord(_build_pad_sequences, _pad_sequences, _pad_sequences_rule),
    "get_batch_on_this_cp_rank": HelperRecord(_build_batch, _batch_of_rank),
    "get_cu_seqlens_on_cp_rank": HelperRecord(_build_rank_lengths, _rank_lengths, _rank_lengths_rule),
    "pad_v": HelperRecord(_build_pad_v, _pad_v),
    "trim_out": HelperRecord(_build_trim_out, _trim_out),
}
