"""Helpers for the halves of every sequence, in a ring: read one half; put the results of one step into the sums of all
steps, which are LSEs, outputs and gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from conformance.dtypes import dtype_of, wide_dtype
from conformance.levels.helpers.helper_record import Arguments, Built, HelperRecord
from conformance.levels.helpers.length_rules import check_lse, check_tail, lengths_of, require
from conformance.levels.helpers.row_numbers import by_head, half_rows, lse_index, row_index
from conformance.levels.helpers.values import (
    Lengths,
    any_bits,
    generator_of,
    halved,
    lse_sizes,
    normal,
    random_lse,
    token_shape,
)

if TYPE_CHECKING:
    from conformance.levels.helpers.helper_case import Helper

__all__ = ["HELPERS"]

_ACTIONS = ("add", "copy", "none")


def _build_read_half(case: Helper, device: str) -> Built:
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


def _build_read_lse(case: Helper, device: str) -> Built:
    lengths = Lengths(case, 2, device)
    shape, room = lse_sizes(case, lengths)
    known = lengths.lse_values(shape[-2], room, case.packed, (1,))
    lse = random_lse(shape, known, generator_of(case), wide_dtype(case.dtype), device)
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


def _build_correct_lse(case: Helper, device: str) -> Built:
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


def _correct_lse(lse: Tensor, lse_step: Tensor, cu_seqlens_padded: Tensor, lse_packed: bool) -> None:
    whole, step = by_head(lse, lse_packed), by_head(lse_step, lse_packed)
    at = lse_index(lse, cu_seqlens_padded, lse_packed, "second")
    step_at = lse_index(lse, cu_seqlens_padded, lse_packed, "halves")
    whole[:, *at] = (whole[:, *at].exp() + step[:, *step_at].exp()).log()


def _correct_lse_rule(a: Arguments) -> None:
    sizes, packed = lengths_of(a, "cu_seqlens_padded", 2), a["lse_packed"]
    check_lse(a["lse"], packed, sizes)
    check_lse(a["lse_step"], packed, [n // 2 for n in sizes], a["lse"].shape[-1] // 2)


def _build_correct_out(case: Helper, device: str) -> Built:
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


def _build_correct_grad(case: Helper, device: str) -> Built:
    lengths, generator = Lengths(case, 2, device), generator_of(case)
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


HELPERS = {
    "thd_read_half_tensor": HelperRecord(_build_read_half, _read_half, _read_half_rule),
    "thd_read_second_half_lse": HelperRecord(_build_read_lse, _read_lse, _read_lse_rule),
    "thd_second_half_lse_correction": HelperRecord(_build_correct_lse, _correct_lse, _correct_lse_rule, moves=False),
    "thd_out_correction": HelperRecord(_build_correct_out, _correct_out, _correct_out_rule, moves=False),
    "thd_grad_correction": HelperRecord(_build_correct_grad, _correct_grad, _correct_grad_rule, moves=False),
}
