"""Which tokens a rank holds, and the two orders of a packed buffer."""

from __future__ import annotations

import torch

from cp_ref.common.thd import indices
from cp_ref.common.thd.checks import check_divisible, check_tail
from cp_ref.common.thd.tuples import Tensors, like
from cp_ref.thd.rows import Runs, read_runs

__all__ = ["thd_cp_rank_order_to_sequence_order", "thd_get_partitioned_indices", "thd_sequence_order_to_cp_rank_order"]


@indices.thd_get_partitioned_indices
def thd_get_partitioned_indices(
    cu_seqlens_padded: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    indices.check_partition(cu_seqlens_padded, total_tokens, cp_size, cp_rank)
    sequences = _read_chunked(cu_seqlens_padded, cu_seqlens_padded.device, "total_tokens", total_tokens, cp_size)
    return _slice_rows(sequences, total_tokens, cp_size, cp_rank).to(cu_seqlens_padded.dtype)


@indices.thd_sequence_order_to_cp_rank_order
def thd_sequence_order_to_cp_rank_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    xs = indices.check_reorder(x, cu_seqlens_padded, cp_size)
    order = _rank_order(xs[0], cu_seqlens_padded, cp_size)
    return like(x, [one.index_select(0, order) for one in xs])


@indices.thd_cp_rank_order_to_sequence_order
def thd_cp_rank_order_to_sequence_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    xs = indices.check_reorder(x, cu_seqlens_padded, cp_size)
    order = _rank_order(xs[0], cu_seqlens_padded, cp_size).argsort()
    return like(x, [one.index_select(0, order) for one in xs])


def _rank_order(x: torch.Tensor, cu_seqlens_padded: torch.Tensor, cp_size: int) -> torch.Tensor:
    """The global row of every row of CP rank order, int64 [t]."""
    sequences = _read_chunked(cu_seqlens_padded, x.device, "x.shape[0]", x.shape[0], cp_size)
    return torch.cat([_slice_rows(sequences, x.shape[0], cp_size, rank) for rank in range(cp_size)])


def _read_chunked(cu_seqlens_padded: torch.Tensor, device: torch.device, name: str, tokens: int, cp_size: int) -> Runs:
    """Sequences that divide into chunks, in a buffer of `tokens` rows whose tail divides among the ranks."""
    sequences = read_runs("cu_seqlens_padded", cu_seqlens_padded, device)
    check_tail(name, tokens, sequences.end(), cp_size)
    check_divisible("cu_seqlens_padded", sequences.sizes, 2 * cp_size, f"layout 'dual_chunk' at cp_size {cp_size}")
    return sequences


def _slice_rows(sequences: Runs, tokens: int, cp_size: int, rank: int) -> torch.Tensor:
    """The global rows of a rank's slice: two chunks of every sequence, and its part of the tail."""
    chunk, tail = sequences.sizes // (2 * cp_size), (tokens - sequences.end()) // cp_size
    early = sequences.starts + rank * chunk
    late = sequences.starts + (2 * cp_size - 1 - rank) * chunk
    both = Runs(torch.stack([early, late], dim=1).flatten(), chunk.repeat_interleave(2))
    first = sequences.end() + rank * tail
    return torch.cat([both.rows(), torch.arange(first, first + tail, device=chunk.device)])
