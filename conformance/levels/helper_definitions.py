"""The definition of every THD helper, by arithmetic on row numbers.

A definition lists row numbers in plain Python, sequence by sequence, and moves or computes these rows in one step. The
arguments are those of the helper, by name; a helper that works in place changes its target here too. Where arithmetic
is done the caller passes float64.

    rows of a buffer     cu_seqlens_padded = [0, 8, 12], 14 rows: sequence 0 has rows 0-7, sequence 1 rows 8-11, the
                         tail rows 12-13
    chunk c of a sequence of n rows at cp_size p      rows c * n / (2p) up to (c + 1) * n / (2p)
    rank r of layout dual_chunk      chunks r and 2p - 1 - r of every sequence, then part r of the tail
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch

__all__ = ["DEFINITIONS", "batch_of_rank", "rank_rows"]

Tensor = torch.Tensor


def rank_rows(lengths: list[int], tokens: int, cp_size: int, rank: int) -> list[int]:
    """The global rows of one rank's slice, layout dual_chunk.

    >>> rank_rows([0, 8, 12], 14, 2, 1)
    [2, 3, 4, 5, 9, 10, 13]
    """
    rows: list[int] = []
    for start, stop in pairwise(lengths):
        chunk = (stop - start) // (2 * cp_size)
        for number in (rank, 2 * cp_size - 1 - rank):
            rows += range(start + number * chunk, start + (number + 1) * chunk)
    part = (tokens - lengths[-1]) // cp_size
    return rows + list(range(lengths[-1] + rank * part, lengths[-1] + (rank + 1) * part))


def batch_of_rank(
    batch: dict[str, Any], qkv_format: str, cu_seqlens_padded: Tensor | None, cp_size: int, rank: int
) -> dict[str, Any]:
    """One rank's part of a batch whose tensors all have the format's sequence axis."""
    axis = 1 if qkv_format == "bshd" else 0

    def cut(x: Tensor) -> Tensor:
        lengths = [0, x.shape[axis]] if cu_seqlens_padded is None else cu_seqlens_padded.tolist()
        return x.index_select(axis, _index(rank_rows(lengths, x.shape[axis], cp_size, rank), x))

    return {name: cut(x) if isinstance(x, Tensor) else x for name, x in batch.items()}


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def _partition(cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    rows = rank_rows(cu_seqlens_padded.tolist(), total_tokens, cp_size, cp_rank)
    return torch.tensor(rows, dtype=cu_seqlens_padded.dtype, device=cu_seqlens_padded.device)


def _rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int) -> Tensor:
    lengths = cu_seqlens_padded.tolist()
    rows = [row for rank in range(cp_size) for row in rank_rows(lengths, len(x), cp_size, rank)]
    return _index(rows, x)


def _to_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int) -> Tensor:
    return x[_rank_order(x, cu_seqlens_padded, cp_size)]


def _to_sequence_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int) -> Tensor:
    result = torch.empty_like(x)
    result[_rank_order(x, cu_seqlens_padded, cp_size)] = x
    return result


def _copy_valid(out: Tensor, inp: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor) -> None:
    rows: list[int] = []
    for start, (first, last) in zip(cu_seqlens_padded.tolist()[:-1], pairwise(cu_seqlens.tolist()), strict=True):
        rows += range(start, start + last - first)
    index = _index(rows, out)
    out[index] = inp[index].to(out.dtype)


def _half_rows(lengths: Tensor, half: int) -> tuple[list[int], list[int]]:
    """The rows of one half of every sequence, and the same rows in a buffer of halves alone."""
    rows, rows_of_half = [], []
    for start, stop in pairwise(lengths.tolist()):
        size = (stop - start) // 2
        rows += range(start + half * size, start + (half + 1) * size)
        rows_of_half += range(start // 2, start // 2 + size)
    return rows, rows_of_half


def _read_half(x: Tensor, cu_seqlens_padded: Tensor, half: int) -> Tensor:
    axis = 1 if x.ndim == 4 else 0
    end = int(cu_seqlens_padded[-1])
    tail = (x.shape[axis] - end) // 2
    rows = _half_rows(cu_seqlens_padded, half)[0] + list(range(end + half * tail, end + (half + 1) * tail))
    return x.index_select(axis, _index(rows, x))


def _lse_index(lse: Tensor, lengths: Tensor, lse_packed: bool, part: str) -> tuple[Tensor, ...]:
    """Where an LSE [h, t], or [b, h, s] seen as [h, b, s], holds some rows of every sequence.

    part: "second": the second half, in an LSE of whole sequences; "halves": all of an LSE of halves; "whole": all.
    """
    sequences, positions, rows = [], [], []
    for number, (start, stop) in enumerate(pairwise(lengths.tolist())):
        size = stop - start if part == "whole" else (stop - start) // 2
        first = size if part == "second" else 0
        begin = start // 2 if part == "halves" else start
        sequences += [number] * size
        positions += range(first, first + size)
        rows += range(begin + first, begin + first + size)
    return (_index(rows, lse),) if lse_packed else (_index(sequences, lse), _index(positions, lse))


def _by_head(lse: Tensor, lse_packed: bool) -> Tensor:
    """A view [h, t] or [h, b, s]."""
    return lse if lse_packed else lse.transpose(0, 1)


def _read_lse(lse: Tensor, cu_seqlens_padded: Tensor, lse_packed: bool, max_seqlen: int) -> Tensor:
    result = lse.new_zeros(*lse.shape[:-1], max_seqlen)
    source = _by_head(lse, lse_packed)[:, *_lse_index(lse, cu_seqlens_padded, lse_packed, "second")]
    _by_head(result, lse_packed)[:, *_lse_index(lse, cu_seqlens_padded, lse_packed, "halves")] = source
    return result


def _correct_lse(lse: Tensor, lse_step: Tensor, cu_seqlens_padded: Tensor, lse_packed: bool) -> None:
    whole, step = _by_head(lse, lse_packed), _by_head(lse_step, lse_packed)
    at = _lse_index(lse, cu_seqlens_padded, lse_packed, "second")
    step_at = _lse_index(lse, cu_seqlens_padded, lse_packed, "halves")
    whole[:, *at] = (whole[:, *at].exp() + step[:, *step_at].exp()).log()


def _correct_out(
    out: Tensor,
    out_step: Tensor,
    lse: Tensor,
    lse_step: Tensor,
    cu_seqlens_padded: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    if only_second_half:
        rows, step_rows = _half_rows(cu_seqlens_padded, 1)
    else:
        rows = step_rows = list(range(int(cu_seqlens_padded[-1])))
    parts = ("second", "halves") if only_second_half else ("whole", "whole")
    final, step = (
        _by_head(x, lse_packed)[:, *_lse_index(x, cu_seqlens_padded, lse_packed, part)].t()[..., None]
        for x, part in zip((lse, lse_step), parts, strict=True)
    )
    share = torch.exp(step - final) * out_step[_index(step_rows, out)]
    out[_index(rows, out)] += torch.where(step == -torch.inf, 0.0, share)


def _correct_grad(
    grad: Tensor, grad_step: Tensor, cu_seqlens_padded: Tensor, first_half: str, second_half: str
) -> None:
    axis = 1 if grad.ndim == 4 else 0
    target, source = grad.movedim(axis, 0), grad_step.movedim(axis, 0)
    for half, action in enumerate((first_half, second_half)):
        if action == "none":
            continue
        rows, rows_of_half = _half_rows(cu_seqlens_padded, half)
        at, step_at = _index(rows, grad), _index(rows_of_half if "none" in (first_half, second_half) else rows, grad)
        target[at] = source[step_at] if action == "copy" else target[at] + source[step_at]


def _pad_sequences(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int,
    padding_label_id: int,
    padded_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    sequences = list(pairwise(cu_seqlens.tolist()))
    slots = [-(-(stop - start) // divisibility_factor) * divisibility_factor for start, stop in sequences]

    def padded(x: Tensor, fill: int) -> Tensor:
        values, result = x.tolist(), []
        for (start, stop), room in zip(sequences, slots, strict=True):
            result += values[start:stop] + [fill] * (room - (stop - start))
        result += values[int(cu_seqlens[-1]) :]
        size = len(result) if padded_tokens is None else padded_tokens
        result = (result + [fill] * (size - len(result)))[:size]
        return torch.tensor(result, dtype=x.dtype, device=x.device)

    lengths = torch.tensor([0, *accumulate(slots)], dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return padded(input_ids, padding_token_id), padded(labels, padding_label_id), lengths


def _rank_lengths(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int, first_half: bool, second_half: bool
) -> Tensor:
    chunks = [cp_rank] * first_half + [2 * cp_size - 1 - cp_rank] * second_half
    held = []
    for (a, b), (start, stop) in zip(pairwise(cu_seqlens.tolist()), pairwise(cu_seqlens_padded.tolist()), strict=True):
        size = (stop - start) // (2 * cp_size)
        held.append(sum(min(max(b - a - number * size, 0), size) for number in chunks))
    return torch.tensor([0, *accumulate(held)], dtype=cu_seqlens.dtype, device=cu_seqlens.device)


def _pad_v(v: Tensor, d_qk: int) -> Tensor:
    result = torch.zeros(*v.shape[:-1], d_qk, dtype=v.dtype, device=v.device)
    result[..., : v.shape[-1]] = v
    return result


def _trim_out(out: Tensor, d_v: int) -> Tensor:
    return out.narrow(-1, 0, d_v)


DEFINITIONS: dict[str, Callable[..., Any]] = {
    "thd_get_partitioned_indices": _partition,
    "thd_sequence_order_to_cp_rank_order": _to_rank_order,
    "thd_cp_rank_order_to_sequence_order": _to_sequence_order,
    "thd_copy_valid_tokens_from_per_split_to_rank_local": _copy_valid,
    "thd_read_half_tensor": _read_half,
    "thd_read_second_half_lse": _read_lse,
    "thd_second_half_lse_correction": _correct_lse,
    "thd_out_correction": _correct_out,
    "thd_grad_correction": _correct_grad,
    "pad_thd_sequences_for_cp": _pad_sequences,
    "get_cu_seqlens_on_cp_rank": _rank_lengths,
    "pad_v": _pad_v,
    "trim_out": _trim_out,
}
