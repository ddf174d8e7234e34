"""`attention`: context-parallel attention of one layer, as any model calls it."""

from __future__ import annotations

from typing import Any

import torch

from cp_fast.autograd import Attention
from cp_fast.backends import Backend
from cp_fast.calls import agree_on_forward, check_planned_call, requires_grad
from cp_fast.compiled import attention_in_graph
from cp_fast.context import ContextParallel
from cp_fast.plan import Plan, backend_for, plan_together
from cp_fast.rows import check_row_numbers
from cp_ref.common import attention as declared
from cp_ref.common.attention import asked_for, problem_arguments, refuse_plan
from cp_ref.common.casting import autocast
from cp_ref.common.derivatives import refuse_transforms
from cp_ref.common.plans import read_call
from cp_ref.spec import (
    Agreement,
    check_context,
    check_flag,
    check_local_tensors,
    check_offset,
    check_placements,
    check_settled,
    local_part,
    one_a_head,
    read_sizes,
)

__all__ = ["attention"]


@declared.attention
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cp: ContextParallel,
    softmax_offset: torch.Tensor | None,
    deterministic: bool,
    return_lse: bool,
    return_max_logit: bool,
    plan: Plan | None,
    **arguments: Any,
) -> Any:
    check_context(cp, ContextParallel)
    arguments = problem_arguments(arguments)
    distributed = any(hasattr(x, "placements") for x in (q, k, v))
    if torch.compiler.is_compiling() and (distributed or not isinstance(plan, Plan)):
        how = {"deterministic": deterministic, "return_lse": return_lse, "return_max_logit": return_max_logit}
        return _outside_graphs(q, k, v, cp=cp, softmax_offset=softmax_offset, plan=plan, **how, **arguments)
    given = {"q": q, "k": k, "v": v}
    q, k, v = (autocast(local_part(x)) for x in (q, k, v))
    softmax_offset = one_a_head(softmax_offset)
    if torch.compiler.is_compiling() and isinstance(plan, Plan):
        check_flag("return_lse", return_lse)
        check_settled(plan.problem, **arguments)
        results = attention_in_graph(plan, cp, deterministic, return_max_logit, return_lse, q, k, v, softmax_offset)
        return asked_for(results, return_lse, return_max_logit)
    refuse_transforms()
    if not isinstance(plan, Plan):

        def read() -> tuple[Agreement, Backend, torch.device]:
            refuse_plan(plan, Plan)
            check_flag("return_lse", return_lse)
            check_placements(cp, arguments["qkv_format"], softmax_offset, **given)
            sizes = read_sizes(q, k, v, arguments["qkv_format"], cp.size)
            how = {"deterministic": deterministic, "return_max_logit": return_max_logit}
            problem = read_call(cp, sizes, **arguments)
            check_row_numbers(problem)
            backend = backend_for(cp, problem, q.device.type, **how)
            check_local_tensors(problem, cp.rank, q, k, v)
            check_offset(problem, softmax_offset, q)
            extras = (
                ("return_max_logit", return_max_logit),
                ("requires_grad", requires_grad(q, k, v)),
                *_of_backward(cp, softmax_offset, return_lse),
            )
            return Agreement(problem, extras=extras), backend, q.device

        made = plan_together(cp, read)
        settled = {}
    else:
        made, settled = plan, arguments

    def look() -> None:
        check_flag("return_lse", return_lse)
        check_settled(made.problem, **settled)
        check_placements(cp, made.problem.qkv_format, softmax_offset, **given)
        check_planned_call(made, cp, q, k, v, softmax_offset, deterministic=deterministic, max_logit=return_max_logit)

    flags = deterministic, return_max_logit, return_lse
    call = agree_on_forward(made, cp, look, flags, q, k, v, softmax_offset)
    results = Attention.apply(made, cp, *flags, call, q, k, v, softmax_offset)
    return asked_for(results, return_lse, return_max_logit)


@torch.compiler.disable(
    reason="attention makes plans and looks at DTensors outside of graphs: call make_plan outside, give local tensors"
)
def _outside_graphs(*tensors: torch.Tensor, **arguments: Any) -> Any:
    return attention(*tensors, **arguments)


def _of_backward(cp: ContextParallel, offset: torch.Tensor | None, return_lse: bool) -> list[tuple[str, object]]:
    """What decides which messages the backward pass sends: whether the sinks' gradients are summed over all ranks, and
    heads are exchanged for the gradient of lse too.
    """
    extras: list[tuple[str, object]] = [("softmax_offset_grad", cp.softmax_offset_grad)]
    if cp.softmax_offset_grad == "total":
        extras.append(("softmax_offset.requires_grad", requires_grad(offset)))
    return [*extras, *([("return_lse", return_lse)] if cp.a2a_size > 1 else [])]
