"""Bugs where partial results are put together: `cp_fast.merge`, and merges and sums by PyTorch's operators."""

from __future__ import annotations

from typing import Any

import torch
from cp_fast.merge import Merged

from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]

Tensor = torch.Tensor
NOTHING = float("-inf")


def _base_2(merged: Any, out: Tensor, lse: Tensor, out_step: Tensor, lse_step: Tensor) -> Any:
    return merged(out, lse, out_step, lse_step)[0], torch.logaddexp2(lse, lse_step)


def _without_a_maximum(merged: Any, out: Tensor, lse: Tensor, out_step: Tensor, lse_step: Tensor) -> Any:
    mean, right = merged(out, lse, out_step, lse_step)
    new = (lse.exp() + lse_step.exp()).log()
    return mean * (new - right).nan_to_num(nan=0.0).exp()[..., None], new


def _without_rescaling(merged: Any, out: Tensor, lse: Tensor, out_step: Tensor, lse_step: Tensor) -> Any:
    return out + out_step, merged(out, lse, out_step, lse_step)[1]


def _weights_exchanged(merged: Any, out: Tensor, lse: Tensor, out_step: Tensor, lse_step: Tensor) -> Any:
    return merged(out_step, lse, out, lse_step)


def _by_a_stale_lse(merged: Any, out: Tensor, lse: Tensor, out_step: Tensor, lse_step: Tensor) -> Any:
    """Where both have something the running output keeps its weight."""
    mean, new = merged(out, lse, out_step, lse_step)
    both = (lse > NOTHING) & (lse_step > NOTHING)
    return torch.where(both[..., None], out + (lse_step - new).exp()[..., None] * out_step, mean), new


def _nothing_is_nan(_: Any, out: Tensor, lse: Tensor, new: Tensor) -> Tensor:
    return out * torch.exp(lse - new)[..., None]


def _lse_rounded(merged: Any, *parts: Tensor) -> Any:
    mean, new = merged(*parts)
    return mean, new.bfloat16().to(new.dtype)


def _rounded_after(put: Any, self: Any, total: Any, part: Any) -> None:
    """The total is rounded to the inputs' dtype whenever it gains a part."""
    put(self, total, part)
    if total.lse is not None and self._shape.final in (torch.bfloat16, torch.float16):
        total.rows[0].copy_(total.rows[0].to(self._shape.final))


def _rounded_to_bf16(put: Any, self: Any, total: Any, part: Any) -> None:
    put(self, total, part)
    if total.lse is None and len(total.rows) == 1:
        total.rows[0].copy_(total.rows[0].bfloat16())


def _held_part_lost(settle: Any, self: Any, *dtype: Any) -> None:
    if self._total is not None:
        self.held = []
    settle(self, *dtype)


def _whole_part_overwrites(add: Any, self: Any, part: Any) -> None:
    if part.place.whole:
        self._total, self.held = Merged(part.rows, part.lse), []
    else:
        add(self, part)


def _lse_of_no_parts_is_zero(nothing: Any, self: Any, dtypes: Any = None) -> Any:
    part = nothing(self, dtypes)
    return part if part.lse is None else part._replace(lse=torch.zeros_like(part.lse))


def _sum_overwritten(put: Any, self: Any, total: Any, part: Any) -> None:
    if total.lse is None and len(total.rows) == 1:
        self._kernels.put_rows_([*total.rows], [x.to(total.rows[0].dtype) for x in part.rows], part.place.into)
    else:
        put(self, total, part)


def _copied(_: Any, self: Any, outs: Any, xs: Any, rows: Any) -> None:
    self.put_rows_(outs, [x.to(out.dtype) for out, x in zip(outs, xs, strict=True)], rows)


def _added_twice(add: Any, self: Any, outs: Any, xs: Any, rows: Any) -> None:
    add(self, outs, [2 * x for x in xs] if len(outs) == 2 else xs, rows)


def _first_of_a_pair(add: Any, self: Any, outs: Any, xs: Any, rows: Any) -> None:
    add(self, [*outs][:1], [*xs][:1], rows)


def _sums_rounded(add: Any, self: Any, outs: Any, xs: Any, rows: Any) -> None:
    add(self, outs, xs, rows)
    for out in outs:
        out.copy_(out.bfloat16())


_MERGED = "cp_fast.kernels.torch_merges._merged"
_WEIGHTED = "cp_fast.kernels.torch_merges._weighted"
_ADD = "cp_fast.kernels.torch_ops.TorchKernels.add_rows_"
_TOTAL = "cp_fast.merge.Total"


def _schedule(text: str, target: str, change: Any, tier: str) -> Mutant:
    return Mutant(text, target, wrap(change), tier)


def _merge(text: str, target: str, change: Any) -> Mutant:
    return Mutant(text, target, wrap(change), "merge", "merge", "merge")


MUTANTS: dict[str, Mutant] = {
    "kernel-lse-in-base-2": _schedule("LSEs are merged to the base 2", _MERGED, _base_2, "probes"),
    "kernel-merge-without-rescaling": _schedule(
        "partial outputs are added as they are", _MERGED, _without_rescaling, "probes"
    ),
    "kernel-weights-exchanged": _schedule("each output has the other's weight", _MERGED, _weights_exchanged, "probes"),
    "kernel-merge-by-a-stale-lse": _schedule("the running output is not rescaled", _MERGED, _by_a_stale_lse, "logic"),
    "kernel-merge-without-a-maximum": _merge("exp(lse) overflows", _MERGED, _without_a_maximum),
    "kernel-nothing-with-nothing-is-nan": _merge("-inf with -inf is NaN", _WEIGHTED, _nothing_is_nan),
    "kernel-merged-lse-rounded": _merge("lse is rounded to bfloat16", _MERGED, _lse_rounded),
    "totals-in-the-inputs-dtype": Mutant(
        "out is rounded after every merge",
        f"{_TOTAL}._put",
        wrap(_rounded_after),
        "special",
        where="gradients-of-a-ring-of-eight",
    ),
    "dq-total-in-bf16": _schedule("dq is rounded after every sum", f"{_TOTAL}._put", _rounded_to_bf16, "logic"),
    "held-part-lost": _schedule(
        "what waits for the next launch is forgotten", f"{_TOTAL}.settle", _held_part_lost, "logic"
    ),
    "whole-part-overwrites": _schedule(
        "a part of all rows replaces the total", f"{_TOTAL}.add", _whole_part_overwrites, "logic"
    ),
    "lse-of-no-parts-is-zero": _schedule(
        "accumulators begin with lse 0", f"{_TOTAL}._nothing", _lse_of_no_parts_is_zero, "probes"
    ),
    "dq-overwritten": _schedule("a part of dq replaces what is there", f"{_TOTAL}._put", _sum_overwritten, "logic"),
    "rows-copied-not-added": _schedule("dk and dv are copied, not added", _ADD, _copied, "probes"),
    "rows-added-twice": _schedule("dk and dv are added twice", _ADD, _added_twice, "probes"),
    "first-tensor-of-a-launch": _schedule("of dk and dv only dk is added", _ADD, _first_of_a_pair, "probes"),
    "row-sums-in-bf16": _schedule("sums of dk and dv are rounded to bfloat16", _ADD, _sums_rounded, "logic"),
}
