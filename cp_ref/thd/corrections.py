"""Putting the partial results of ring steps together, in place.

Arithmetic is in float32, or in float64 where an operand is float64; the result is rounded once, when it is stored.
"""

from __future__ import annotations

import torch

from cp_ref.common.thd import declared_corrections
from cp_ref.common.thd.checks import check_leaf, check_room, token_axis
from cp_ref.common.thd.row_tables import half_rows
from cp_ref.common.wide_dtype import wide_dtype
from cp_ref.spec import check_apart
from cp_ref.thd.lse import check_lse_room, lse_rows
from cp_ref.thd.packed_lengths import end_of, even_lengths_on, lengths_on

__all__ = ["thd_grad_correction", "thd_out_correction", "thd_second_half_lse_correction"]


@declared_corrections.thd_second_half_lse_correction
def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool
) -> None:
    declared_corrections.check_lse_correction(lse, lse_step, cu_seqlens_padded, lse_packed)
    check_leaf("lse", lse)
    lengths = even_lengths_on(cu_seqlens_padded, lse.device)
    check_lse_room("lse", lse, lengths, lse_packed)
    check_lse_room("lse_step", lse_step, lengths // 2, lse_packed)
    check_apart("lse", lse, lse_step=lse_step)
    rows, _ = half_rows(lengths, end_of(lengths), 1)
    whole, at = lse_rows(lse, rows, lengths, lse_packed)
    step, step_at = lse_rows(lse_step, torch.arange(len(rows), device=lse.device), lengths // 2, lse_packed)
    whole[at] = torch.logaddexp(whole[at], step[step_at]).to(lse.dtype)


@declared_corrections.thd_out_correction
def thd_out_correction(
    out: torch.Tensor,
    out_step: torch.Tensor,
    lse: torch.Tensor,
    lse_step: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    declared_corrections.check_out_correction(
        out, out_step, lse, lse_step, cu_seqlens_padded, only_second_half, lse_packed
    )
    check_leaf("out", out)
    if only_second_half:
        lengths = even_lengths_on(cu_seqlens_padded, out.device)
        step_lengths = lengths // 2
    else:
        lengths = step_lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, out.device)
    check_room("out", out.shape[0], "cu_seqlens_padded", end_of(lengths))
    check_lse_room("lse", lse, lengths, lse_packed)
    check_lse_room("lse_step", lse_step, step_lengths, lse_packed)
    check_apart("out", out, out_step=out_step, lse=lse, lse_step=lse_step)
    step_rows = torch.arange(end_of(step_lengths), device=out.device)
    rows = half_rows(lengths, end_of(lengths), 1)[0] if only_second_half else step_rows
    final, at = lse_rows(lse, rows, lengths, lse_packed)
    step, step_at = lse_rows(lse_step, step_rows, step_lengths, lse_packed)
    wide = wide_dtype(out.dtype, out_step.dtype, lse.dtype, lse_step.dtype)
    weight = torch.exp(step[step_at].to(wide) - final[at].to(wide))[..., None]  # [n, h, 1]
    unseen = (step[step_at] == float("-inf"))[..., None]
    contribution = (weight * out_step[step_rows]).masked_fill(unseen, 0.0)
    out[rows] = (out[rows] + contribution).to(out.dtype)


@declared_corrections.thd_grad_correction
def thd_grad_correction(
    grad: torch.Tensor, grad_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, first_half: str, second_half: str
) -> None:
    declared_corrections.check_grad_correction(grad, grad_step, cu_seqlens_padded, first_half, second_half)
    check_leaf("grad", grad)
    axis, lengths = token_axis("grad", grad), even_lengths_on(cu_seqlens_padded, grad.device)
    check_room("grad", grad.shape[axis], "cu_seqlens_padded", end_of(lengths))
    check_apart("grad", grad, grad_step=grad_step)
    one_half = "none" in (first_half, second_half)  # then the step's tensor is the other half
    target, source = grad.movedim(axis, 0), grad_step.movedim(axis, 0)
    for number, action in enumerate((first_half, second_half)):
        rows, _ = half_rows(lengths, end_of(lengths), number)
        share = source[: len(rows)] if one_half else source[rows]
        if action == "copy":
            target[rows] = share.to(grad.dtype)
        elif action == "add":
            wide = wide_dtype(grad.dtype, grad_step.dtype)
            target[rows] = (target[rows].to(wide) + share.to(wide)).to(grad.dtype)
