"""The helpers that are one operator each, which checks its arguments."""

from __future__ import annotations

import torch

from cp_fast.thd.kinds import call
from cp_ref.common.thd import declared_corrections, declared_halves, declared_indices, declared_valid
from cp_ref.common.thd.tuples import Tensors, as_list, like

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


@declared_indices.thd_get_partitioned_indices
def thd_get_partitioned_indices(
    cu_seqlens_padded: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    return call("partition_indices", cu_seqlens_padded, total_tokens, cp_size, cp_rank)


@declared_indices.thd_sequence_order_to_cp_rank_order
def thd_sequence_order_to_cp_rank_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    return like(x, call("reorder", as_list(x), cu_seqlens_padded, cp_size, True))


@declared_indices.thd_cp_rank_order_to_sequence_order
def thd_cp_rank_order_to_sequence_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    return like(x, call("reorder", as_list(x), cu_seqlens_padded, cp_size, False))


@declared_valid.get_cu_seqlens_on_cp_rank
def get_cu_seqlens_on_cp_rank(
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> torch.Tensor:
    return call("rank_lengths", cu_seqlens, cu_seqlens_padded, cp_size, cp_rank, first_half, second_half)


@declared_valid.thd_copy_valid_tokens_from_per_split_to_rank_local
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    call("copy_valid_", out, inp, cu_seqlens_padded, cu_seqlens)


@declared_halves.thd_read_half_tensor
def thd_read_half_tensor(x: Tensors, cu_seqlens_padded: torch.Tensor, half: int) -> Tensors:
    return like(x, call("read_half", as_list(x), cu_seqlens_padded, half))


@declared_halves.thd_read_second_half_lse
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool, max_seqlen: int
) -> torch.Tensor:
    return call("read_second_half_lse", lse, cu_seqlens_padded, lse_packed, max_seqlen)


@declared_corrections.thd_second_half_lse_correction
def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool
) -> None:
    call("lse_correction_", lse, lse_step, cu_seqlens_padded, lse_packed)


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
    call("out_correction_", out, out_step, lse, lse_step, cu_seqlens_padded, only_second_half, lse_packed)


@declared_corrections.thd_grad_correction
def thd_grad_correction(
    grad: torch.Tensor, grad_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, first_half: str, second_half: str
) -> None:
    call("grad_correction_", grad, grad_step, cu_seqlens_padded, first_half, second_half)
