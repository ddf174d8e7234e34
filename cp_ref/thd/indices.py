"""Which tokens a rank holds, and the two orders of a packed buffer."""

from __future__ import annotations

import torch

from cp_ref.common.thd import declared_indices
from cp_ref.common.thd.checks import check_chunk_lengths, check_tail
from cp_ref.common.thd.row_tables import rank_order_rows, sequence_order_rows, slice_rows
from cp_ref.common.thd.tuples import Tensors, like
from cp_ref.common.wide_dtype import taken
from cp_ref.thd.packed_lengths import end_of, lengths_on

__all__ = ["thd_cp_rank_order_to_sequence_order", "thd_get_partitioned_indices", "thd_sequence_order_to_cp_rank_order"]


@declared_indices.thd_get_partitioned_indices
def thd_get_partitioned_indices(
    cu_seqlens_padded: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    declared_indices.check_partition(cu_seqlens_padded, total_tokens, cp_size, cp_rank)
    device = cu_seqlens_padded.device
    lengths = _chunked_lengths_on(cu_seqlens_padded, device, "total_tokens", total_tokens, cp_size)
    local = torch.arange(total_tokens // cp_size, device=device)
    return slice_rows(local, cp_rank, lengths, total_tokens, cp_size).to(cu_seqlens_padded.dtype)


@declared_indices.thd_sequence_order_to_cp_rank_order
def thd_sequence_order_to_cp_rank_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    xs = declared_indices.check_reorder(x, cu_seqlens_padded, cp_size)
    tokens = xs[0].shape[0]
    lengths = _chunked_lengths_on(cu_seqlens_padded, xs[0].device, "x.shape[0]", tokens, cp_size)
    order = rank_order_rows(lengths, tokens, cp_size)
    return like(x, [taken(one, 0, order) for one in xs])


@declared_indices.thd_cp_rank_order_to_sequence_order
def thd_cp_rank_order_to_sequence_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    xs = declared_indices.check_reorder(x, cu_seqlens_padded, cp_size)
    tokens = xs[0].shape[0]
    lengths = _chunked_lengths_on(cu_seqlens_padded, xs[0].device, "x.shape[0]", tokens, cp_size)
    order = sequence_order_rows(lengths, tokens, cp_size) if cp_size > 1 else torch.arange(tokens)
    return like(x, [taken(one, 0, order) for one in xs])


def _chunked_lengths_on(
    cu_seqlens_padded: torch.Tensor, device: torch.device, name: str, tokens: int, cp_size: int
) -> torch.Tensor:
    """Lengths of sequences that divide into chunks, in a buffer of `tokens` rows whose tail divides among the ranks."""
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, device)
    check_tail(name, tokens, end_of(lengths), cp_size)
    check_chunk_lengths(lengths.diff(), cp_size)
    return lengths
