"""Helpers for packed sequences (thd): the small steps of context-parallel attention on variable lengths.

A packed buffer concatenates its sequences, each with its padding, and may end with a tail of unused rows. Layout
dual_chunk cuts each sequence in 2 * cp_size chunks: rank r holds chunk r and chunk 2 * cp_size - 1 - r of each, then
its part of the tail. On two ranks:

    cu_seqlens_padded = [0, 8, 12], 14 rows

    row         0 1   2 3   4 5   6 7  |  8   9  10  11  |  12  13
    sequence    0 0   0 0   0 0   0 0  |  1   1   1   1  |   tail
    chunk        0     1     2     3   |  0   1   2   3  |
    rank         0     1     1     0   |  0   1   1   0  |   0   1

GLOBAL lengths are those of the whole packed buffer. LOCAL lengths are those of a rank's slice: the global ones divided
by cp_size. So the two chunks that a rank holds of a sequence are the two halves of the sequence in its slice.

Every helper is written out here: a loop over the sequences lists the rows that it reads or changes, as ranges, and
one step gathers, writes, adds or merges these rows and no others. `cp_ref.thd_helpers` declares the helpers, with
a worked example of each, and has the checks of shapes and dtypes. `cp_fast.thd` computes the same rows without loops,
and shares no line of this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch

from cp_ref.batches.sharding import shard
from cp_ref.batches.tensors import as_integers, taken, wide_dtype
from cp_ref.calls.declared import refuse_names
from cp_ref.calls.plan_arguments import check_plan
from cp_ref.problems.call_checks import check_apart, check_context
from cp_ref.reference.reference_plan import ContextParallel
from cp_ref.schedules.values import check_choice, differences, read_lengths
from cp_ref.schedules.words import QKV_FORMATS
from cp_ref.thd_helpers import thd_batches, thd_corrections, thd_indices
from cp_ref.thd_helpers.thd_checks import (
    MOST_ROWS,
    Tensors,
    check_chunk_lengths,
    check_columns,
    check_count,
    check_counted,
    check_divisible,
    check_fits,
    check_leaf,
    check_room,
    check_tail,
    like,
    pad_v,
    token_axis,
    trim_out,
)

__all__ = [
    "get_batch_on_this_cp_rank",
    "get_cu_seqlens_on_cp_rank",
    "pad_thd_sequences_for_cp",
    "pad_v",
    "thd_copy_valid_tokens_from_per_split_to_rank_local",
    "thd_cp_rank_order_to_sequence_order",
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
    "thd_sequence_order_to_cp_rank_order",
    "trim_out",
]

Lengths = list[int]  # cumulative, [b + 1]

_INSTEAD = "cp_ref.position_ids(cp=cp, qkv_format='thd', cu_seqlens_padded=...) gives the positions of this rank's rows"
__getattr__ = refuse_names(
    __name__, {"generate_positional_ids_for_cp": f"{_INSTEAD}, or of the whole batch over one rank"}
)


# ---- Lengths and rows.


def _read(name: str, cu_seqlens: torch.Tensor, device: torch.device) -> Lengths:
    """Cumulative lengths of data on `device`.

    Raises:
        ValueError, TypeError: naming the argument, its value and the rule.

    >>> _read("cu_seqlens", torch.tensor([0, 8, 8, 12]), torch.device("cpu"))
    [0, 8, 8, 12]
    """
    lengths = read_lengths(name, cu_seqlens)
    if lengths is None:
        raise ValueError(f"{name} is None; it must be an int32 or int64 tensor [b + 1]")
    if device.type == "meta":
        raise ValueError("the data is on meta; it must be on a device where tensors have values")
    return lengths


def _sizes(lengths: Lengths) -> torch.Tensor:
    return torch.tensor(differences(lengths), dtype=torch.int64, device="cpu")


def _index(rows: Sequence[range], device: torch.device) -> torch.Tensor:
    """The rows of some ranges, one range after the other, as a tensor that indexes.

    >>> _index([range(2), range(6, 8)], torch.device("cpu"))
    tensor([0, 1, 6, 7])
    """
    count = sum(len(one) for one in rows)
    return torch.as_tensor(np.fromiter(chain.from_iterable(rows), np.int64, count), device=device)


def _chunk(start: int, stop: int, number: int, cp_size: int) -> range:
    """The rows of a chunk of the sequence [start, stop). On one rank the two chunks may differ by a row.

    >>> _chunk(8, 12, 3, cp_size=2), _chunk(0, 7, 1, cp_size=1)
    (range(11, 12), range(3, 7))
    """
    size, chunks = stop - start, 2 * cp_size
    return range(start + number * size // chunks, start + (number + 1) * size // chunks)


def _slice(lengths: Lengths, tokens: int, cp_size: int, rank: int) -> list[range]:
    """The rows of a rank's slice of a buffer of `tokens` rows, in the order of the slice.

    >>> _slice([0, 8, 12], 14, cp_size=2, rank=1)
    [range(2, 4), range(4, 6), range(9, 10), range(10, 11), range(13, 14)]
    """
    rows: list[range] = []
    for start, stop in pairwise(lengths):
        rows.append(_chunk(start, stop, rank, cp_size))
        rows.append(_chunk(start, stop, 2 * cp_size - 1 - rank, cp_size))
    end = lengths[-1]
    part = (tokens - end) // cp_size
    return [*rows, range(end + rank * part, end + (rank + 1) * part)]


def _half(lengths: Lengths, number: int) -> list[range]:
    """The rows of half 0 or 1 of every sequence.

    >>> _half([0, 8, 12], 1)
    [range(4, 8), range(10, 12)]
    """
    return [_chunk(start, stop, number, 1) for start, stop in pairwise(lengths)]


# ---- Which tokens a rank holds, and the two orders of a packed buffer.


@thd_indices.thd_get_partitioned_indices
def thd_get_partitioned_indices(
    cu_seqlens_padded: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    thd_indices.check_partition(cu_seqlens_padded, total_tokens, cp_size, cp_rank)
    device = cu_seqlens_padded.device
    lengths = _read_chunked(cu_seqlens_padded, device, "total_tokens", total_tokens, cp_size)
    return _index(_slice(lengths, total_tokens, cp_size, cp_rank), device).to(cu_seqlens_padded.dtype)


@thd_indices.thd_sequence_order_to_cp_rank_order
def thd_sequence_order_to_cp_rank_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    xs = thd_indices.check_reorder(x, cu_seqlens_padded, cp_size)
    order = _rank_order(xs[0], cu_seqlens_padded, cp_size)
    return like(x, [taken(one, 0, order) for one in xs])


@thd_indices.thd_cp_rank_order_to_sequence_order
def thd_cp_rank_order_to_sequence_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    xs = thd_indices.check_reorder(x, cu_seqlens_padded, cp_size)
    order = _rank_order(xs[0], cu_seqlens_padded, cp_size)
    where = torch.empty_like(order)
    where[order] = torch.arange(len(order), device=order.device)
    return like(x, [taken(one, 0, where) for one in xs])


def _rank_order(x: torch.Tensor, cu_seqlens_padded: torch.Tensor, cp_size: int) -> torch.Tensor:
    """The global rows of rank 0's slice, then those of rank 1's, and so on."""
    tokens = x.shape[0]
    lengths = _read_chunked(cu_seqlens_padded, x.device, "x.shape[0]", tokens, cp_size)
    rows: list[range] = []
    for rank in range(cp_size):
        rows += _slice(lengths, tokens, cp_size, rank)
    return _index(rows, x.device)


def _read_chunked(
    cu_seqlens_padded: torch.Tensor, device: torch.device, name: str, tokens: int, cp_size: int
) -> Lengths:
    """Lengths of sequences that divide into chunks, in a buffer of `tokens` rows whose tail divides among the ranks."""
    lengths = _read("cu_seqlens_padded", cu_seqlens_padded, device)
    check_tail(name, tokens, lengths[-1], cp_size)
    check_chunk_lengths(_sizes(lengths), cp_size)
    return lengths


# ---- Real tokens among padding: how many of them a rank holds, and copying them alone.


@thd_indices.get_cu_seqlens_on_cp_rank
def get_cu_seqlens_on_cp_rank(
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> torch.Tensor:
    thd_indices.check_rank_lengths(cu_seqlens, cu_seqlens_padded, cp_size, cp_rank, first_half, second_half)
    device = cu_seqlens.device
    real = _read("cu_seqlens", cu_seqlens, device)
    padded = _read("cu_seqlens_padded", cu_seqlens_padded, device)
    check_counted(_sizes(padded), cp_size, first_half, second_half)
    check_fits(_sizes(real), _sizes(padded))
    chunks = [cp_rank] * first_half + [2 * cp_size - 1 - cp_rank] * second_half
    held = [0]
    for (start, stop), tokens in zip(pairwise(padded), differences(real), strict=True):
        last = start + tokens  # the row behind the sequence's real tokens
        mine = [_chunk(start, stop, number, cp_size) for number in chunks]
        held.append(sum(max(min(rows.stop, last) - rows.start, 0) for rows in mine))
    return torch.tensor(list(accumulate(held)), dtype=cu_seqlens.dtype, device=device)


@thd_indices.thd_copy_valid_tokens_from_per_split_to_rank_local
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    thd_indices.check_copy(out, inp, cu_seqlens_padded, cu_seqlens)
    check_leaf("out", out)
    padded = _read_moved(cu_seqlens_padded, out.device)
    real = _read("cu_seqlens", cu_seqlens, out.device)
    check_fits(_sizes(real), _sizes(padded))
    check_room("out", out.shape[0], "cu_seqlens_padded", padded[-1])
    check_apart("out", out, inp=inp)
    tokens = [range(start, start + n) for start, n in zip(padded, differences(real), strict=False)]
    rows = _index(tokens, out.device)
    moved = as_integers(inp)[rows].view(inp.dtype).to(out.dtype)
    as_integers(out)[rows] = as_integers(moved)


def _read_moved(cu_seqlens_padded: torch.Tensor, device: torch.device) -> Lengths:
    """`_read` of cu_seqlens_padded, whose first entry need not be 0."""
    first, moved = int(cu_seqlens_padded[0]), torch.cat([cu_seqlens_padded.new_zeros(1), cu_seqlens_padded[1:]])
    lengths = [first, *_read("cu_seqlens_padded", moved, device)[1:]]
    if first < 0 or min(lengths) < first:
        raise ValueError(f"cu_seqlens_padded is {lengths}; it must be at least 0 and must not decrease")
    return lengths


# ---- Reading the first or second half of every sequence.


@thd_corrections.thd_read_half_tensor
def thd_read_half_tensor(x: Tensors, cu_seqlens_padded: torch.Tensor, half: int) -> Tensors:
    xs = thd_corrections.check_read_half(x, cu_seqlens_padded, half)
    return like(x, [_read_half(one, cu_seqlens_padded, half) for one in xs])


def _read_half(x: torch.Tensor, cu_seqlens_padded: torch.Tensor, half: int) -> torch.Tensor:
    axis = token_axis("x", x)
    lengths, tokens = _read_even(cu_seqlens_padded, x.device), x.shape[axis]
    check_room("x", tokens, "cu_seqlens_padded", lengths[-1])
    with_tail = [*lengths, tokens]  # the tail is halved as a sequence is
    return taken(x, axis, _index(_half(with_tail, half), x.device))


@thd_corrections.thd_read_second_half_lse
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool, max_seqlen: int
) -> torch.Tensor:
    thd_corrections.check_read_second_half_lse(lse, cu_seqlens_padded, lse_packed, max_seqlen)
    lengths = _read_even(cu_seqlens_padded, lse.device)
    halves = _halved(lengths)
    _check_lse_room("lse", lse, lengths, lse_packed)
    check_count("max_seqlen", max_seqlen, _columns(halves, lse_packed), at_most=MOST_ROWS)
    result = lse.new_zeros(*lse.shape[:-1], max_seqlen)
    source, at = _lse_rows(lse, lengths, lse_packed, second_half=True)
    target, place = _lse_rows(result, halves, lse_packed)
    target[place] = source[at]
    return result


def _read_even(cu_seqlens_padded: torch.Tensor, device: torch.device) -> Lengths:
    """Lengths of sequences that all have two halves."""
    lengths = _read("cu_seqlens_padded", cu_seqlens_padded, device)
    check_divisible(_sizes(lengths), 2, "a half")
    return lengths


def _halved(lengths: Lengths) -> Lengths:
    """The lengths of a buffer that has one half of every sequence."""
    return [bound // 2 for bound in lengths]


# ---- Log-sum-exps of packed sequences, which have two shapes.
#
#     packed   [h, t]       the LSE of row t of the buffer                      (lse_packed True)
#     padded   [b, h, s]    the LSE of position p of sequence b, p < s          (lse_packed False)
#
# A padded LSE has room for at least the longest sequence. Kernels round that room up, so s may be larger; values beyond
# a sequence's length are never read and never changed.


def _lse_rows(
    lse: torch.Tensor, lengths: Lengths, lse_packed: bool, second_half: bool = False
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """A view of an LSE, and an index into it: `view[index]` is [n, h], the LSE of the n rows of all sequences, or of
    their second halves. Assigning to it changes `lse`.

    >>> packed = torch.tensor([[0, 1, 2, 3, 4, 5]])                          # h 1, t 6: sequences of 2 and 4 rows
    >>> view, index = _lse_rows(packed, [0, 2, 6], lse_packed=True, second_half=True)
    >>> view[index].flatten().tolist()
    [1, 4, 5]
    >>> padded = torch.tensor([[[0, 1, 0, 0]], [[2, 3, 4, 5]]])              # b 2, h 1, s 4: the same numbers
    >>> view, index = _lse_rows(padded, [0, 2, 6], lse_packed=False, second_half=True)
    >>> view[index].flatten().tolist()
    [1, 4, 5]
    """
    rows: list[range] = []
    positions: list[range] = []
    for start, stop in pairwise(lengths):
        first = start + (stop - start) // 2 if second_half else start
        rows.append(range(first, stop))
        positions.append(range(first - start, stop - start))
    if lse_packed:
        return lse.t(), (_index(rows, lse.device),)
    sequences = np.repeat(np.arange(len(rows)), [len(one) for one in rows])
    return lse.transpose(1, 2), (torch.as_tensor(sequences, device=lse.device), _index(positions, lse.device))


def _columns(lengths: Lengths, lse_packed: bool) -> int:
    """The fewest columns of an LSE that has room for every token."""
    return lengths[-1] if lse_packed else max(differences(lengths), default=0)


def _check_lse_room(name: str, lse: torch.Tensor, lengths: Lengths, lse_packed: bool) -> None:
    check_columns(name, lse, _columns(lengths, lse_packed), lse_packed)


# ---- Putting the partial results of ring steps together, in place. Arithmetic is in float32, or in float64 where an
#      operand is float64; the result is rounded once, when it is stored.


@thd_corrections.thd_second_half_lse_correction
def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool
) -> None:
    thd_corrections.check_lse_correction(lse, lse_step, cu_seqlens_padded, lse_packed)
    check_leaf("lse", lse)
    lengths = _read_even(cu_seqlens_padded, lse.device)
    halves = _halved(lengths)
    _check_lse_room("lse", lse, lengths, lse_packed)
    _check_lse_room("lse_step", lse_step, halves, lse_packed)
    check_apart("lse", lse, lse_step=lse_step)
    whole, at = _lse_rows(lse, lengths, lse_packed, second_half=True)
    step, step_at = _lse_rows(lse_step, halves, lse_packed)
    whole[at] = torch.logaddexp(whole[at], step[step_at]).to(lse.dtype)


@thd_corrections.thd_out_correction
def thd_out_correction(
    out: torch.Tensor,
    out_step: torch.Tensor,
    lse: torch.Tensor,
    lse_step: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    thd_corrections.check_out_correction(out, out_step, lse, lse_step, cu_seqlens_padded, only_second_half, lse_packed)
    check_leaf("out", out)
    if only_second_half:
        lengths = _read_even(cu_seqlens_padded, out.device)
        step_lengths, rows = _halved(lengths), _half(lengths, 1)
    else:
        lengths = step_lengths = _read("cu_seqlens_padded", cu_seqlens_padded, out.device)
        rows = [range(lengths[-1])]
    check_room("out", out.shape[0], "cu_seqlens_padded", lengths[-1])
    _check_lse_room("lse", lse, lengths, lse_packed)
    _check_lse_room("lse_step", lse_step, step_lengths, lse_packed)
    check_apart("out", out, out_step=out_step, lse=lse, lse_step=lse_step)
    final, final_at = _lse_rows(lse, lengths, lse_packed, only_second_half)
    step, step_at = _lse_rows(lse_step, step_lengths, lse_packed)
    wide = wide_dtype(out.dtype, out_step.dtype, lse.dtype, lse_step.dtype)
    weight = torch.exp(step[step_at].to(wide) - final[final_at].to(wide))[..., None]  # [n, h, 1]
    unseen = (step[step_at] == float("-inf"))[..., None]
    share = (weight * out_step[: step_lengths[-1]]).masked_fill(unseen, 0.0)
    at = _index(rows, out.device)
    out[at] = (out[at] + share).to(out.dtype)


@thd_corrections.thd_grad_correction
def thd_grad_correction(
    grad: torch.Tensor, grad_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, first_half: str, second_half: str
) -> None:
    thd_corrections.check_grad_correction(grad, grad_step, cu_seqlens_padded, first_half, second_half)
    check_leaf("grad", grad)
    axis, lengths = token_axis("grad", grad), _read_even(cu_seqlens_padded, grad.device)
    check_room("grad", grad.shape[axis], "cu_seqlens_padded", lengths[-1])
    check_apart("grad", grad, grad_step=grad_step)
    one_half = "none" in (first_half, second_half)  # then the step's tensor is the other half
    target, source = grad.movedim(axis, 0), grad_step.movedim(axis, 0)
    for number, action in enumerate((first_half, second_half)):
        rows = _index(_half(lengths, number), grad.device)
        share = source[: len(rows)] if one_half else source[rows]
        if action == "copy":
            target[rows] = share.to(grad.dtype)
        elif action == "add":
            wide = wide_dtype(grad.dtype, grad_step.dtype)
            target[rows] = (target[rows].to(wide) + share.to(wide)).to(grad.dtype)


# ---- Preparing a training batch: pad each sequence so that it divides, then give every rank its part.


@thd_batches.pad_thd_sequences_for_cp
def pad_thd_sequences_for_cp(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    divisibility_factor: int,
    padding_token_id: int,
    padding_label_id: int,
    padded_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fills = padding_token_id, padding_label_id
    thd_batches.check_padding(input_ids, labels, cu_seqlens, divisibility_factor, *fills, padded_tokens)
    tokens = input_ids.shape[-1]
    real = _read("cu_seqlens", cu_seqlens, input_ids.device)
    check_room("input_ids", tokens, "cu_seqlens", real[-1])
    slots = [-(-size // divisibility_factor) * divisibility_factor for size in differences(real)]
    padded = list(accumulate(slots, initial=0))
    if padded_tokens is None:
        padded_tokens = padded[-1] + tokens - real[-1]
    check_count("padded_tokens", padded_tokens, padded[-1], at_most=MOST_ROWS)
    if padded_tokens > torch.iinfo(cu_seqlens.dtype).max:
        raise ValueError(f"padded_tokens is {padded_tokens}; {cu_seqlens.dtype} lengths cannot count so many")

    tail = min(tokens - real[-1], padded_tokens - padded[-1])  # as much of it as there is room for
    given = [*(range(start, stop) for start, stop in pairwise(real)), range(real[-1], real[-1] + tail)]
    places = [range(start, start + len(rows)) for start, rows in zip(padded, given, strict=True)]
    source, target = _index(given, input_ids.device), _index(places, input_ids.device)

    def spread(x: torch.Tensor, fill: int) -> torch.Tensor:
        result = x.new_full((*x.shape[:-1], padded_tokens), fill)
        as_integers(result)[..., target] = as_integers(x)[..., source]
        return result

    cu_seqlens_padded = torch.tensor(padded, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return spread(input_ids, padding_token_id), spread(labels, padding_label_id), cu_seqlens_padded


@thd_batches.get_batch_on_this_cp_rank
def get_batch_on_this_cp_rank(
    batch: Mapping[str, Any],
    *,
    cp: ContextParallel,
    qkv_format: str,
    cu_seqlens_padded: torch.Tensor | None,
    plan: Any,
) -> dict[str, Any]:
    check_context(cp, ContextParallel)
    check_plan(plan)
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    lengths: dict[str, Any] = {"qkv_format": qkv_format, "cu_seqlens_padded": cu_seqlens_padded, "plan": plan}
    if plan is None and cu_seqlens_padded is not None and qkv_format == "thd":
        thd_batches.check_lengths_divide(cp, cu_seqlens_padded)
    in_format = qkv_format if plan is None else plan.problem.qkv_format

    def cut(xs: Sequence[torch.Tensor], fills: Sequence[int]) -> list[torch.Tensor]:
        return [shard(x, cp=cp, **lengths, fill_value=fill) for x, fill in zip(xs, fills, strict=True)]

    return thd_batches.cut_entries(batch, in_format, cp, plan, cu_seqlens_padded, cut)
