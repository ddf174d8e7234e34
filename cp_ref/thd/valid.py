"""Real tokens among padding: how many of them a rank holds, and copying them alone."""

from __future__ import annotations

import torch

from cp_ref.common.thd import valid
from cp_ref.common.thd.checks import check_divisible, check_fits, check_room
from cp_ref.thd.rows import Runs, as_list, check_leaf, read_runs

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
    real = read_runs("cu_seqlens", cu_seqlens, cu_seqlens.device).sizes
    slots = read_runs("cu_seqlens_padded", cu_seqlens_padded, cu_seqlens.device).sizes
    check_divisible("cu_seqlens_padded", slots, 2 * cp_size, f"layout 'dual_chunk' at cp_size {cp_size}")
    check_fits(real, slots)
    chunk = slots // (2 * cp_size)
    held = torch.zeros_like(real)
    for number, counted in ((cp_rank, first_half), (2 * cp_size - 1 - cp_rank, second_half)):
        if counted:
            held += (real - number * chunk).clamp(min=torch.zeros_like(chunk), max=chunk)
    return torch.cat([held.new_zeros(1), held.cumsum(0)]).to(cu_seqlens.dtype)


@valid.thd_copy_valid_tokens_from_per_split_to_rank_local
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    valid.check_copy(out, inp, cu_seqlens_padded, cu_seqlens)
    check_leaf("out", out)
    slots = _read_moved_runs("cu_seqlens_padded", cu_seqlens_padded, out.device)
    real = read_runs("cu_seqlens", cu_seqlens, out.device).sizes
    check_fits(real, slots.sizes)
    check_room("out", out.shape[0], "cu_seqlens_padded", slots.end())
    rows = Runs(slots.starts, real).rows()
    out[rows] = inp[rows].to(out.dtype)


def _read_moved_runs(name: str, cu_seqlens: torch.Tensor, device: torch.device) -> Runs:
    """`read_runs` where the first entry need not be 0."""
    first = int(cu_seqlens[0])
    from_zero = read_runs(name, torch.cat([cu_seqlens.new_zeros(1), cu_seqlens[1:]]), device)
    if first < 0 or (len(cu_seqlens) > 1 and first > int(cu_seqlens[1])):
        raise ValueError(f"{name} is {as_list(cu_seqlens)}; it must be at least 0 and must not decrease")
    starts, sizes = from_zero.starts.clone(), from_zero.sizes.clone()
    starts[:1] += first
    sizes[:1] -= first
    return Runs(starts, sizes)
