"""Bugs of formats, of memory, and of what is checked: layouts, strides, padding, aliases, state, arguments."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from typing import Any

import torch

from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]


def _bshd_for_sbhd(to_packed: Any, x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    return to_packed(x, "bshd" if qkv_format == "sbhd" else qkv_format)


def _lse_reshaped(lse_from_packed: Any, lse: torch.Tensor, qkv_format: str, batch_size: int) -> torch.Tensor:
    """[t, h] taken for [h, t]."""
    right = lse_from_packed(lse, qkv_format, batch_size)
    return lse.reshape(right.shape)


def _strides_ignored(to_packed: Any, x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """Memory is read as if x were contiguous."""
    if not x.is_contiguous():
        x = torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride())
    return to_packed(x, qkv_format)


def _halves_swapped(put_own: Any, self: Any, what: str, *local: torch.Tensor) -> None:
    """Of the own keys, each half is taken for the other: the second chunk's rows are the first's."""
    if what == "kv":
        half = local[0].shape[0] // 2
        local = tuple(torch.cat([x[half : 2 * half], x[:half], x[2 * half :]]) for x in local)
    put_own(self, what, *local)


def _rows_left_as_they_were(run_forward: Any, *arguments: Any, **named: Any) -> Any:
    """Rows that see nothing, padding among them, hold what memory held."""
    results = run_forward(*arguments, **named)
    out = torch.where((results.lse == -torch.inf)[..., None], torch.full_like(results.out, 0.5), results.out)
    return results._replace(out=out)


def _garbage_in_padding(run_backward: Any, *arguments: Any) -> Any:
    """dk and dv of padding are what came out of multiplying NaN by nothing."""
    k, v = arguments[4], arguments[5]
    dq, dk, dv = run_backward(*arguments)
    return dq, dk.masked_fill(k.isnan(), 1e6), dv.masked_fill(v.isnan(), 1e6)


def _dout_overwritten(run_backward: Any, *arguments: Any) -> Any:
    results = run_backward(*arguments)
    arguments[6].mul_(0.5)
    return results


def _k_overwritten(
    run_forward: Any, problem: Any, schedule: Any, group: Any, q: Any, k: Any, v: Any, **named: Any
) -> Any:
    """K is scaled in place, and scaled back after, where it is not rounded quite as before."""
    results = run_forward(problem, schedule, group, q, k, v, **named)
    with torch.no_grad():
        k.mul_(1.0 / 3.0).mul_(3.0)
    return results


def _drifting(run_forward: Any) -> Any:
    """Every call differs in the last bits, as with atomic additions."""
    calls = count()

    def wrong(*arguments: Any, **named: Any) -> Any:
        results = run_forward(*arguments, **named)
        eps = torch.finfo(results.out.dtype).eps
        return results._replace(lse=results.lse * (1.0 + 4 * eps * (next(calls) % 3)))

    return wrong


def _plan_with_a_memory(run_forward: Any) -> Any:
    """A plan's first K is used in all its calls."""
    kept: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}

    def wrong(problem: Any, schedule: Any, group: Any, q: Any, k: Any, v: Any, **named: Any) -> Any:
        _, first = kept.setdefault((id(schedule), group.rank), (schedule, k.detach().clone()))
        return run_forward(problem, schedule, group, q, first if first.shape == k.shape else k, v, **named)

    return wrong


def _scaled_by_the_batch(
    run_forward: Any, problem: Any, schedule: Any, group: Any, q: Any, k: Any, v: Any, **named: Any
) -> Any:
    """V is quantised by one scale for all sequences on a rank, so that they leak into each other."""
    real = v.nan_to_num(0.0).abs()
    if real.numel() == 0 or real.max() == 0:
        return run_forward(problem, schedule, group, q, k, v, **named)
    step = real.max() * 2.0**-16
    return run_forward(problem, schedule, group, q, k, (v / step).round() * step, **named)


def _only_own_error(agree: Any, group: Any, problem: object, error: Exception | None) -> None:
    if error is not None:
        raise error


def _unchecked_lengths(read_lengths: Any, name: str, cu_seqlens: Any) -> Any:
    return None if cu_seqlens is None else [max(int(n), 0) for n in cu_seqlens.tolist()]


_FORWARD, _BACKWARD = "cp_ref.reference_attention.run_forward", "cp_ref.reference_attention.run_backward"

MUTANTS: dict[str, Mutant] = {
    "batch-and-sequence-exchanged": Mutant(
        "sbhd is read as bshd", "cp_ref.reference_attention.to_packed", wrap(_bshd_for_sbhd), "logic"
    ),
    "lse-heads-and-rows-exchanged": Mutant(
        "lse [t, h] is taken for [h, t]", "cp_ref.reference_attention.lse_from_packed", wrap(_lse_reshaped), "logic"
    ),
    "wrong-half-of-a-block": Mutant(
        "each half of the own keys is the other",
        "cp_ref.executor.rank_tensors.World.put_own",
        wrap(_halves_swapped),
        "logic",
    ),
    "dout-strides-ignored": Mutant(
        "tensors are read as contiguous", "cp_ref.reference_attention.to_packed", wrap(_strides_ignored), "hygiene"
    ),
    "tail-never-written": Mutant(
        "rows that see nothing keep old values", _FORWARD, wrap(_rows_left_as_they_were), "logic"
    ),
    "padding-in-the-gradients": Mutant(
        "dk and dv of padding are garbage", _BACKWARD, wrap(_garbage_in_padding), "logic"
    ),
    "dout-overwritten": Mutant("dout is used as a buffer", _BACKWARD, wrap(_dout_overwritten), "hygiene"),
    "k-overwritten": Mutant("k is scaled in place and back", _FORWARD, wrap(_k_overwritten), "hygiene"),
    "results-drift": Mutant("no two calls have the same bits", _FORWARD, _drifting, "determinism"),
    "plan-with-a-memory": Mutant("a plan keeps its first call's K", _FORWARD, _plan_with_a_memory, "determinism"),
    "scale-over-the-batch": Mutant(
        "V is quantised by one scale for all", _FORWARD, wrap(_scaled_by_the_batch), "metamorphic"
    ),
    "autocast-inside": Mutant(
        "products inside are cast",
        "cp_ref.reference_attention.no_autocast",
        lambda _: lambda device: nullcontext(),
        "torch",
    ),
    "ranks-do-not-agree": Mutant(
        "only the rank at fault raises", "cp_ref.contract.group.agree", wrap(_only_own_error), "errors"
    ),
    "lengths-not-checked": Mutant(
        "cumulative lengths are believed",
        "cp_ref.contract.read_problem.read_lengths",
        wrap(_unchecked_lengths),
        "errors",
    ),
    "offset-not-checked": Mutant(
        "softmax_offset is believed", "cp_ref.reference_attention.check_offset", lambda _: lambda *a: None, "errors"
    ),
    "plan-of-others-accepted": Mutant(
        "a plan of another group is believed",
        "cp_ref.reference_attention.check_plan_owner",
        lambda _: lambda *a: None,
        "errors",
    ),
}
