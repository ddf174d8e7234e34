"""Real tokens among padding: how many of them a rank holds, and copying them alone: operators."""

from __future__ import annotations

import torch

from cp_fast.kernels import ops  # noqa: F401  (registers the operators)
from cp_fast.kernels.checks import check_no_grad
from cp_ref.common.thd import valid

__all__ = ["get_cu_seqlens_on_cp_rank", "thd_copy_valid_tokens_from_per_split_to_rank_local"]


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
