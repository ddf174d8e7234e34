"""The arguments of one call of every THD helper, from a `Helper` case, as a table.

Lengths are GLOBAL or LOCAL, as the helper needs them (see `cp_ref.thd`). A unit of `slots` is 2 * cp_size tokens for
helpers that know ranks, 2 tokens (one for each half) for helpers that know halves, and 1 token for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from conformance.dtypes import dtype_of, wide_dtype
from conformance.levels.helper_values import (
    Lengths,
    any_bits,
    generator_of,
    halved,
    lse_sizes,
    normal,
    random_lse,
)

if TYPE_CHECKING:
    from conformance.levels.helpers import Helper

__all__ = ["HELPERS", "MOVED_DTYPES", "Built", "HelperCall"]

MOVED_DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int8",
    "uint8",
    "bool",
)
_ACTIONS = ("add", "copy", "none")


@dataclass
class Built:
    """A call: its keyword arguments; the argument changed in place, and the values of it that may change; the lengths
    that can be spoiled.
    """

    arguments: dict[str, Any]
    target: str = ""
    touched: torch.Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.bool))
    lengths: str = "cu_seqlens_padded"


@dataclass(frozen=True)
class HelperCall:
    """A helper: how to build a call of it, whether it only moves data, and whether its lengths can be spoiled."""

    build: Callable[[Helper, str], Built]
    moves: bool = True
    lengths: bool = True


def _indices(case: Helper, device: str) -> Built:
    lengths = Lengths(case, 2 * case.cp_size, device)
    arguments = {"cu_seqlens_padded": lengths.padded, "total_tokens": lengths.tokens}
    return Built(arguments | {"cp_size": case.cp_size, "cp_rank": case.rank})


def _reorder(case: Helper, device: str) -> Built:
    lengths = Lengths(case, 2 * case.cp_size, device)
    x = any_bits(case, (lengths.tokens, *case.dims), device)
    return Built({"x": x, "cu_seqlens_padded": lengths.padded, "cp_size": case.cp_size})


def _copy_valid(case: Helper, device: str) -> Built:
    lengths, generator = Lengths(case, 2, device), generator_of(case)
    shape = (lengths.tokens, *case.dims)
    out, inp = (any_bits(case, shape, device, generator) for _ in range(2))
    arguments = {"out": out, "inp": inp, "cu_seqlens_padded": lengths.padded}
    return Built(arguments | {"cu_seqlens": lengths.cumulative(lengths.real)}, target="out", lengths="cu_seqlens")


def _token_shape(case: Helper, tokens: int) -> tuple[int, ...]:
    """[t], [t, d], [t, h, d] or, if `packed` is not set, [2, t, h, d]."""
    shape = (tokens, *case.dims)
    return (2, *shape) if len(case.dims) == 2 and not case.packed else shape


def _read_half(case: Helper, device: str) -> Built:
    lengths = Lengths(case, 2, device)
    x = any_bits(case, _token_shape(case, lengths.tokens), device)
    return Built({"x": x, "cu_seqlens_padded": lengths.padded, "half": case.choices[0] % 2})


def _read_lse(case: Helper, device: str) -> Built:
    lengths = Lengths(case, 2, device)
    shape, room = lse_sizes(case, lengths)
    known = lengths.lse_values(shape[-2], room, case.packed, (1,))
    lse = random_lse(shape, known, generator_of(case), wide_dtype(case.dtype), device)
    needed = lengths.starts[-1] // 2 if case.packed else max(lengths.slots, default=0) // 2
    arguments = {"lse": lse, "cu_seqlens_padded": lengths.padded, "lse_packed": case.packed}
    return Built(arguments | {"max_seqlen": needed + case.spare})


def _correct_lse(case: Helper, device: str) -> Built:
    lengths, generator = Lengths(case, 2, device), generator_of(case)
    halves = halved(case, lengths, device)
    shape, room = lse_sizes(case, lengths)
    step_shape, step_room = lse_sizes(case, lengths, half=True)
    touched = lengths.lse_values(shape[-2], room, case.packed, (1,))
    lse = random_lse(shape, torch.ones_like(touched), generator, wide_dtype(case.dtype), device)
    known = halves.lse_values(shape[-2], step_room, case.packed)
    step = random_lse(step_shape, known, generator, wide_dtype(case.dtype), device)
    arguments = {"lse": lse, "lse_step": step, "cu_seqlens_padded": lengths.padded, "lse_packed": case.packed}
    return Built(arguments, target="lse", touched=touched)


def _correct_out(case: Helper, device: str) -> Built:
    lengths, generator = Lengths(case, 2, device), generator_of(case)
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


def _with_heads(case: Helper, heads: int) -> Helper:
    return replace(case, dims=(heads,))


def _target_dtype(case: Helper) -> torch.dtype:
    """The dtype of the result that a step's part is added to."""
    return wide_dtype(case.dtype) if case.wide else dtype_of(case.dtype)


def _correct_grad(case: Helper, device: str) -> Built:
    lengths, generator = Lengths(case, 2, device), generator_of(case)
    first, second = (_ACTIONS[choice] for choice in case.choices)
    idle = (first, second).count("none")
    source = halved(case, lengths, device) if idle == 1 else lengths
    grad = normal(_token_shape(case, lengths.tokens), generator, _target_dtype(case), device)
    step = normal(_token_shape(case, source.tokens), generator, dtype_of(case.dtype), device)
    axis = 1 if grad.ndim == 4 else 0
    used = source.rows() if idle < 2 else torch.zeros_like(source.rows())
    step = step.masked_fill(~_along(used, step.ndim, axis), torch.nan)
    rows = lengths.rows(tuple(n for n, action in enumerate((first, second)) if action != "none"))
    touched = _along(rows, grad.ndim, axis).expand(grad.shape)
    arguments = {"grad": grad, "grad_step": step, "cu_seqlens_padded": lengths.padded}
    return Built(arguments | {"first_half": first, "second_half": second}, target="grad", touched=touched)


def _along(mask: torch.Tensor, ndim: int, axis: int) -> torch.Tensor:
    return mask.view([-1 if n == axis else 1 for n in range(ndim)])


def _pad_sequences(case: Helper, device: str) -> Built:
    lengths, generator = Lengths(case, 1, device), generator_of(case)
    ids, labels = (torch.randint(1, 9, (lengths.tokens,), generator=generator).to(device) for _ in range(2))
    arguments = {"input_ids": ids, "labels": labels, "cu_seqlens": lengths.padded}
    factor = 2 * case.cp_size
    arguments |= {"divisibility_factor": factor, "padding_token_id": case.choices[0]}
    if device != "cpu":  # The host would have to wait for the sum of the lengths.
        arguments["padded_tokens"] = sum(-(-n // factor) * factor for n in lengths.slots) + lengths.tail
    return Built(arguments | {"padding_label_id": -100 + case.choices[1]}, lengths="cu_seqlens")


def _batch(case: Helper, device: str) -> Built:
    lengths, generator = Lengths(case, 2 * case.cp_size, device), generator_of(case)
    qkv_format = ("thd", "bshd", "sbhd")[case.choices[0]]
    tokens = lengths.tokens if qkv_format == "thd" else 2 * case.cp_size * (1 + case.tail)
    shape = {"thd": (tokens,), "bshd": (2, tokens), "sbhd": (tokens, 2)}[qkv_format]
    batch: dict[str, Any] = {
        name: torch.randint(0, 99, shape, generator=generator).to(device) for name in ("tokens", "labels")
    }
    batch |= {"loss_mask": torch.rand(shape, generator=generator).to(device), "epoch": 3, "attention_mask": None}
    padded = lengths.padded if qkv_format == "thd" else None
    return Built({"batch": batch, "qkv_format": qkv_format, "cu_seqlens_padded": padded})


def _local_lengths(case: Helper, device: str) -> Built:
    lengths = Lengths(case, 2 * case.cp_size, device)
    arguments = {"cu_seqlens": lengths.cumulative(lengths.real), "cu_seqlens_padded": lengths.padded}
    arguments |= {"cp_size": case.cp_size, "cp_rank": case.rank}
    return Built(arguments | {"first_half": case.choices[0] != 1, "second_half": case.choices[0] != 2})


def _pad_v(case: Helper, device: str) -> Built:
    v = any_bits(case, (3, *case.dims, 4), device)
    return Built({"v": v, "d_qk": 4 + case.spare})


def _trim_out(case: Helper, device: str) -> Built:
    out = any_bits(case, (3, *case.dims, 4 + case.spare), device)
    return Built({"out": out, "d_v": 4})


HELPERS: dict[str, HelperCall] = {
    "thd_get_partitioned_indices": HelperCall(_indices),
    "thd_sequence_order_to_cp_rank_order": HelperCall(_reorder),
    "thd_cp_rank_order_to_sequence_order": HelperCall(_reorder),
    "thd_copy_valid_tokens_from_per_split_to_rank_local": HelperCall(_copy_valid),
    "thd_read_half_tensor": HelperCall(_read_half),
    "thd_read_second_half_lse": HelperCall(_read_lse),
    "thd_second_half_lse_correction": HelperCall(_correct_lse, moves=False),
    "thd_out_correction": HelperCall(_correct_out, moves=False),
    "thd_grad_correction": HelperCall(_correct_grad, moves=False),
    "pad_thd_sequences_for_cp": HelperCall(_pad_sequences),
    "get_batch_on_this_cp_rank": HelperCall(_batch, lengths=False),
    "get_cu_seqlens_on_cp_rank": HelperCall(_local_lengths),
    "pad_v": HelperCall(_pad_v, lengths=False),
    "trim_out": HelperCall(_trim_out, lengths=False),
}
