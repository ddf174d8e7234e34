"""Real tokens among padding: how many of them a rank holds, and copying them alone.

A sequence of 5 real tokens in 8 slots, cp_size 2. Rank r holds chunks r and 3 - r, and of each the real part:

    slots     0 1 | 2 3 | 4 . | . .        rank 0:  0 1 . .     chunks 0 and 3, 2 + 0 real tokens
    chunk      0     1     2     3         rank 1:  2 3 4 .     chunks 1 and 2, 2 + 1 real tokens

The real tokens of a slice come before its padding: a rank's early chunk has padding only if its late chunk has
nothing else.
"""

from __future__ import annotations

import torch

from cp_ref.spec.overlap import check_apart
from cp_ref.thd.rows import (
    FLOATS,
    Runs,
    as_list,
    check_count,
    check_divisible,
    check_flag,
    check_tensor,
    check_written,
    read_runs,
)

__all__ = ["get_cu_seqlens_on_cp_rank", "thd_copy_valid_tokens_from_per_split_to_rank_local"]


def get_cu_seqlens_on_cp_rank(
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> torch.Tensor:
    """How many real tokens of each sequence a rank holds, in either or both of its chunks, as cumulative lengths.

    With n real tokens in P slots, and chunks of L = P / (2 * cp_size) slots, the chunk number c has
    min(max(n - c * L, 0), L) of them; the rank's first half is chunk c = cp_rank, its second 2 * cp_size - 1 - cp_rank.

    Args:
        cu_seqlens: GLOBAL cumulative lengths of the real tokens, int32 or int64 [b + 1].
        cu_seqlens_padded: GLOBAL cumulative lengths with padding, int32 or int64 [b + 1]; each length is a multiple of
            2 * cp_size, and not less than the real one.
        cp_size, cp_rank: the number of ranks, and which one.
        first_half, second_half: whether to count the rank's early chunk, and its late one.

    Returns:
        [b + 1], of cu_seqlens' dtype and device: the cumulative numbers of real tokens. Where they lie in the slice is
        said by cu_seqlens_padded // cp_size (of a half tensor: that // 2).

    Raises:
        ValueError, TypeError: a length does not divide, or is less than the real one (naming the sequence).

    TransformerEngine: `get_cu_seqlens_on_cp_rank`, but there the padded lengths are the rank's own (these, divided by
    cp_size). Such a call with real tokens beyond a rank's share is refused here.

    >>> five_of_eight = torch.tensor([0, 5]), torch.tensor([0, 8])           # the picture above
    >>> get_cu_seqlens_on_cp_rank(*five_of_eight, cp_size=2, cp_rank=1, first_half=True, second_half=True).tolist()
    [0, 3]
    >>> get_cu_seqlens_on_cp_rank(*five_of_eight, cp_size=2, cp_rank=1, first_half=False, second_half=True).tolist()
    [0, 1]
    """
    check_count("cp_size", cp_size, 1)
    check_count("cp_rank", cp_rank, 0, below=cp_size)
    check_flag("first_half", first_half)
    check_flag("second_half", second_half)
    device = torch.device(getattr(cu_seqlens, "device", "cpu"))
    real = read_runs("cu_seqlens", cu_seqlens, device).sizes
    sequences = read_runs("cu_seqlens_padded", cu_seqlens_padded, device)
    check_divisible("cu_seqlens_padded", sequences, 2 * cp_size, f"layout 'dual_chunk' at cp_size {cp_size}")
    _check_fits(real, sequences.sizes)
    chunk = sequences.sizes // (2 * cp_size)
    held = torch.zeros_like(real)
    for number, counted in ((cp_rank, first_half), (2 * cp_size - 1 - cp_rank, second_half)):
        if counted:
            held += (real - number * chunk).clamp(min=torch.zeros_like(chunk), max=chunk)
    return torch.cat([held.new_zeros(1), held.cumsum(0)]).to(cu_seqlens.dtype)


def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    """Copy each sequence's valid tokens from a step's result into the rank's accumulator, in place.

    The all-gather schedule attends twice over the whole local slice, once for the early chunks and once for the late
    ones; each result is right in its own rows, and anything elsewhere. This takes over what is right:

        slice, local            0 1 2 3 | 4 5          sequences of 4 and 2 slots, chunks of 2 and 1
        early chunks            x x . . | x .          cu_seqlens_padded [0, 4, 6]
        late chunks             . . x x | . x          cu_seqlens_padded [2, 5, 6]: each start moved by a chunk

    Args:
        out: [t, ...]. Changed in place: rows cu_seqlens_padded[s] to cu_seqlens_padded[s] + n[s] - 1 for every sequence
            s, n[s] its number of valid tokens; nothing else, not padding, not the tail.
        inp: of out's shape. Of out's dtype (any), or both are floating point, and values are converted (bfloat16
            results into a float32 accumulator).
        cu_seqlens_padded: LOCAL: where each sequence's tokens begin in out and inp, int32 or int64 [b + 1]. It may
            begin past 0.
        cu_seqlens: LOCAL: cumulative numbers of valid tokens, int32 or int64 [b + 1], from 0.

    Raises:
        ValueError, TypeError: more valid tokens than slots (naming the sequence), shapes or dtypes that do not fit, or
            out and inp that overlap in memory.

    TransformerEngine: `tex.thd_copy_valid_tokens_from_per_split_to_rank_local`.

    >>> out = torch.zeros(6, dtype=torch.int64)
    >>> thd_copy_valid_tokens_from_per_split_to_rank_local(
    ...     out, torch.tensor([10, 11, 12, 13, 20, 21]), torch.tensor([2, 5, 6]), torch.tensor([0, 2, 3])
    ... )
    >>> out.tolist()                                                        # the late chunks of the picture
    [0, 0, 12, 13, 0, 21]
    """
    check_tensor("out", out)
    check_tensor("inp", inp)
    check_written("out", out)
    if out.ndim == 0 or inp.shape != out.shape:
        raise ValueError(f"inp has shape {list(inp.shape)} and out {list(out.shape)}; both must be [t, ...]")
    if inp.dtype != out.dtype and not (inp.dtype in FLOATS and out.dtype in FLOATS):
        raise TypeError(
            f"inp has dtype {inp.dtype} and out {out.dtype}; they must be equal, or both among float16, bfloat16, "
            "float32, float64"
        )
    slots = _read_moved_runs("cu_seqlens_padded", cu_seqlens_padded, out.device)
    real = read_runs("cu_seqlens", cu_seqlens, out.device).sizes
    _check_fits(real, slots.sizes)
    if out.shape[0] < slots.end():
        raise ValueError(f"out has {out.shape[0]} tokens, fewer than cu_seqlens_padded[-1] = {slots.end()}")
    check_apart("out", out, inp=inp)
    rows = Runs(slots.starts, real).rows()
    out[rows] = inp[rows].to(out.dtype)


def _read_moved_runs(name: str, cu_seqlens: torch.Tensor, device: torch.device) -> Runs:
    """`read_runs` where the first entry need not be 0."""
    check_tensor(name, cu_seqlens)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
        return read_runs(name, cu_seqlens, device)  # which refuses it
    first = int(cu_seqlens[0])
    from_zero = read_runs(name, torch.cat([cu_seqlens.new_zeros(1), cu_seqlens[1:]]), device)
    if first < 0 or (len(cu_seqlens) > 1 and first > int(cu_seqlens[1])):
        raise ValueError(f"{name} is {as_list(cu_seqlens)}; it must be at least 0 and must not decrease")
    starts, sizes = from_zero.starts.clone(), from_zero.sizes.clone()
    starts[:1] += first
    sizes[:1] -= first
    return Runs(starts, sizes)


def _check_fits(real: torch.Tensor, slots: torch.Tensor) -> None:
    """Every sequence has room for its real tokens."""
    if len(real) != len(slots):
        raise ValueError(
            f"cu_seqlens has {len(real) + 1} entries and cu_seqlens_padded has {len(slots) + 1}; they must be equal"
        )
    for number, (tokens, room) in enumerate(zip(as_list(real), as_list(slots), strict=True)):
        if tokens > room:
            raise ValueError(
                f"cu_seqlens_padded gives sequence {number} {room} slots, but it has {tokens} tokens by cu_seqlens; "
                "padding must not be negative"
            )
