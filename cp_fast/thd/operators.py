"""The helpers that are one operator each: their arguments are checked by shape and dtype here, and by the values of
lengths, where they lie on the CPU, in the operator.
"""

from __future__ import annotations

import torch

from cp_fast.kernels import ops_autograd  # noqa: F401  (registers the operators and their gradients)
from cp_fast.kernels.checks import check_no_grad
from cp_ref.common.thd import corrections, halves, indices, valid
from cp_ref.common.thd.tuples import Tensors, like

__all__ = [
    "get_cu_seqlens_on_cp_rank",
    "thd_copy_valid_tokens_from_per_split_to_rank_local",
    "thd_cp_rank_order_to_sequence_order",
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
    "thd_sequence_order_to_cp_rank_order",
]


@indices.thd_get_partitioned_indices
def thd_get_partitioned_indices(
    cu_seqlens_padded: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    indices.check_partition(cu_seqlens_padded, total_tokens, cp_size, cp_rank)
    return torch.ops.cp_attention.partition_indices(cu_seqlens_padded, total_tokens, cp_size, cp_rank)


@indices.thd_sequence_order_to_cp_rank_order
def thd_sequence_order_to_cp_rank_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    xs = indices.check_reorder(x, cu_seqlens_padded, cp_size)
    return like(x, torch.ops.cp_attention.reorder(xs, cu_seqlens_padded, cp_size, True))


@indices.thd_cp_rank_order_to_sequence_order
def thd_cp_rank_order_to_sequence_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    xs = indices.check_reorder(x, cu_seqlens_padded, cp_size)
    return like(x, torch.ops.cp_attention.reorder(xs, cu_seqlens_padded, cp_size, False))


@valid.get_cu_seqlens_on_cp_rank
def get_cu_seqlens_on_cp_rank(
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> torch.Tensor:
    valid.check_rank_lengths(cu_seqlens, cu_seqlens_padded, cp_size, cp_rank, first_half, second_half)
    return torch.ops.cp_attention.rank_lengths(cu_seqlens, cu_seqlens_padded, cp_size, cp_rank, first_half, second_half)


@valid.thd_copy_valid_tokens_from_per_split_to_rank_local
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    valid.check_copy(out, inp, cu_seqlens_padded, cu_seqlens)
    check_no_grad(out=out, inp=inp)
    torch.ops.cp_attention.copy_valid_(out, inp, cu_seqlens_padded, cu_seqlens)


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
