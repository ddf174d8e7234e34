"""Reading the first or second half of every sequence."""

from __future__ import annotations

import torch

from cp_ref.common.thd import halves
from cp_ref.common.thd.checks import MOST_ROWS, check_count, check_room, token_axis
from cp_ref.common.thd.tuples import Tensors, like
from cp_ref.thd.lse import check_lse_room, lse_rows
from cp_ref.thd.rows import read_halves

__all__ = ["thd_read_half_tensor", "thd_read_second_half_lse"]


@halves.thd_read_half_tensor
def thd_read_half_tensor(x: Tensors, cu_seqlens_padded: torch.Tensor, half: int) -> Tensors:
    xs = halves.check_read_half(x, cu_seqlens_padded, half)
    return like(x, [_read_half(one, cu_seqlens_padded, half) for one in xs])


def _read_half(x: torch.Tensor, cu_seqlens_padded: torch.Tensor, half: int) -> torch.Tensor:
    axis = token_axis("x", x)
    sequences, tokens = read_halves(cu_seqlens_padded, x.device), x.shape[axis]
    check_room("x", tokens, "cu_seqlens_padded", sequences.end())
    end, tail = sequences.end(), (tokens - sequences.end()) // 2
    tail_rows = torch.arange(end + half * tail, end + (half + 1) * tail, device=x.device)
    return x.index_select(axis, torch.cat([sequences.half(half).rows(), tail_rows]))


@halves.thd_read_second_half_lse
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool, max_seqlen: int
) -> torch.Tensor:
    halves.check_read_second_half_lse(lse, cu_seqlens_padded, lse_packed, max_seqlen)
    sequences = read_halves(cu_seqlens_padded, lse.device)
    check_lse_room("lse", lse, sequences, lse_packed)
    second = sequences.halved()
    check_count("max_seqlen", max_seqlen, second.end() if lse_packed else second.longest(), at_most=MOST_ROWS)
    result = lse.new_zeros(*lse.shape[:-1], max_seqlen)
    source, at = lse_rows(lse, sequences, sequences.half(1), lse_packed)
    target, place = lse_rows(result, second, second, lse_packed)
    target[place] = source[at]
    return result
