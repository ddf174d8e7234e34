"""The registered operators: movers and their gradients, and what reads LSEs and puts partial results together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cp_fast.movers.mover_protocol import RowRule
from cp_fast.movers.operands import (
    LIBRARY,
    check_chunks,
    check_halves,
    end_of,
    lengths_on,
    nothing,
    operator,
    plain,
    plain_out,
    rows,
    rows_out,
    sizes_of,
    touched,
)
from cp_fast.movers.select_movers import movers_for
from cp_fast.movers.torch_movers import assert_lengths, assert_real_lengths, rank_lengths
from cp_ref.batches.tensors import refuse_batched
from cp_ref.problems.call_checks import check_apart
from cp_ref.thd_helpers.thd_checks import (
    MOST_ROWS,
    check_both,
    check_columns,
    check_count,
    check_counted,
    check_fits,
    check_room,
)
from cp_ref.thd_helpers.thd_corrections import (
    check_grad_correction,
    check_lse_correction,
    check_out_correction,
    check_read_half,
    check_read_second_half_lse,
)
from cp_ref.thd_helpers.thd_indices import check_copy, check_partition, check_rank_lengths, check_reorder

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
    own = RowRule("partition_indices", "slice", cu_seqlens_padded.contiguous(), a=cp_size, b=cp_rank)
    return movers_for(cu_seqlens_padded.device.type).row_indices(own, total_tokens)


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
    """One rank alone holds everything, in its order, for any lengths of sequences."""
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
    own = RowRule("partition", "slice", lengths, a=cp_size, b=cp_rank)
    results = movers_for(xs[0].device.type).gather([rows(x) for x in xs], own)
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
    order = RowRule("reorder", "rank_order" if to_rank_order else "sequence_order", lengths, a=cp_size)
    results = movers_for(xs[0].device.type).gather([rows(x) for x in xs], order)
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
    results = movers_for(xs[0].device.type).gather(sources, RowRule("read_half", "half", lengths, a=half))
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
    valid = RowRule("copy_valid_", "valid", lengths, real)
    movers_for(out.device.type).scatter_([rows_out(out)], [rows(inp)], valid)
    touched(out)


def _padded(x: Tensor, real: Tensor, lengths: Tensor, padded_tokens: int, fill: int) -> Tensor:
    if not len(x):
        return x.new_full((padded_tokens,), fill)
    unpad = RowRule("pad_sequences", "unpad", lengths, real, a=padded_tokens)
    source = movers_for(x.device.type).row_indices(unpad, len(x))
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


# ---- gradients
#
# Gradients of the movers: each moves them back.


Grads = Sequence[Tensor | None]


def _spread(grads: Grads, rows: Tensor, axis: int, tokens: int) -> list[Tensor | None]:
    """The gradients of `tokens` rows, of which only `rows` were read."""
    return [
        None
        if grad is None
        else grad.new_zeros(*grad.shape[:axis], tokens, *grad.shape[axis + 1 :]).index_copy_(axis, rows, grad)
        for grad in grads
    ]


def _save_reorder(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, lengths, ctx.cp_size, ctx.to_rank_order = inputs
    ctx.save_for_backward(lengths)


def _reorder_backward(ctx: Any, grads: Grads) -> tuple[Any, ...]:
    given = [grad for grad in grads if grad is not None]
    refuse_batched(*given)
    (lengths,) = ctx.saved_tensors
    moved = iter(torch.ops.cp_attention.reorder(given, lengths, ctx.cp_size, not ctx.to_rank_order) if given else [])
    return [None if grad is None else next(moved) for grad in grads], None, None, None


def _save_partition(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    xs, lengths, ctx.cp_size, ctx.cp_rank = inputs
    ctx.tokens, ctx.device = xs[0].shape[0], xs[0].device
    ctx.save_for_backward(lengths)


def _partition_backward(ctx: Any, grads: Grads) -> tuple[Any, ...]:
    (lengths,) = ctx.saved_tensors
    every_row = torch.arange(ctx.tokens, device=ctx.device)
    rows = torch.ops.cp_attention.partition([every_row], lengths, ctx.cp_size, ctx.cp_rank)[0]
    return _spread(grads, rows, 0, ctx.tokens), None, None, None


def _save_read_half(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    xs, lengths, ctx.half = inputs
    ctx.axis = int(xs[0].ndim == 4)
    ctx.tokens, ctx.device = xs[0].shape[ctx.axis], xs[0].device
    ctx.save_for_backward(lengths)


def _read_half_backward(ctx: Any, grads: Grads) -> tuple[Any, ...]:
    (lengths,) = ctx.saved_tensors
    rows = torch.ops.cp_attention.read_half([torch.arange(ctx.tokens, device=ctx.device)], lengths, ctx.half)[0]
    return _spread(grads, rows, ctx.axis, ctx.tokens), None, None


for _name, _backward, _save in (
    ("reorder", _reorder_backward, _save_reorder),
    ("partition", _partition_backward, _save_partition),
    ("read_half", _read_half_backward, _save_read_half),
):
    torch.library.register_autograd(f"cp_attention::{_name}", _backward, setup_context=_save, lib=LIBRARY)


# ---- LSEs and corrections
#
# The operators that read and merge LSEs, and put partial results together.


_HALVES = ("first", "second")


def _lse_room(lengths: Tensor, divisor: int, lse_packed: bool) -> int | None:
    """How many columns an LSE of these sequences (of their halves: divisor 2) needs at least."""
    if lengths.device.type != "cpu":
        return None
    if lse_packed:
        return int(lengths[-1]) // divisor
    return int(lengths.diff().max()) // divisor if len(lengths) > 1 else 0


def _check_lse_room(name: str, lse: Tensor, lengths: Tensor, divisor: int, lse_packed: bool) -> None:
    needed = _lse_room(lengths, divisor, lse_packed)
    if needed is not None:
        check_columns(name, lse, needed, lse_packed)


def _second_half(lse: Tensor, lengths: Tensor, lse_packed: bool, max_seqlen: int) -> Tensor:
    result = lse.new_zeros(*lse.shape[:-1], max_seqlen)
    if not lse.numel() or not result.numel() or len(lengths) == 1:
        return result
    if lse_packed:
        late = RowRule("read_second_half_lse", "half", lengths, a=1)
        source = movers_for(lse.device.type).row_indices(late, lse.shape[1] // 2 * 2)[:max_seqlen]
        column = torch.arange(len(source), device=lse.device)
        found = torch.where(column < lengths[-1] // 2, lse.index_select(1, source.clamp(min=0)), 0)
        result[:, : len(source)] = found
        return result
    assert_lengths("read_second_half_lse", lengths, 2, torch.iinfo(torch.int64).max)
    half = (lengths.long().diff() // 2)[:, None, None]
    column = torch.arange(max_seqlen, device=lse.device)
    source = (half + column).clamp(0, lse.shape[2] - 1).expand(-1, lse.shape[1], -1)
    return torch.where(column < half, lse.gather(2, source), result)


@operator(
    "read_second_half_lse(Tensor lse, Tensor cu_seqlens_padded, bool lse_packed, SymInt max_seqlen) -> Tensor",
    check_read_second_half_lse,
    lambda lse, cu_seqlens_padded, lse_packed, max_seqlen: lse.new_empty(*lse.shape[:-1], max_seqlen),
)
def _read_second_half_lse(lse: Tensor, cu_seqlens_padded: Tensor, lse_packed: bool, max_seqlen: int) -> Tensor:
    check_halves(cu_seqlens_padded)
    _check_lse_room("lse", lse, cu_seqlens_padded, 1, lse_packed)
    needed = _lse_room(cu_seqlens_padded, 2, lse_packed)
    if needed is not None and max_seqlen < needed:
        raise ValueError(f"max_seqlen is {max_seqlen}; it must be at least {needed}")
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, lse.device)
    return _second_half(plain(lse), lengths, lse_packed, max_seqlen)


@operator(
    "lse_correction_(Tensor(a!) lse, Tensor lse_step, Tensor cu_seqlens_padded, bool lse_packed) -> ()",
    check_lse_correction,
    nothing,
)
def _lse_correction_(lse: Tensor, lse_step: Tensor, cu_seqlens_padded: Tensor, lse_packed: bool) -> None:
    check_halves(cu_seqlens_padded)
    _check_lse_room("lse", lse, cu_seqlens_padded, 1, lse_packed)
    _check_lse_room("lse_step", lse_step, cu_seqlens_padded, 2, lse_packed)
    check_apart("lse", lse, lse_step=lse_step)
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, lse.device)
    late = RowRule("lse_correction_", "half", lengths, a=1)
    # There is no output: rows of no elements. Halves have no more rows than their padded LSE has places.
    heads, step_rows = lse_step.shape[-2], lse_step.shape[-1] * (1 if lse_packed else len(lengths) - 1)
    nothing = lse.new_empty(2 * step_rows, heads, 0), lse.new_empty(step_rows, heads, 0)
    movers_for(lse.device.type).merge_(nothing[0], plain_out("lse", lse), nothing[1], plain(lse_step), late)
    touched(lse)


@operator(
    "out_correction_(Tensor(a!) out, Tensor out_step, Tensor lse, Tensor lse_step, Tensor cu_seqlens_padded, "
    "bool only_second_half, bool lse_packed) -> ()",
    check_out_correction,
    nothing,
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
        check_halves(cu_seqlens_padded)
    else:
        sizes_of("cu_seqlens_padded", cu_seqlens_padded)
    check_room("out", out.shape[0], "cu_seqlens_padded", end_of(cu_seqlens_padded))
    _check_lse_room("lse", lse, cu_seqlens_padded, 1, lse_packed)
    _check_lse_room("lse_step", lse_step, cu_seqlens_padded, 1 + only_second_half, lse_packed)
    check_apart("out", out, out_step=out_step, lse=lse, lse_step=lse_step)
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, out.device)
    rows = RowRule("out_correction_", "valid", lengths, lengths)
    if only_second_half:
        rows = RowRule("out_correction_", "half", lengths, a=1)
    operands = plain_out("out", out), plain(lse), plain(out_step), plain(lse_step)
    movers_for(out.device.type).merge_(*operands, rows, final=True)
    touched(out)


@operator(
    "grad_correction_(Tensor(a!) grad, Tensor grad_step, Tensor cu_seqlens_padded, str first_half, "
    "str second_half) -> ()",
    check_grad_correction,
    nothing,
)
def _grad_correction_(
    grad: Tensor, grad_step: Tensor, cu_seqlens_padded: Tensor, first_half: str, second_half: str
) -> None:
    check_halves(cu_seqlens_padded)
    check_room("grad", grad.shape[int(grad.ndim == 4)], "cu_seqlens_padded", end_of(cu_seqlens_padded))
    check_apart("grad", grad, grad_step=grad_step)
    if first_half == second_half == "none":
        return
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, grad.device)
    target, step = plain_out("grad", grad), plain(grad_step)
    outs, xs = ([target], [step]) if grad.ndim < 4 else (list(target), list(step))
    maps = {"both": RowRule("grad_correction_", "valid", lengths, lengths)}
    if first_half != second_half:
        kind = "half" if "none" in (first_half, second_half) else "in_half"
        maps = {half: RowRule("grad_correction_", kind, lengths, a=int(half == "second")) for half in _HALVES}
    actions = {"first": first_half, "second": second_half, "both": first_half}
    for half, rule in maps.items():
        if actions[half] != "none":
            movers_for(grad.device.type).scatter_(outs, xs, rule, add=actions[half] == "add")
    touched(grad)
