"""`attention`: context-parallel attention of one layer, as any model calls it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from cp_fast.api.autograd_function import Attention
from cp_fast.api.checked_calls import checking
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.implicit_plan import Call, on_host, plan_of_call
from cp_fast.api.library_operators import attention_in_graph
from cp_fast.api.plan import Plan
from cp_fast.api.planned_call import (
    AttentionCall,
    CallFlags,
    agree_on_forward,
    check_planned_call,
    compiled_call,
    known_call,
)
from cp_fast.api.score_arguments import ScoreArguments
from cp_fast.dispatch.selective_checkpointing import unseen
from cp_ref.contract import attention_call
from cp_ref.contract.attention_call import asked_for, problem_arguments, with_digest
from cp_ref.contract.call_checks import check_context, check_placements, check_settled, local_part, one_a_head
from cp_ref.contract.collectives import told_to_all
from cp_ref.contract.declared import implements
from cp_ref.contract.score_inputs import ScoreInputs
from cp_ref.contract.tensors import autocast, placed_like, refuse_transforms

__all__ = ["attention"]


@implements(attention_call.attention)
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
    flags = CallFlags(deterministic, return_max_logit, return_lse)
    scores = ScoreArguments.taken_from(arguments)
    known = None if arguments or softmax_offset is not None else known_call(plan, cp, flags, scores, q, k, v)
    if known is not None:
        results = Attention.apply(known, q, k, v, None)
        return asked_for(results, return_lse, return_max_logit)
    given = {"q": q, "k": k, "v": v}
    if torch.compiler.is_compiling():
        return _while_compiling(given, cp, flags, scores, softmax_offset, plan, arguments)
    refuse_transforms()
    planned = isinstance(plan, Plan)
    with nullcontext() if planned and not checking() else told_to_all(cp):  # with a plan the ranks do not agree
        problem = on_host(problem_arguments(arguments))
        q, k, v = (autocast(local_part(x)) for x in (q, k, v))
        softmax_offset = one_a_head(softmax_offset)
    with unseen():
        asked = Call(cp, given, (q, k, v), softmax_offset, scores, flags, problem, plan)
        made = plan if planned else plan_of_call(asked)

    def look() -> ScoreInputs | None:
        check_settled(made.problem, **(with_digest(arguments) if planned else {}))
        check_placements(cp, made.problem.layout, made.problem.qkv_format, softmax_offset, **given)
        return check_planned_call(made, cp, flags, scores, q, k, v, softmax_offset)

    with unseen():
        number, inputs = agree_on_forward(made, cp, flags, look, scores, q, k, v, softmax_offset)
    call = AttentionCall(made, compiled_call(made, cp, q, k, v), cp, flags, number, inputs)
    results = Attention.apply(call, q, k, v, softmax_offset)
    results = placed_like(given["q"], made.problem.qkv_format, results)
    return asked_for(results, return_lse, return_max_logit)


def _while_compiling(
    given: dict[str, Any],
    cp: ContextParallel,
    flags: CallFlags,
    scores: ScoreArguments,
    softmax_offset: Any,
    plan: Plan | None,
    arguments: dict[str, Any],
) -> Any:
    """A call under torch.compile: an operator of the graph if there is a plan, else a graph break."""
    eager = not scores.travel or arguments.get("score_mod") is not None  # a digest is no part of a graph
    if eager or not isinstance(plan, Plan) or any(hasattr(x, "placements") for x in given.values()):
        from cp_fast.dispatch.graph_break import graph_break  # imports Dynamo, as slow as importing PyTorch

        arguments = {**given, "cp": cp, "softmax_offset": softmax_offset, "plan": plan, **arguments, **scores._asdict()}
        return graph_break(attention, **arguments, **dict(zip(CallFlags._fields, flags, strict=True)))
    problem_arguments(arguments)
    q, k, v = (autocast(x) for x in given.values())
    flags.check()
    check_settled(plan.problem, **with_digest(arguments))
    results = attention_in_graph(plan, cp, flags, scores, q, k, v, one_a_head(softmax_offset))
    return asked_for(results, flags.return_lse, flags.return_max_logit)
