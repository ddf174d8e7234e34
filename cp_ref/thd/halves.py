"""Reading the first or second half of every sequence."""

from __future__ import annotations

import torch

from cp_ref.common.thd import declared_halves
from cp_ref.common.thd.checks import MOST_ROWS, check_count, check_room, token_axis
from cp_ref.common.thd.row_tables import half_rows
from cp_ref.common.thd.tuples import Tensors, like
from cp_ref.common.wide_dtype import taken
from cp_ref.thd.lse import check_lse_room, lse_rows
from cp_ref.thd.packed_lengths import end_of, even_lengths_on, longest_of

__all__ = ["thd_read_half_tensor", "thd_read_second_half_lse"]


@declared_halves.thd_read_half_tensor
def thd_read_half_tensor(x: Tensors, cu_seqlens_padded: torch.Tensor, half: int) -> Tensors:
    xs = declared_halves.check_read_half(x, cu_seqlens_padded, half)
    return like(x, [_read_half(one, cu_seqlens_padded, half) for one in xs])


def _read_half(x: torch.Tensor, cu_seqlens_padded: torch.Tensor, half: int) -> torch.Tensor:
    axis = token_axis("x", x)
    lengths, tokens = even_lengths_on(cu_seqlens_padded, x.device), x.shape[axis]
    check_room("x", tokens, "cu_seqlens_padded", end_of(lengths))
    rows, _ = half_rows(lengths, tokens, half)
    return taken(x, axis, rows)


@declared_halves.thd_read_second_half_lse
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool, max_seqlen: int
) -> torch.Tensor:
    declared_halves.check_read_second_half_lse(lse, cu_seqlens_padded, lse_packed, max_seqlen)
    lengths = even_lengths_on(cu_seqlens_padded, lse.device)
    half_lengths = lengths // 2
    check_lse_room("lse", lse, lengths, lse_packed)
    needed = end_of(half_lengths) if lse_packed else longest_of(half_lengths)
    check_count("max_seqlen", max_seqlen, needed, at_most=MOST_ROWS)
    result = lse.new_zeros(*lse.shape[:-1], max_seqlen)
    rows, _ = half_rows(lengths, end_of(lengths), 1)
    source, at = lse_rows(lse, rows, lengths, lse_packed)
    target, place = lse_rows(result, torch.arange(len(rows), device=lse.device), half_lengths, lse_packed)
    target[place] = source[at]
    return result
