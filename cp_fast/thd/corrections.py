"""Putting the partial results of ring steps together, in place: operators."""

from __future__ import annotations

import torch

from cp_fast.kernels import ops  # noqa: F401  (registers the operators)
from cp_fast.kernels.checks import check_no_grad
from cp_ref.common.thd import corrections

__all__ = ["thd_grad_correction", "thd_out_correction", "thd_second_half_lse_correction"]


@corrections.thd_second_half_lse_correction
def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool
) -> None:
    corrections.check_lse_correction(lse, lse_step, cu_seqlens_padded, lse_packed)
    check_no_grad(lse=lse, lse_step=lse_step)
    torch.ops.cp_attention.lse_correction_(lse, lse_step, cu_seqlens_padded, lse_packed)


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
    check_no_grad(out=out, out_step=out_step, lse=lse, lse_step=lse_step)
    torch.ops.cp_attention.out_correction_(
        out, out_step, lse, lse_step, cu_seqlens_padded, only_second_half, lse_packed
    )


@corrections.thd_grad_correction
def thd_grad_correction(
    grad: torch.Tensor, grad_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, first_half: str, second_half: str
) -> None:
    corrections.check_grad_correction(grad, grad_step, cu_seqlens_padded, first_half, second_half)
    check_no_grad(grad=grad, grad_step=grad_step)
    torch.ops.cp_attention.grad_correction_(grad, grad_step, cu_seqlens_padded, first_half, second_half)
