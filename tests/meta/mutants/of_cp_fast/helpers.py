"""Bugs of the THD helpers by PyTorch's operators: which row goes where, and the arithmetic of corrections."""

from __future__ import annotations

from typing import Any

import torch

from cp_fast.movers import LengthsMap
from cp_fast.movers.torch_movers import torch_rows
from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]

Tensor = torch.Tensor
NOTHING = float("-inf")


def _next_rank(slice_rows: Any, local: Tensor, rank: int, lengths: Tensor, total: int, cp_size: int) -> Tensor:
    return slice_rows(local, (rank + 1) % cp_size, lengths, total, cp_size)


def _tail_of_rank_0(slice_rows: Any, local: Tensor, rank: int, lengths: Tensor, total: int, cp_size: int) -> Tensor:
    right = slice_rows(local, rank, lengths, total, cp_size)
    return torch.where(right >= lengths[-1], slice_rows(local, 0, lengths, total, cp_size), right)


def _border_before(_: Any, rows: Tensor, lengths: Tensor, total: int) -> Any:
    """A sequence's first row is found in the sequence before it."""
    bounds = torch.nn.functional.pad(lengths.long(), (0, 1), value=total)
    seq = (torch.searchsorted(bounds[:-1], rows, right=False) - 1).clamp_(min=0)
    return torch_rows.Located(seq, bounds[seq], bounds[seq + 1])


def _tail_stays(order: Any, lengths: Tensor, total: int, cp_size: int) -> Tensor:
    end = int(lengths[-1])
    return torch.cat([order(lengths, end, cp_size), torch.arange(end, total, device=lengths.device)])


def _other_half(half_rows: Any, lengths: Tensor, total: int, half: int) -> Any:
    return half_rows(lengths, total, 1 - half)


def _tail_of_half_0(half_rows: Any, lengths: Tensor, total: int, half: int) -> Any:
    rows, located = half_rows(lengths, total, half)
    return torch.where(rows >= lengths[-1], half_rows(lengths, total, 0)[0], rows), located


def _nothing_for_zero(read: Any, *arguments: Any) -> Tensor:
    result = read(*arguments)
    return result.masked_fill(result == 0, NOTHING)


def _step_alone(merge: Any, self: Any, out: Any, lse: Tensor, *rest: Any, **final: Any) -> None:
    merge(self, out, lse.fill_(NOTHING), *rest, **final)


def _nan_for_nothing(merge: Any, self: Any, out: Any, lse: Tensor, *rest: Any, **final: Any) -> None:
    merge(self, out, lse, *rest, **final)
    lse.masked_fill_(lse == NOTHING, float("nan"))


def _not_rescaled(
    merge: Any, self: Any, out: Any, lse: Tensor, step: Any, lse_step: Tensor, rows: Any, **of: Any
) -> None:
    merge(self, out, torch.zeros_like(lse), step, torch.zeros_like(lse_step), rows, **of)


def _share_rounded(merge: Any, self: Any, out: Tensor, *rest: Any, **final: Any) -> None:
    share = torch.zeros_like(out)
    merge(self, share, *rest, **final)
    out.add_(share.bfloat16().to(out.dtype))


def _zero_for_nothing(
    merge: Any, self: Any, out: Any, lse: Any, step: Any, lse_step: Tensor, rows: Any, **final: Any
) -> None:
    """A row that a step saw nothing of has the weight 0, and 0 * NaN is NaN."""
    merge(self, out, lse, step, lse_step.masked_fill(lse_step == NOTHING, -1e30), rows, **final)


def _copied(scatter: Any, self: Any, outs: Any, xs: Any, rows: Any, add: bool = False) -> None:
    scatter(self, outs, xs, rows, add and not isinstance(rows, LengthsMap))


def _halves_exchanged(scatter: Any, self: Any, outs: Any, xs: Any, rows: Any, add: bool = False) -> None:
    if isinstance(rows, LengthsMap) and rows.kind in ("half", "in_half"):
        rows = rows._replace(a=1 - rows.a)
    scatter(self, outs, xs, rows, add)


def _every_slot(scatter: Any, self: Any, outs: Any, xs: Any, rows: Any, add: bool = False) -> None:
    if isinstance(rows, LengthsMap) and rows.kind == "valid":
        rows = rows._replace(real=rows.lengths - rows.lengths[0])
    scatter(self, outs, xs, rows, add)


def _by_division(_: Any, real: Tensor, lengths: Tensor, cp_size: int, *rest: Any) -> Tensor:
    return real // cp_size


def _late_chunk_missing(
    count: Any, real: Any, lengths: Any, cp_size: int, rank: int, first: bool, second: bool
) -> Tensor:
    return count(real, lengths, cp_size, rank, first, second and not first)


def _filled_with_zero(pad: Any, x: Any, real: Any, lengths: Any, tokens: int, fill: int) -> Tensor:
    return pad(x, real, lengths, tokens, 0)


def _tail_dropped(pad: Any, x: Tensor, real: Tensor, lengths: Any, tokens: int, fill: int) -> Tensor:
    return pad(x[: int(real[-1])], real, lengths, tokens, fill)


def _zeros_in_front(pad_v: Any, v: Tensor, d_qk: int) -> Tensor:
    return pad_v(v, d_qk).roll(d_qk - v.shape[-1], -1)


def _last_columns(_: Any, out: Tensor, d_v: int) -> Tensor:
    return out[..., out.shape[-1] - d_v :]


def _sequence_axis_0(shard: Any, x: Any, **arguments: Any) -> Any:
    return shard(x, **(arguments | {"qkv_format": "sbhd"}))


def _unchecked(_: Any, *arguments: Any, **named: Any) -> None:
    """Lengths are believed, whatever they are."""


_ROWS, _KERNELS = "cp_fast.movers.torch_movers.torch_rows", "cp_fast.movers.torch_movers.torch_kernels.TorchKernels"
_OPS = "cp_fast.movers.operators.mover_operators"
_PARTITION = "thd_get_partitioned_indices"
_REORDER, _INVERSE = "thd_sequence_order_to_cp_rank_order", "thd_cp_rank_order_to_sequence_order"
_LSE, _OUT, _GRAD = "thd_second_half_lse_correction", "thd_out_correction", "thd_grad_correction"
_LENGTHS, _PAD, _BATCH = "get_cu_seqlens_on_cp_rank", "pad_thd_sequences_for_cp", "get_batch_on_this_cp_rank"
_COPY = "thd_copy_valid_tokens_from_per_split_to_rank_local"


def _helper(text: str, function: str, target: str, change: Any, tier: str = "helpers") -> Mutant:
    return Mutant(text, target, wrap(change), tier, "helpers", function)


MUTANTS: dict[str, Mutant] = {
    "indices-of-the-next-rank": _helper("rank + 1", _PARTITION, f"{_ROWS}.slice_rows", _next_rank),
    "indices-of-one-tail": _helper("every rank has the first tail", _PARTITION, f"{_ROWS}.slice_rows", _tail_of_rank_0),
    "rows-found-before-a-border": _helper(
        "a first row belongs to the sequence before",
        _REORDER,
        f"{_ROWS}.locate",
        _border_before,
    ),
    "order-backwards": _helper(
        "the inverse in its place",
        _REORDER,
        f"{_ROWS}.rank_order_rows",
        lambda _, *arguments: torch_rows.sequence_order_rows(*arguments),
    ),
    "inverse-order-backwards": _helper(
        "the reorder in its place",
        _INVERSE,
        f"{_ROWS}.sequence_order_rows",
        lambda _, *arguments: torch_rows.rank_order_rows(*arguments),
    ),
    "order-without-the-tail": _helper(
        "the tail stays at the end", _REORDER, f"{_ROWS}.rank_order_rows", _tail_stays
    ),
    "half-1-for-half-0": _helper("the other half", "thd_read_half_tensor", f"{_ROWS}.half_rows", _other_half),
    "half-of-one-tail": _helper(
        "both halves have the first half of the tail", "thd_read_half_tensor", f"{_ROWS}.half_rows", _tail_of_half_0
    ),
    "lse-of-no-token-is-minus-inf": _helper(
        "where no token is -inf, not 0",
        "thd_read_second_half_lse",
        "cp_fast.movers.operators.correction_operators._second_half",
        _nothing_for_zero,
    ),
    "lse-replaced": _helper(
        "the step's LSE replaces the running one", _LSE, f"{_KERNELS}.merge_", _step_alone
    ),
    "lse-of-empty-rows-is-nan": _helper(
        "-inf with -inf is NaN", _LSE, f"{_KERNELS}.merge_", _nan_for_nothing
    ),
    "correction-not-rescaled": _helper(
        "out_step is added as it is", _OUT, f"{_KERNELS}.merge_", _not_rescaled
    ),
    "correction-rounded": _helper(
        "shares are rounded before they are added", _OUT, f"{_KERNELS}.merge_", _share_rounded
    ),
    "correction-reads-nothing": _helper(
        "NaN of a row that a step saw nothing of", _OUT, f"{_KERNELS}.merge_", _zero_for_nothing
    ),
    "gradient-add-copies": _helper("add copies", _GRAD, f"{_KERNELS}.scatter_", _copied),
    "gradient-halves-exchanged": _helper(
        "the other half's action", _GRAD, f"{_KERNELS}.scatter_", _halves_exchanged
    ),
    "counted-by-division": _helper("real lengths are divided", _LENGTHS, f"{_OPS}.rank_lengths", _by_division),
    "late-chunk-missing": _helper(
        "of both chunks the early one is counted", _LENGTHS, f"{_OPS}.rank_lengths", _late_chunk_missing
    ),
    "every-slot-copied": _helper("slots are copied, not tokens", _COPY, f"{_KERNELS}.scatter_", _every_slot),
    "padding-is-zero": _helper("padding of labels is 0", _PAD, f"{_OPS}._padded", _filled_with_zero),
    "tail-not-padded": _helper("the tail is lost", _PAD, f"{_OPS}._padded", _tail_dropped),
    "v-behind-zeros": _helper("zeros before V", "pad_v", "cp_fast.thd.pad_v", _zeros_in_front),
    "first-columns-trimmed": _helper("the last columns are kept", "trim_out", "cp_fast.thd.trim_out", _last_columns),
    "batch-cut-along-axis-0": _helper(
        "bshd is cut along the batch", _BATCH, "cp_fast.thd.fast_batches.shard", _sequence_axis_0
    ),
    "halves-not-checked": _helper(
        "odd lengths are believed",
        "thd_read_half_tensor",
        "cp_fast.movers.operators.registered.check_divisible",
        _unchecked,
        "helpers-malformed",
    ),
    "ends-not-checked": _helper(
        "lengths beyond the buffer are believed",
        _GRAD,
        "cp_fast.movers.operators.mover_operators.check_fits cp_fast.movers.operators.mover_operators.check_room "
        "cp_fast.movers.operators.correction_operators.check_room cp_fast.movers.operators.registered.check_tail",
        _unchecked,
        "helpers-malformed",
    ),
}  # fmt: skip
