"""Which tokens a rank holds, and the two orders of a packed buffer: operators."""

from __future__ import annotations

import torch

from cp_fast.kernels import ops_autograd  # noqa: F401  (registers the gradients)
from cp_ref.common.thd import indices
from cp_ref.common.thd.tuples import Tensors, like

__all__ = ["thd_cp_rank_order_to_sequence_order", "thd_get_partitioned_indices", "thd_sequence_order_to_cp_rank_order"]


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
