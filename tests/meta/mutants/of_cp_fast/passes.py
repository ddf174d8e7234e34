"""Bugs around the steps of a pass: sinks, max_logit, gradients of lse and softmax_offset, state, autocast."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch

from cp_ref.contract.collectives import all_reduce_sum
from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]

Tensor = torch.Tensor


def _twice(add_sink: Any, out: Tensor, lse: Tensor, sink: Tensor, rows: Any) -> None:
    add_sink(out, lse, sink, rows)
    add_sink(out, lse, sink, rows)


def _lse_alone(add_sink: Any, out: Tensor, lse: Tensor, sink: Tensor, rows: Any) -> None:
    add_sink(out.clone(), lse, sink, rows)


def _every_row(add_sink: Any, out: Tensor, lse: Tensor, sink: Tensor, rows: Any) -> None:
    add_sink(out, lse, sink, slice(None))


def _no_sinks(sink: Any, *arguments: Any) -> Any:
    found = sink(*arguments)
    return None if found is None else torch.full_like(found, float("-inf"))


def _next_heads(sink: Any, *arguments: Any) -> Any:
    found = sink(*arguments)
    return None if found is None else found.roll(1)


def _not_reduced(_: Any, group: Any, x: Tensor) -> Tensor:
    return x


def _offset_gradient_without_dlse(
    gradient: Any, call: Any, offset: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Any
) -> Tensor:
    return gradient(call, offset, dout, out, lse, None)


def _nothing_stays(add_sink: Any, out: Tensor, lse: Tensor, sink: Tensor, rows: Any) -> None:
    unseen = lse == float("-inf")
    add_sink(out, lse, sink, rows)
    lse.masked_fill_(unseen, float("-inf"))


def _without_dlse(
    backward: Any, call: Any, cp: Any, saved: Any, out: Any, lse: Any, offset: Any, dout: Any, _: Any, *rest: Any,
    **named: Any,
) -> Any:  # fmt: skip
    return backward(call, cp, saved, out, lse, offset, dout, None, *rest, **named)


def _dout_overwritten(
    backward: Any, call: Any, cp: Any, saved: Any, out: Any, lse: Any, offset: Any, dout: Any, *rest: Any, **named: Any
) -> Any:
    results = backward(call, cp, saved, out, lse, offset, dout, *rest, **named)
    if dout is not None:
        dout.mul_(0.5)
    return results


def _k_overwritten(forward: Any, call: Any, cp: Any, q: Tensor, k: Tensor, *rest: Any, **named: Any) -> Any:
    """K is scaled in place, and scaled back after, where it is not rounded quite as before."""
    results = forward(call, cp, q, k, *rest, **named)
    with torch.no_grad():
        k.mul_(1.0 / 3.0).mul_(3.0)
    return results


def _drifting(forward: Any) -> Any:
    """Every call differs in the last bits, as with atomic additions."""
    calls = count()

    def wrong(*arguments: Any, **named: Any) -> Any:
        results = forward(*arguments, **named)
        eps = torch.finfo(results.out.dtype).eps
        return results._replace(lse=results.lse * (1.0 + 4 * eps * (next(calls) % 3)))

    return wrong


def _plan_with_a_memory(forward: Any) -> Any:
    """A plan's first K is used in all its calls."""
    kept: dict[int, tuple[Any, Tensor]] = {}

    def wrong(call: Any, cp: Any, q: Tensor, k: Tensor, *rest: Any, **named: Any) -> Any:
        _, first = kept.setdefault(id(call), (call, k.detach().clone()))
        return forward(call, cp, q, first if first.shape == k.shape else k, *rest, **named)

    return wrong


def _one_scale_for_all(
    forward: Any, call: Any, cp: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any
) -> Any:
    """V is quantised by one scale for all sequences on a rank, so that they leak into each other."""
    real = v.nan_to_num(0.0).abs()
    if real.numel() and real.max():
        step = real.max() * 2.0**-16
        v = (v / step).round() * step
    return forward(call, cp, q, k, v, *rest, **named)


_SINK = "cp_fast.runtime.operations.add_sink"
_FORWARD, _BACKWARD = (
    "cp_fast.api.autograd_function.forward_pass",
    "cp_fast.api.autograd_function.backward_pass",
)

MUTANTS: dict[str, Mutant] = {
    "sink-added-twice": Mutant("the sink is counted twice", _SINK, wrap(_twice), "logic"),
    "sink-without-rescaling": Mutant("out is not rescaled by the sink", _SINK, wrap(_lse_alone), "probes"),
    "sink-in-every-row": Mutant("padding rows see the sink", _SINK, wrap(_every_row), "logic"),
    "sink-ignored": Mutant(
        "softmax_type is ignored", "cp_fast.runtime.forward_backward._sink", wrap(_no_sinks), "probes"
    ),
    "sinks-of-other-heads": Mutant(
        "each head has another head's sink", "cp_fast.runtime.forward_backward._sink", wrap(_next_heads), "logic"
    ),
    "sink-missing-at-home": Mutant(
        "rows that saw nothing have lse -inf beside a sink",
        _SINK,
        wrap(_nothing_stays),
        "special",
        where="no-keys-learnable",
    ),
    "max-logit-not-reduced": Mutant(
        "max_logit is the rank's own", "cp_fast.runtime.forward_backward.all_reduce_max", wrap(_not_reduced), "logic"
    ),
    "offset-gradient-of-all-ranks": Mutant(
        "d_offset is the total where a share is asked for",
        "cp_fast.runtime.forward_backward.offset_grad",
        lambda _: lambda cp, share: all_reduce_sum(cp.comm, share),
        "logic",
    ),
    "offset-gradient-without-dlse": Mutant(
        "the sink's gradient ignores that of lse",
        "cp_fast.runtime.forward_backward._offset_gradient",
        wrap(_offset_gradient_without_dlse),
        "special",
        where="softcap-and-everything",
    ),
    "dlse-ignored": Mutant("the gradient of lse is lost", _BACKWARD, wrap(_without_dlse), "logic"),
    "dout-used-as-a-buffer": Mutant("dout is overwritten", _BACKWARD, wrap(_dout_overwritten), "hygiene"),
    "k-scaled-in-place": Mutant("k is scaled in place and back", _FORWARD, wrap(_k_overwritten), "hygiene"),
    "lse-drifts": Mutant("no two calls have the same bits", _FORWARD, _drifting, "determinism"),
    "plan-keeps-k": Mutant("a plan keeps its first call's K", _FORWARD, _plan_with_a_memory, "determinism"),
    "one-scale-for-all": Mutant(
        "V is quantised by one scale for all", _FORWARD, wrap(_one_scale_for_all), "metamorphic"
    ),
    "offset-believed": Mutant(
        "softmax_offset is not checked",
        "cp_fast.api.planned_call.check_offset cp_fast.api.implicit_plan.check_offset",
        lambda _: lambda *a, **n: None,
        "errors",
    ),
    "plan-believed": Mutant(
        "a call is not checked against its plan",
        "cp_fast.api.attention.check_planned_call",
        lambda _: lambda *a, **n: None,
        "errors",
    ),
}  # fmt: skip
