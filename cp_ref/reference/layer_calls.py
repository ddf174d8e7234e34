"""A call of a linear or sparse layer, from its arguments to results and gradients: the ranks agree, then two passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from cp_ref.batches.tensors import no_autocast, refuse_transforms
from cp_ref.calls.layer import Layer, LayerCall
from cp_ref.groups.agreement import agreed
from cp_ref.problems.call_checks import check_context
from cp_ref.reference.reference_plan import ContextParallel, Plan, backward_pass

__all__ = ["Done", "Passes", "Run", "called"]


class Run(NamedTuple):
    """One call of a layer on this rank, checked."""

    plan: Plan
    cp: ContextParallel
    call: Any


class Done(NamedTuple):
    """The results of a forward pass.

    Attributes:
        results: those of the function.
        saved, kept: tensors, and other things, that the backward pass needs besides the operands.
    """

    results: Sequence[torch.Tensor]
    saved: Sequence[torch.Tensor] = ()
    kept: Any = None


class Passes(NamedTuple):
    """A rank's computations of a declared layer.

    Attributes:
        forward: from a run and the operands.
        backward: from a run, the operands, what the forward pass saved and kept, and the gradients of the results: a
            gradient for each operand, or None. None for a layer without gradients.
    """

    declared: Layer
    forward: Callable[..., Done]
    backward: Callable[..., Sequence[torch.Tensor | None]] | None = None


def called(passes: Passes, cp: Any, plan: Any, tensors: Sequence[Any], **options: Any) -> tuple[torch.Tensor, ...]:
    """The results of a call. tensors: the operands, in order."""
    refuse_transforms()
    check_context(cp, ContextParallel)
    layer = passes.declared
    given = layer.cast(tensors)
    named = {operand.name: x for operand, x in zip(layer.operands, given, strict=True)}

    def read() -> LayerCall:
        return layer.read(cp, plan, Plan, **named, **options)

    known = plan.agreed if isinstance(plan, Plan) else None  # a plan asks once about each kind of call
    call = agreed(cp, "an agreement on the call of a layer", read, lambda found: found, known)
    with no_autocast(given[0].device):
        results = cast(Any, _LayerFunction).apply(passes, Run(plan, cp, call), *given)
    return results[: layer.results(options)]


class _LayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: Passes, run: Run, *tensors: Any) -> tuple[torch.Tensor, ...]:
        results, saved, ctx.kept = passes.forward(run, *tensors)
        ctx.save_for_backward(*tensors, *saved)
        ctx.passes, ctx.run, ctx.plan, ctx.problem = passes, run, run.plan, run.plan.problem
        return tuple(results)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        every, count = ctx.saved_tensors, len(ctx.passes.declared.operands)
        return None, None, *ctx.passes.backward(ctx.run, every[:count], every[count:], ctx.kept, *grads)
