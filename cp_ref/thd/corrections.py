"""Putting the partial results of ring steps together, in place.

Arithmetic is in float32, or in float64 where an operand is float64; the result is rounded once, when it is stored.
"""

from __future__ import annotations

import torch

from cp_ref.common.thd import corrections
from cp_ref.common.thd.checks import check_room, token_axis
from cp_ref.spec import check_apart
from cp_ref.thd.lse import check_lse_room, lse_rows
from cp_ref.thd.rows import Runs, check_leaf, read_halves, read_runs

__all__ = ["thd_grad_correction", "thd_out_correction", "thd_second_half_lse_correction"]


@corrections.thd_second_half_lse_correction
def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool
) -> None:
    corrections.check_lse_correction(lse, lse_step, cu_seqlens_padded, lse_packed)
    check_leaf("lse", lse)
    sequences = read_halves(cu_seqlens_padded, lse.device)
    halves = sequences.halved()
    check_lse_room("lse", lse, sequences, lse_packed)
    check_lse_room("lse_step", lse_step, halves, lse_packed)
    check_apart("lse", lse, lse_step=lse_step)
    whole, at = lse_rows(lse, sequences, sequences.half(1), lse_packed)
    step, step_at = lse_rows(lse_step, halves, halves, lse_packed)
    whole[at] = torch.logaddexp(whole[at], step[step_at]).to(lse.dtype)


@corrections.thd_out_correction
def thd_out_correction(
    out: torch.Tensor,
    out_step: torch.Tensor,
    lse: torch.Tensor,
    lse_step: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    corrections.check_out_correction(out, out_step, lse, lse_step, cu_seqlens_padded, only_second_half, lse_packed)
    check_leaf("out", out)
    if only_second_half:
        sequences = read_halves(cu_seqlens_padded, out.device)
        target, source = sequences.half(1), sequences.halved()
    else:
        sequences = target = source = read_runs("cu_seqlens_padded", cu_seqlens_padded, out.device)
    check_room("out", out.shape[0], "cu_seqlens_padded", sequences.end())
    check_lse_room("lse", lse, sequences, lse_packed)
    check_lse_room("lse_step", lse_step, source, lse_packed)
    check_apart("out", out, out_step=out_step, lse=lse, lse_step=lse_step)
    final, at = lse_rows(lse, sequences, target, lse_packed)
    step, step_at = lse_rows(lse_step, source, source, lse_packed)
    wide = _accumulator_dtype(out, out_step, lse, lse_step)
    weight = torch.exp(step[step_at].to(wide) - final[at].to(wide))[..., None]  # [n, h, 1]
    unseen = (step[step_at] == float("-inf"))[..., None]
    contribution = (weight * out_step[source.rows()]).masked_fill(unseen, 0.0)
    rows = target.rows()
    out[rows] = (out[rows] + contribution).to(out.dtype)


@corrections.thd_grad_correction
def thd_grad_correction(
    grad: torch.Tensor, grad_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, first_half: str, second_half: str
) -> None:
    corrections.check_grad_correction(grad, grad_step, cu_seqlens_padded, first_half, second_half)
    check_leaf("grad", grad)
    axis, sequences = token_axis("grad", grad), read_halves(cu_seqlens_padded, grad.device)
    check_room("grad", grad.shape[axis], "cu_seqlens_padded", sequences.end())
    check_apart("grad", grad, grad_step=grad_step)
    idle = (first_half, second_half).count("none")
    target, source = grad.movedim(axis, 0), grad_step.movedim(axis, 0)
    for number, action in enumerate((first_half, second_half)):
        part = sequences.half(number).rows()
        if action == "copy":
            target[part] = _halves(source, sequences, number, idle).to(grad.dtype)
        elif action == "add":
            wide = _accumulator_dtype(grad, grad_step)
            total = target[part].to(wide) + _halves(source, sequences, number, idle).to(wide)
            target[part] = total.to(grad.dtype)


def _halves(source: torch.Tensor, sequences: Runs, number: int, idle: int) -> torch.Tensor:
    """The step's rows for this half of every sequence: with one half idle, the step's tensor is the other half."""
    return source[(sequences.halved() if idle else sequences.half(number)).rows()]


def _accumulator_dtype(*operands: torch.Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in operands) else torch.float32
