"""The operators that move rows and count them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.movers.length_checks import end_of, sizes_of
from cp_fast.movers.lengths_map import LengthsMap
from cp_fast.movers.operand_layouts import lengths_on, plain, rows, rows_out, touched
from cp_fast.movers.operators.registered import check_chunks, check_halves, nothing, operator
from cp_fast.movers.select_kernels import kernels
from cp_fast.movers.torch_movers.torch_asserts import assert_lengths, assert_real_lengths
from cp_fast.movers.torch_movers.torch_rows import rank_lengths
from cp_ref.contract.call_checks import check_apart
from cp_ref.contract.thd_checks import MOST_ROWS, check_both, check_count, check_counted, check_fits, check_room
from cp_ref.contract.thd_corrections import check_read_half
from cp_ref.contract.thd_indices import check_copy, check_partition, check_rank_lengths, check_reorder

__all__: list[str] = []

Tensor = torch.Tensor


# ---- lengths and indices


@operator(
    "partition_indices(Tensor cu_seqlens_padded, SymInt total_tokens, int cp_size, int cp_rank) -> Tensor",
    check_partition,
    lambda cu_seqlens_padded, total_tokens, cp_size, cp_rank: cu_seqlens_padded.new_empty(total_tokens // cp_size),
)
def _partition_indices(cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    check_chunks(cu_seqlens_padded, "total_tokens", total_tokens, cp_size)
    if cp_size == 1:
        assert_lengths("partition_indices", cu_seqlens_padded, 1, total_tokens)
        return torch.arange(total_tokens, dtype=cu_seqlens_padded.dtype, device=cu_seqlens_padded.device)
    own = LengthsMap("partition_indices", "slice", cu_seqlens_padded.contiguous(), a=cp_size, b=cp_rank)
    return kernels(cu_seqlens_padded.device.type).row_indices(own, total_tokens)


@operator(
    "rank_lengths(Tensor cu_seqlens, Tensor cu_seqlens_padded, int cp_size, int cp_rank, bool first_half, "
    "bool second_half) -> Tensor",
    check_rank_lengths,
    lambda cu_seqlens, *rest: cu_seqlens.new_empty(cu_seqlens.shape),
)
def _rank_lengths(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int, first_half: bool, second_half: bool
) -> Tensor:
    real, slots = sizes_of("cu_seqlens", cu_seqlens), sizes_of("cu_seqlens_padded", cu_seqlens_padded)
    divisor = check_counted(slots, cp_size, first_half, second_half)
    check_fits(real, slots)
    padded = lengths_on("cu_seqlens_padded", cu_seqlens_padded, cu_seqlens.device)
    assert_lengths("rank_lengths", padded, divisor, torch.iinfo(torch.int64).max)
    assert_real_lengths("rank_lengths", cu_seqlens, padded)
    if cp_size == 1 and first_half and second_half:
        return cu_seqlens.clone()
    return rank_lengths(cu_seqlens, padded, cp_size, cp_rank, first_half, second_half)


# ---- movers


def _whole(helper: str, xs: Sequence[Tensor], cu_seqlens_padded: Tensor) -> list[Tensor]:
    """What one rank holds: everything, in its order, whatever the lengths of sequences are."""
    assert_lengths(helper, cu_seqlens_padded, 1, xs[0].shape[0])
    return [x.clone(memory_format=torch.contiguous_format) for x in xs]


def _given(xs: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """As a helper is given them: one tensor, or a tuple."""
    return xs[0] if len(xs) == 1 else tuple(xs)


def _check_partition(xs: Sequence[Tensor], cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int) -> None:
    check_reorder(_given(xs), cu_seqlens_padded, cp_size)
    check_count("cp_rank", cp_rank, 0, below=cp_size)


def _check_reorder(xs: Sequence[Tensor], cu_seqlens_padded: Tensor, cp_size: int, to_rank_order: bool) -> None:
    check_reorder(_given(xs), cu_seqlens_padded, cp_size)


@operator(
    "partition(Tensor[] xs, Tensor cu_seqlens_padded, int cp_size, int cp_rank) -> Tensor[]",
    _check_partition,
    lambda xs, cu_seqlens_padded, cp_size, cp_rank: [x.new_empty(x.shape[0] // cp_size, *x.shape[1:]) for x in xs],
)
def _partition(xs: Sequence[Tensor], cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int) -> list[Tensor]:
    check_chunks(cu_seqlens_padded, "x.shape[0]", xs[0].shape[0], cp_size)
    if cp_size == 1:
        return _whole("partition", xs, cu_seqlens_padded)
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, xs[0].device)
    own = LengthsMap("partition", "slice", lengths, a=cp_size, b=cp_rank)
    results = kernels(xs[0].device.type).gather([rows(x) for x in xs], own)
    return [result.view(x.shape[0] // cp_size, *x.shape[1:]) for x, result in zip(xs, results, strict=True)]


@operator(
    "reorder(Tensor[] xs, Tensor cu_seqlens_padded, int cp_size, bool to_rank_order) -> Tensor[]",
    _check_reorder,
    lambda xs, *rest: [x.new_empty(x.shape) for x in xs],
)
def _reorder(xs: Sequence[Tensor], cu_seqlens_padded: Tensor, cp_size: int, to_rank_order: bool) -> list[Tensor]:
    check_chunks(cu_seqlens_padded, "x.shape[0]", xs[0].shape[0], cp_size)
    if cp_size == 1:
        return _whole("reorder", xs, cu_seqlens_padded)
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, xs[0].device)
    order = LengthsMap("reorder", "rank_order" if to_rank_order else "sequence_order", lengths, a=cp_size)
    results = kernels(xs[0].device.type).gather([rows(x) for x in xs], order)
    return [result.view(x.shape) for x, result in zip(xs, results, strict=True)]


def _half_shape(x: Tensor) -> list[int]:
    axis = int(x.ndim == 4)
    return [*x.shape[:axis], x.shape[axis] // 2, *x.shape[axis + 1 :]]


@operator(
    "read_half(Tensor[] xs, Tensor cu_seqlens_padded, int half) -> Tensor[]",
    lambda xs, *rest: check_read_half(_given(xs), *rest),
    lambda xs, *rest: [x.new_empty(_half_shape(x)) for x in xs],
)
def _read_half(xs: Sequence[Tensor], cu_seqlens_padded: Tensor, half: int) -> list[Tensor]:
    """All xs [t, ...], or all [2, t, h, d], which are read as one buffer of 2 t rows: its sequences are the first
    tensor's, the tail between, and the second tensor's.
    """
    check_halves(cu_seqlens_padded)
    axis = int(xs[0].ndim == 4)
    tokens = xs[0].shape[axis]
    check_room("x", tokens, "cu_seqlens_padded", end_of(cu_seqlens_padded))
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, xs[0].device)
    if axis:
        lengths = lengths.long() if 2 * tokens > torch.iinfo(lengths.dtype).max else lengths
        lengths = torch.cat([lengths, lengths + tokens])
    sources = [plain(x.flatten(0, 1) if axis else x) for x in xs]
    results = kernels(xs[0].device.type).gather(sources, LengthsMap("read_half", "half", lengths, a=half))
    return [result.view(_half_shape(x)) for x, result in zip(xs, results, strict=True)]


@operator(
    "copy_valid_(Tensor(a!) out, Tensor inp, Tensor cu_seqlens_padded, Tensor cu_seqlens) -> ()",
    check_copy,
    nothing,
)
def _copy_valid_(out: Tensor, inp: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor) -> None:
    slots = sizes_of("cu_seqlens_padded", cu_seqlens_padded, from_zero=False)
    check_fits(sizes_of("cu_seqlens", cu_seqlens), slots)
    check_room("out", out.shape[0], "cu_seqlens_padded", end_of(cu_seqlens_padded))
    check_apart("out", out, inp=inp)
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, out.device)
    real = lengths_on("cu_seqlens", cu_seqlens, out.device)
    valid = LengthsMap("copy_valid_", "valid", lengths, real)
    kernels(out.device.type).scatter_([rows_out("out", out)], [rows(inp)], valid)
    touched(out)


def _padded(x: Tensor, real: Tensor, lengths: Tensor, padded_tokens: int, fill: int) -> Tensor:
    if not len(x):
        return x.new_full((padded_tokens,), fill)
    unpad = LengthsMap("pad_sequences", "unpad", lengths, real, a=padded_tokens)
    source = kernels(x.device.type).row_indices(unpad, len(x))
    return torch.where(source >= 0, x[source.clamp(min=0)], fill)


def _check_pad(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, padded_tokens: int, fill: int) -> None:
    if x.ndim != 1 or x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
        raise TypeError(f"input_ids has dtype {x.dtype} and shape {list(x.shape)}; it must be [t] of an integer dtype")
    check_count("padded_tokens", padded_tokens, 0, at_most=MOST_ROWS)
    check_both(cu_seqlens, cu_seqlens_padded, x.device)


@operator(
    "pad_sequences(Tensor x, Tensor cu_seqlens, Tensor cu_seqlens_padded, SymInt padded_tokens, int fill) -> Tensor",
    _check_pad,
    lambda x, cu_seqlens, cu_seqlens_padded, padded_tokens, fill: x.new_empty(padded_tokens),
)
def _pad_sequences(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, padded_tokens: int, fill: int) -> Tensor:
    check_fits(sizes_of("cu_seqlens", cu_seqlens), sizes_of("cu_seqlens_padded", cu_seqlens_padded))
    check_room("input_ids", x.shape[0], "cu_seqlens", end_of(cu_seqlens))
    end = end_of(cu_seqlens_padded)
    if end is not None and padded_tokens < end:
        raise ValueError(f"padded_tokens is {padded_tokens}; the padded sequences have {end}")
    real = lengths_on("cu_seqlens", cu_seqlens, x.device)
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, x.device)
    return _padded(x.contiguous(), real, lengths, padded_tokens, fill)
