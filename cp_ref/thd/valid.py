"""Real tokens among padding: how many of them a rank holds, and copying them alone."""

from __future__ import annotations

import torch

from cp_ref.common.thd import declared_valid
from cp_ref.common.thd.checks import check_counted, check_fits, check_leaf, check_room
from cp_ref.common.thd.row_tables import is_valid, rank_lengths
from cp_ref.common.wide_dtype import as_integers
from cp_ref.spec import check_apart
from cp_ref.thd.packed_lengths import end_of, lengths_on

__all__ = ["get_cu_seqlens_on_cp_rank", "thd_copy_valid_tokens_from_per_split_to_rank_local"]


@declared_valid.get_cu_seqlens_on_cp_rank
def get_cu_seqlens_on_cp_rank(
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> torch.Tensor:
    declared_valid.check_rank_lengths(cu_seqlens, cu_seqlens_padded, cp_size, cp_rank, first_half, second_half)
    real = lengths_on("cu_seqlens", cu_seqlens, cu_seqlens.device)
    padded = lengths_on("cu_seqlens_padded", cu_seqlens_padded, cu_seqlens.device)
    check_counted(padded.diff(), cp_size, first_half, second_half)
    check_fits(real.diff(), padded.diff())
    if cp_size == 1 and first_half and second_half:
        return cu_seqlens.clone()
    return rank_lengths(real, padded, cp_size, cp_rank, first_half, second_half).to(cu_seqlens.dtype)


@declared_valid.thd_copy_valid_tokens_from_per_split_to_rank_local
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    declared_valid.check_copy(out, inp, cu_seqlens_padded, cu_seqlens)
    check_leaf("out", out)
    padded = _moved_lengths_on("cu_seqlens_padded", cu_seqlens_padded, out.device)
    real = lengths_on("cu_seqlens", cu_seqlens, out.device)
    check_fits(real.diff(), padded.diff())
    check_room("out", out.shape[0], "cu_seqlens_padded", end_of(padded))
    check_apart("out", out, inp=inp)
    rows, _ = is_valid(padded, real, out.shape[0])
    moved = as_integers(inp)[rows].view(inp.dtype).to(out.dtype)
    as_integers(out)[rows] = as_integers(moved)


def _moved_lengths_on(name: str, cu_seqlens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`lengths_on` where the first entry need not be 0."""
    lengths = lengths_on(name, torch.cat([cu_seqlens.new_zeros(1), cu_seqlens[1:]]), device)
    lengths[0] = cu_seqlens[0]
    if lengths[0] < 0 or (lengths < lengths[0]).any():
        raise ValueError(f"{name} is {list(map(int, lengths))}; it must be at least 0 and must not decrease")
    return lengths
