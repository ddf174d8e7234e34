"""Bugs where partial results are accumulated: by the runtime, and by PyTorch's operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cp_fast.compile.program import Accumulate, Launch
from tests.meta.mutants.model import Mutant, wrap, wrap_operation

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


def _rounded_after(buffers: Any, one: Any, accumulate: Any, **_: Any) -> Any:
    """The sum is rounded to the inputs' dtype whenever something is merged into it."""

    def wrong(state: Any) -> None:
        accumulate(state)
        rows, columns = state.buffers[one.target.buffer]
        if columns and buffers.shapes.dtype in (torch.bfloat16, torch.float16):
            rows[0].copy_(rows[0].to(buffers.shapes.dtype))

    return wrong


def _rounded_to_bf16(buffers: Any, one: Any, accumulate: Any, **_: Any) -> Any:
    def wrong(state: Any) -> None:
        accumulate(state)
        (rows, *more), columns = state.buffers[one.target.buffer]
        if not more and not columns:
            rows.copy_(rows.bfloat16())

    return wrong


def _waiting_lost(accumulate_late: Any, plan: Any) -> Any:
    """Partial results that wait for the next step are forgotten."""
    found = accumulate_late(plan)
    made = {result: launch.step for launch in plan.of(Launch) for result in launch.results}
    kept = [
        one
        for one in found.instructions
        if not isinstance(one, Accumulate) or one.step == made.get(one.source.buffer, one.step)
    ]
    return replace(found, instructions=tuple(kept))


def _whole_part_overwrites(buffers: Any, one: Any, accumulate: Any, **_: Any) -> Any:
    if not buffers.is_whole(one.target):
        return accumulate

    def wrong(state: Any) -> None:
        state.buffers[one.target.buffer] = None
        accumulate(state)

    return wrong


def _lse_of_no_parts_is_zero(nothing: Any, self: Any, *dtypes: Any) -> Any:
    found = nothing(self, *dtypes)
    return found._replace(columns=[torch.zeros_like(x) for x in found.columns])


def _sum_overwritten(buffers: Any, one: Any, accumulate: Any, **_: Any) -> Any:
    if buffers.specs[one.target.buffer].kind != "dq":
        return accumulate

    def wrong(state: Any) -> None:
        held, rows = state.buffers[one.target.buffer], buffers.rows(one.target)
        for x in held.rows if held is not None else ():
            x[rows if isinstance(rows, slice) else rows.long(), slice(*one.target.heads)] = 0
        accumulate(state)

    return wrong


def _copied(scatter: Any, self: Any, outs: Any, xs: Any, rows: Any, add: bool = False) -> None:
    scatter(self, outs, xs, rows)


def _added_twice(scatter: Any, self: Any, outs: Any, xs: Any, rows: Any, add: bool = False) -> None:
    scatter(self, outs, [2 * x for x in xs] if add and len(outs) == 2 else xs, rows, add)


def _first_of_a_pair(scatter: Any, self: Any, outs: Any, xs: Any, rows: Any, add: bool = False) -> None:
    scatter(self, [*outs][:1] if add else outs, [*xs][:1] if add else xs, rows, add)


def _sums_rounded(scatter: Any, self: Any, outs: Any, xs: Any, rows: Any, add: bool = False) -> None:
    scatter(self, outs, xs, rows, add)
    for out in outs if add else ():
        out.copy_(out.bfloat16())


_MERGED = "cp_fast.movers.torch_movers.torch_merges._merged"
_WEIGHTED = "cp_fast.movers.torch_movers.torch_merges._weighted"
_ADD = "cp_fast.movers.torch_movers.torch_kernels.TorchKernels.scatter_"
_ACCUMULATE = "cp_fast.runtime.run.accumulate"


def _schedule(text: str, target: str, change: Any, tier: str) -> Mutant:
    return Mutant(text, target, wrap(change), tier)


def _operation(text: str, change: Any) -> Mutant:
    return Mutant(text, _ACCUMULATE, wrap_operation(change), "logic")


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
        _ACCUMULATE,
        wrap_operation(_rounded_after),
        "special",
        where="gradients-of-a-ring-of-eight",
    ),
    "dq-total-in-bf16": _operation("dq is rounded after every sum", _rounded_to_bf16),
    "waiting-part-lost": _schedule(
        "what waits for the next step is forgotten",
        "cp_fast.compile.pipeline.accumulate_late",
        _waiting_lost,
        "logic",
    ),
    "whole-part-overwrites": _operation("a partial result of all rows replaces the sum", _whole_part_overwrites),
    "lse-of-no-parts-is-zero": _schedule(
        "accumulators begin with lse 0",
        "cp_fast.runtime.tensors.Allocation.nothing",
        _lse_of_no_parts_is_zero,
        "probes",
    ),
    "dq-overwritten": _operation("a part of dq replaces what is there", _sum_overwritten),
    "rows-copied-not-added": _schedule("dk and dv are copied, not added", _ADD, _copied, "probes"),
    "rows-added-twice": _schedule("dk and dv are added twice", _ADD, _added_twice, "probes"),
    "first-tensor-of-a-launch": _schedule("of dk and dv only dk is added", _ADD, _first_of_a_pair, "probes"),
    "row-sums-in-bf16": _schedule("sums of dk and dv are rounded to bfloat16", _ADD, _sums_rounded, "logic"),
}
