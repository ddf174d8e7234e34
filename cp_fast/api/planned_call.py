"""The checks of a call of `attention` with a plan, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cp_fast.api.checked_calls import agree_on_call, checking, describe
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.make_plan import Plan
from cp_ref.common.derivatives import refuse_transforms
from cp_ref.spec import (
    Feature,
    Unsupported,
    check_flag,
    check_global_lengths,
    check_local_tensors,
    check_offset,
    check_plan_owner,
    check_room_tensors,
)

__all__ = ["PLAIN_TENSORS", "agree_on_forward", "check_planned_call", "is_known", "requires_grad"]

PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
_MOST_KINDS = 64  # Of calls that one plan remembers.


def requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a call of these tensors will have a backward pass."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def agree_on_forward(
    plan: Plan, cp: ContextParallel, look: Callable[[], None], flags: tuple[bool, bool, bool], *tensors: Any
) -> int:
    """Look at a call's arguments; under `cp_fast.checked` agree on the call with all ranks.

    Args:
        look: raises what is wrong with the arguments here.
        flags: deterministic, return_max_logit, return_lse.
        tensors: q, k, v, softmax_offset.

    Returns:
        The call's number; 0 where it is not checked.
    """
    if not checking():
        look()
        return 0
    shapes = (describe(name, x) for name, x in zip(("q", "k", "v", "softmax_offset"), tensors, strict=True))
    how = zip(("deterministic", "return_max_logit", "return_lse"), flags, strict=True)
    grads = (x for x in tensors if isinstance(x, torch.Tensor))
    return agree_on_call(cp, plan, "forward", look, *shapes, *how, ("requires_grad", requires_grad(*grads)))


def check_planned_call(
    plan: Plan, cp: ContextParallel, q: Any, k: Any, v: Any, offset: Any, *, deterministic: bool, max_logit: bool
) -> None:
    """Check that the tensors fit the plan, lie on its device, and that its kernel library has the features of the call.

    Raises:
        ValueError, TypeError: naming the argument, its value and the rule. Unsupported: naming what is missing.
    """
    check_plan_owner(plan.problem, plan.rank, cp)
    kind = _kind_of_call(deterministic, max_logit, q, k, v) if offset is None else None
    if kind in plan.checked:
        return
    check_flag("deterministic", deterministic)
    check_flag("return_max_logit", max_logit)
    check_local_tensors(plan.problem, cp.rank, q, k, v)
    check_room_tensors(plan.room, q, k)
    check_global_lengths(plan.problem, plan.room, q, k)
    check_offset(plan.problem, offset, q)
    if q.device.type != plan.device.type or plan.device.index not in (None, q.device.index):
        raise ValueError(f"q is on {q.device}, but the plan was made for {plan.device}")
    asked = {f for f, wanted in ((Feature.DETERMINISTIC, deterministic), (Feature.MAX_LOGIT, max_logit)) if wanted}
    if missing := asked - plan.backend.features:
        raise Unsupported("this call", {f"the plan's backend {plan.backend.name!r}": missing}, "say so in make_plan")
    if kind is not None and len(plan.checked) < _MOST_KINDS:
        plan.checked.add(kind)


def is_known(plan: Any, cp: ContextParallel, flags: tuple[Any, Any, Any], q: Any, k: Any, v: Any) -> bool:
    """Whether an equal call, of another layer or the step before, was checked already, so that this one needs no
    checks. Only for plain tensors in plain eager mode. flags: as in `agree_on_forward`.

    Raises:
        ValueError: the plan is another context's. NotImplementedError: inside a transform of torch.func.
    """
    if torch.compiler.is_compiling() or not isinstance(plan, Plan) or not plan.checked or checking():
        return False
    deterministic, max_logit, return_lse = flags
    if type(return_lse) is not bool or torch.is_autocast_enabled(plan.device.type):
        return False
    if _kind_of_call(deterministic, max_logit, q, k, v) not in plan.checked:
        return False
    refuse_transforms()
    check_plan_owner(plan.problem, plan.rank, cp)
    return True


def _kind_of_call(deterministic: Any, max_logit: Any, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    flags = deterministic, type(deterministic), max_logit, type(max_logit)
    return *flags, _kind(q), _kind(k), _kind(v)


def _kind(x: Any) -> tuple[Any, ...]:
    """All properties of an argument that the checks read; an argument that is not a plain tensor itself."""
    if type(x) not in PLAIN_TENSORS:
        return (object(),)
    return x.shape, x.dtype, x.device, x.layout
