"""The registered operators, `torch.ops.cp_attention.*`: what `cp_fast.thd` calls, and `torch.compile` sees.

An operator checks the values of lengths that lie on the CPU, brings them to the data, and hands over to the
implementation in use (see `select`). Shapes and dtypes have been checked by its caller, which also knows the names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cp_fast.kernels.checks import end_of, sizes_of
from cp_fast.kernels.layouts import lengths_on, plain, plain_out, rows, rows_out, touched
from cp_fast.kernels.select import kernels
from cp_ref.common.thd.checks import check_divisible, check_fits, check_room, check_tail

__all__ = ["LIBRARY", "operator"]

Tensor = torch.Tensor
LIBRARY = torch.library.Library("cp_attention", "FRAGMENT")


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the operator `schema`, for every device."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.split("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cp_attention::{name}", fake, lib=LIBRARY)
        return function

    return register


def _nothing(*args: Any) -> None:
    """The fake of an operator that returns nothing."""


def _check_chunks(cu_seqlens_padded: Tensor, name: str, tokens: int, cp_size: int) -> None:
    sizes = sizes_of("cu_seqlens_padded", cu_seqlens_padded)
    check_tail(name, tokens, end_of(cu_seqlens_padded), cp_size)
    check_divisible("cu_seqlens_padded", sizes, 2 * cp_size, f"layout 'dual_chunk' at cp_size {cp_size}")


def _check_halves(cu_seqlens_padded: Tensor) -> None:
    check_divisible("cu_seqlens_padded", sizes_of("cu_seqlens_padded", cu_seqlens_padded), 2, "a half")


# ---- lengths and indices


@operator(
    "partition_indices(Tensor cu_seqlens_padded, SymInt total_tokens, int cp_size, int cp_rank) -> Tensor",
    lambda cu_seqlens_padded, total_tokens, cp_size, cp_rank: cu_seqlens_padded.new_empty(total_tokens // cp_size),
)
def _partition_indices(cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    _check_chunks(cu_seqlens_padded, "total_tokens", total_tokens, cp_size)
    use = kernels(cu_seqlens_padded.device.type)
    return use.partition_indices(cu_seqlens_padded.contiguous(), total_tokens, cp_size, cp_rank)


@operator(
    "rank_lengths(Tensor cu_seqlens, Tensor cu_seqlens_padded, int cp_size, int cp_rank, bool first_half, "
    "bool second_half) -> Tensor",
    lambda cu_seqlens, *rest: cu_seqlens.new_empty(cu_seqlens.shape),
)
def _rank_lengths(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int, first_half: bool, second_half: bool
) -> Tensor:
    real, slots = sizes_of("cu_seqlens", cu_seqlens), sizes_of("cu_seqlens_padded", cu_seqlens_padded)
    check_divisible("cu_seqlens_padded", slots, 2 * cp_size, f"layout 'dual_chunk' at cp_size {cp_size}")
    check_fits(real, slots)
    padded = lengths_on("cu_seqlens_padded", cu_seqlens_padded, cu_seqlens.device)
    use = kernels(cu_seqlens.device.type)
    return use.rank_lengths(cu_seqlens.contiguous(), padded, cp_size, cp_rank, first_half, second_half)


# ---- movers


@operator(
    "partition(Tensor[] xs, Tensor cu_seqlens_padded, int cp_size, int cp_rank) -> Tensor[]",
    lambda xs, cu_seqlens_padded, cp_size, cp_rank: [x.new_empty(x.shape[0] // cp_size, *x.shape[1:]) for x in xs],
)
def _partition(xs: Sequence[Tensor], cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int) -> list[Tensor]:
    _check_chunks(cu_seqlens_padded, "x.shape[0]", xs[0].shape[0], cp_size)
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, xs[0].device)
    results = kernels(xs[0].device.type).partition([rows(x) for x in xs], lengths, cp_size, cp_rank)
    return [result.view(x.shape[0] // cp_size, *x.shape[1:]) for x, result in zip(xs, results, strict=True)]


@operator(
    "reorder(Tensor[] xs, Tensor cu_seqlens_padded, int cp_size, bool to_rank_order) -> Tensor[]",
    lambda xs, *rest: [x.new_empty(x.shape) for x in xs],
)
def _reorder(xs: Sequence[Tensor], cu_seqlens_padded: Tensor, cp_size: int, to_rank_order: bool) -> list[Tensor]:
    _check_chunks(cu_seqlens_padded, "x.shape[0]", xs[0].shape[0], cp_size)
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, xs[0].device)
    results = kernels(xs[0].device.type).reorder([rows(x) for x in xs], lengths, cp_size, to_rank_order)
    return [result.view(x.shape) for x, result in zip(xs, results, strict=True)]


def _half_shape(x: Tensor) -> list[int]:
    axis = int(x.ndim == 4)
    return [*x.shape[:axis], x.shape[axis] // 2, *x.shape[axis + 1 :]]


@operator(
    "read_half(Tensor[] xs, Tensor cu_seqlens_padded, int half) -> Tensor[]",
    lambda xs, *rest: [x.new_empty(_half_shape(x)) for x in xs],
)
def _read_half(xs: Sequence[Tensor], cu_seqlens_padded: Tensor, half: int) -> list[Tensor]:
    """All xs [t, ...], or all [2, t, h, d], which are read as one buffer of 2 t rows: its sequences are the first
    tensor's, the tail between, and the second tensor's.
    """
    _check_halves(cu_seqlens_padded)
    axis = int(xs[0].ndim == 4)
    tokens = xs[0].shape[axis]
    check_room("x", tokens, "cu_seqlens_padded", end_of(cu_seqlens_padded))
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, xs[0].device)
    if axis:
        lengths = lengths.long() if 2 * tokens > torch.iinfo(lengths.dtype).max else lengths
        lengths = torch.cat([lengths, lengths + tokens])
    sources = [plain(x.flatten(0, 1) if axis else x) for x in xs]
    results = kernels(xs[0].device.type).read_half(sources, lengths, half)
    return [result.view(_half_shape(x)) for x, result in zip(xs, results, strict=True)]


@operator(
    "read_second_half_lse(Tensor lse, Tensor cu_seqlens_padded, bool lse_packed, SymInt max_seqlen) -> Tensor",
    lambda lse, cu_seqlens_padded, lse_packed, max_seqlen: lse.new_empty(*lse.shape[:-1], max_seqlen),
)
def _read_second_half_lse(lse: Tensor, cu_seqlens_padded: Tensor, lse_packed: bool, max_seqlen: int) -> Tensor:
    _check_halves(cu_seqlens_padded)
    _check_lse_room("lse", lse, cu_seqlens_padded, 1, lse_packed)
    needed = _lse_room(cu_seqlens_padded, 2, lse_packed)
    if needed is not None and max_seqlen < needed:
        raise ValueError(f"max_seqlen is {max_seqlen}; it must be at least {needed}")
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, lse.device)
    return kernels(lse.device.type).read_second_half_lse(plain(lse), lengths, lse_packed, max_seqlen)


@operator("copy_valid_(Tensor(a!) out, Tensor inp, Tensor cu_seqlens_padded, Tensor cu_seqlens) -> ()", _nothing)
def _copy_valid_(out: Tensor, inp: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor) -> None:
    slots = sizes_of("cu_seqlens_padded", cu_seqlens_padded, from_zero=False)
    check_fits(sizes_of("cu_seqlens", cu_seqlens), slots)
    check_room("out", out.shape[0], "cu_seqlens_padded", end_of(cu_seqlens_padded))
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, out.device)
    real = lengths_on("cu_seqlens", cu_seqlens, out.device)
    kernels(out.device.type).copy_valid_(rows_out("out", out), rows(inp), lengths, real)
    touched(out)


@operator(
    "pad_sequences(Tensor x, Tensor cu_seqlens, Tensor cu_seqlens_padded, SymInt padded_tokens, int fill) -> Tensor",
    lambda x, cu_seqlens, cu_seqlens_padded, padded_tokens, fill: x.new_empty(padded_tokens),
)
def _pad_sequences(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, padded_tokens: int, fill: int) -> Tensor:
    sizes_of("cu_seqlens", cu_seqlens)
    check_room("input_ids", x.shape[0], "cu_seqlens", end_of(cu_seqlens))
    end = end_of(cu_seqlens_padded)
    if end is not None and padded_tokens < end:
        raise ValueError(f"padded_tokens is {padded_tokens}; the padded sequences have {end}")
    real = lengths_on("cu_seqlens", cu_seqlens, x.device)
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, x.device)
    return kernels(x.device.type).pad_sequences(x.contiguous(), real, lengths, padded_tokens, fill)


# ---- corrections


def _lse_room(lengths: Tensor, divisor: int, lse_packed: bool) -> int | None:
    """How many columns an LSE of these sequences (of their halves: divisor 2) needs at least."""
    if lengths.device.type != "cpu":
        return None
    if lse_packed:
        return int(lengths[-1]) // divisor
    return int(lengths.diff().max()) // divisor if len(lengths) > 1 else 0


def _check_lse_room(name: str, lse: Tensor, lengths: Tensor, divisor: int, lse_packed: bool) -> None:
    needed = _lse_room(lengths, divisor, lse_packed)
    if needed is not None and lse.shape[-1] < needed:
        axes = "[h, t], t" if lse_packed else "[b, h, s], s"
        raise ValueError(
            f"{name} has shape {list(lse.shape)}; with lse_packed={lse_packed} it must be {axes} at least {needed}"
        )


@operator("lse_correction_(Tensor(a!) lse, Tensor lse_step, Tensor cu_seqlens_padded, bool lse_packed) -> ()", _nothing)
def _lse_correction_(lse: Tensor, lse_step: Tensor, cu_seqlens_padded: Tensor, lse_packed: bool) -> None:
    _check_halves(cu_seqlens_padded)
    _check_lse_room("lse", lse, cu_seqlens_padded, 1, lse_packed)
    _check_lse_room("lse_step", lse_step, cu_seqlens_padded, 2, lse_packed)
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, lse.device)
    kernels(lse.device.type).lse_correction_(plain_out("lse", lse), plain(lse_step), lengths, lse_packed)
    touched(lse)


@operator(
    "out_correction_(Tensor(a!) out, Tensor out_step, Tensor lse, Tensor lse_step, Tensor cu_seqlens_padded, "
    "bool only_second_half, bool lse_packed) -> ()",
    _nothing,
)
def _out_correction_(
    out: Tensor,
    out_step: Tensor,
    lse: Tensor,
    lse_step: Tensor,
    cu_seqlens_padded: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    if only_second_half:
        _check_halves(cu_seqlens_padded)
    else:
        sizes_of("cu_seqlens_padded", cu_seqlens_padded)
    check_room("out", out.shape[0], "cu_seqlens_padded", end_of(cu_seqlens_padded))
    _check_lse_room("lse", lse, cu_seqlens_padded, 1, lse_packed)
    _check_lse_room("lse_step", lse_step, cu_seqlens_padded, 1 + only_second_half, lse_packed)
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, out.device)
    kernels(out.device.type).out_correction_(
        plain_out("out", out), plain(out_step), plain(lse), plain(lse_step), lengths, only_second_half, lse_packed
    )
    touched(out)


@operator(
    "grad_correction_(Tensor(a!) grad, Tensor grad_step, Tensor cu_seqlens_padded, str first_half, "
    "str second_half) -> ()",
    _nothing,
)
def _grad_correction_(
    grad: Tensor, grad_step: Tensor, cu_seqlens_padded: Tensor, first_half: str, second_half: str
) -> None:
    _check_halves(cu_seqlens_padded)
    check_room("grad", grad.shape[int(grad.ndim == 4)], "cu_seqlens_padded", end_of(cu_seqlens_padded))
    if first_half == second_half == "none":
        return
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, grad.device)
    target, step = plain_out("grad", grad), plain(grad_step)
    kernels(grad.device.type).grad_correction_(target, step, lengths, first_half, second_half)
    touched(grad)
