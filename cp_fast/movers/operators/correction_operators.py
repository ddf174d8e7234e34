"""The operators that read and merge LSEs, and put partial results together."""

from __future__ import annotations

import torch

from cp_fast.movers.length_checks import end_of, sizes_of
from cp_fast.movers.lengths_map import LengthsMap
from cp_fast.movers.operand_layouts import lengths_on, plain, plain_out, touched
from cp_fast.movers.operators.registered import check_halves, nothing, operator
from cp_fast.movers.select_kernels import kernels
from cp_fast.movers.torch_movers.torch_asserts import assert_lengths
from cp_ref.contract.call_checks import check_apart
from cp_ref.contract.thd_checks import check_columns, check_room
from cp_ref.contract.thd_corrections import (
    check_grad_correction,
    check_lse_correction,
    check_out_correction,
    check_read_second_half_lse,
)

__all__: list[str] = []

Tensor = torch.Tensor
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
        late = LengthsMap("read_second_half_lse", "half", lengths, a=1)
        source = kernels(lse.device.type).row_indices(late, lse.shape[1] // 2 * 2)[:max_seqlen]
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
    late = LengthsMap("lse_correction_", "half", lengths, a=1)
    # There is no output: rows of no elements. Halves have no more rows than their padded LSE has places.
    heads, step_rows = lse_step.shape[-2], lse_step.shape[-1] * (1 if lse_packed else len(lengths) - 1)
    nothing = lse.new_empty(2 * step_rows, heads, 0), lse.new_empty(step_rows, heads, 0)
    kernels(lse.device.type).merge_(nothing[0], plain_out("lse", lse), nothing[1], plain(lse_step), late)
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
    rows = LengthsMap("out_correction_", "valid", lengths, lengths)
    if only_second_half:
        rows = LengthsMap("out_correction_", "half", lengths, a=1)
    operands = plain_out("out", out), plain(lse), plain(out_step), plain(lse_step)
    kernels(out.device.type).merge_(*operands, rows, final=True)
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
    maps = {"both": LengthsMap("grad_correction_", "valid", lengths, lengths)}
    if first_half != second_half:
        kind = "half" if "none" in (first_half, second_half) else "in_half"
        maps = {half: LengthsMap("grad_correction_", kind, lengths, a=int(half == "second")) for half in _HALVES}
    actions = {"first": first_half, "second": second_half, "both": first_half}
    for half, rows in maps.items():
        if actions[half] != "none":
            kernels(grad.device.type).scatter_(outs, xs, rows, add=actions[half] == "add")
    touched(grad)
