"""Reading the first or second half of every sequence: operators."""

from __future__ import annotations

import torch

from cp_fast.kernels import ops_autograd  # noqa: F401  (registers the gradients)
from cp_fast.kernels.checks import check_no_grad
from cp_ref.common.thd import halves
from cp_ref.common.thd.tuples import Tensors, like

__all__ = ["thd_read_half_tensor", "thd_read_second_half_lse"]


@halves.thd_read_half_tensor
def thd_read_half_tensor(x: Tensors, cu_seqlens_padded: torch.Tensor, half: int) -> Tensors:
    xs = halves.check_read_half(x, cu_seqlens_padded, half)
    return like(x, torch.ops.cp_attention.read_half(xs, cu_seqlens_padded, half))


@halves.thd_read_second_half_lse
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool, max_seqlen: int
) -> torch.Tensor:
    halves.check_read_second_half_lse(lse, cu_seqlens_padded, lse_packed, max_seqlen)
    check_no_grad(lse=lse)
    return torch.ops.cp_attention.read_second_half_lse(lse, cu_seqlens_padded, lse_packed, max_seqlen)
