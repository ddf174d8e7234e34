"""`attention`: context-parallel attention of one layer, as any model calls it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cp_fast.api.call_scores import can_travel, checked_scores, packed_scores, unpacked_scores
from cp_fast.api.calls import (
    CheckedCall,
    Kind,
    agree_on_forward,
    compile_call,
    known_call,
    on_host,
    plan_of_call,
)
from cp_fast.api.checked_calls import agree_on_call, checking
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan
from cp_fast.runtime.handles import hide_from_checkpointing, is_selective, object_of, outside_of_graphs
from cp_fast.runtime.run import backward_pass, forward_pass
from cp_ref.batches.tensors import (
    autocast,
    differentiable_once,
    no_autocast,
    placed_like,
    raise_for_batched,
    refuse_transforms,
    wide_dtype,
)
from cp_ref.calls import attention_call
from cp_ref.calls.attention_call import AttentionCall, CallFlags, asked_for
from cp_ref.calls.declared import implements
from cp_ref.calls.score_mod import with_digest
from cp_ref.calls.scores import NOT_GIVEN, ScoreTensors
from cp_ref.groups.agreement import agreed
from cp_ref.problems.arguments import problem_arguments
from cp_ref.problems.call_checks import check_context, check_settled, local_part, one_a_head

__all__ = [
    "FORWARD",
    "Attention",
    "PlanInGraph",
    "attention",
    "attention_as_operator",
    "plan_for",
]

# ---- the passes as operators
#
# For torch.compile: a layer that calls `attention` with a plan is one graph.
#
#     attention_forward    (q, k, v, offset, scores, plan, cp) -> (out, lse, max_logit, what only backward needs)
#     attention_backward   (that, dout, dlse) -> (dq, dk, dv, doffset)
#
# Both are opaque to the compiler, which sees shapes alone. In eager mode `Attention` does the same with less overhead;
# it calls the forward operator only where selective checkpointing looks at operators (`is_selective`). An operator's
# results must not share memory with its arguments, so the forward operator gives back only what the backward pass
# cannot find among them: the group's rows, in the a2a schedules. Only the plan knows how many these are, so the
# compiler takes them for unknown sizes.


Tensor = torch.Tensor


class PlanInGraph(NamedTuple):
    """A plan as the operators get it: its handle, and what they and a compiler read of it."""

    handle: Tensor
    qkv_format: str
    kept_kinds: str
    needs_inputs: bool

    @staticmethod
    def of(plan: Plan) -> PlanInGraph:
        """That of a plan."""
        batch = plan.batch
        return PlanInGraph(plan.handle, batch.problem.qkv_format, batch.kept_kinds, batch.needs_inputs)


def attention_as_operator(
    plan: PlanInGraph, cp: ContextParallel, flags: CallFlags, scores: ScoreTensors | None, q: Tensor, *others: Any
) -> list[Tensor]:
    """Call the forward operator, which checks the call's arguments when it runs: out, lse, max_logit, and what only
    the backward pass needs. others: k, v and offset.
    """
    handle, *how = plan
    return _forward(q, *others, *packed_scores(scores, q.device), handle, cp.handle, *how, *flags)


@torch.library.custom_op("cp_attention::attention_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: Tensor | None,
    scores: list[Tensor],
    of_scores: str,
    plan: Tensor,
    cp: Tensor,
    qkv_format: str,
    kept_kinds: str,
    needs_inputs: bool,
    deterministic: bool,
    return_max_logit: bool,
    return_lse: bool,
) -> list[Tensor]:
    the_plan, context = object_of(plan), object_of(cp)
    flags, given = CallFlags(deterministic, return_max_logit, return_lse), unpacked_scores(scores, of_scores)
    call = agree_on_forward(AttentionCall(context, the_plan, flags, {}, (q, k, v), offset, given, {}), the_plan)
    q, k, v = q.detach(), k.detach(), v.detach()
    with context.naming_errors("attention, forward"), no_autocast(q.device):
        how = {"return_max_logit": return_max_logit}
        done = forward_pass(call.compiled_call, context, q, k, v, offset, call.scores, **how)
    max_logit = q.new_empty(0) if done.max_logit is None else done.max_logit
    return [done.out.contiguous(), done.lse.contiguous(), max_logit, *done.kept]


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> list[Tensor]:
    qkv_format, kept_kinds, _, _, return_max_logit, _ = others[-6:]
    wide, (*tokens, heads, _) = wide_dtype(q.dtype), q.shape
    lse_shape = {"bshd": (*tokens[:1], heads, *tokens[1:]), "sbhd": (*tokens[1:], heads, *tokens[:1])}
    out, lse = q.new_empty(*tokens, heads, v.shape[-1]), lse_shape.get(qkv_format, (heads, *tokens))
    results = [out, q.new_empty(lse, dtype=wide), q.new_empty(heads if return_max_logit else 0, dtype=wide)]
    for letter in kept_kinds:  # sizes that only the plan knows
        new_size = torch.library.get_ctx().new_dynamic_size
        axes, dtype = {"x": (3, q.dtype), "l": (2, wide)}[letter]
        results.append(q.new_empty([new_size() for _ in range(axes)], dtype=dtype))
    return results


@torch.library.custom_op("cp_attention::attention_backward", mutates_args=())
def _backward(
    inputs: list[Tensor],
    kept: list[Tensor],
    out: Tensor,
    lse: Tensor,
    offset: Tensor | None,
    dout: Tensor | None,
    dlse: Tensor | None,
    scores: list[Tensor],
    of_scores: str,
    plan: Tensor,
    cp: Tensor,
    q_shape: list[int],
    k_shape: list[int],
    v_shape: list[int],
    deterministic: bool,
    wants_offset: bool,
    lse_given: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    the_plan, context = object_of(plan), object_of(cp)
    if checking():
        agree_on_call(context, the_plan, "backward", lambda: (None, [("wants", wants_offset)]))
    shapes = tuple(q_shape), tuple(k_shape), tuple(v_shape)
    kinds = (Kind(shape, out.dtype, out.device, out.layout) for shape in shapes)
    call = compile_call(the_plan, context, *kinds)
    inputs, kept, (out, lse) = ([x.detach() for x in some] for some in (inputs, kept, (out, lse)))
    with context.naming_errors("attention, backward"), no_autocast(out.device):
        dq, dk, dv, doffset = backward_pass(
            call,
            context,
            (inputs[0], inputs[1], inputs[2]) if inputs else None,
            kept,
            out,
            lse,
            offset,
            dout,
            dlse,
            checked_scores(the_plan, unpacked_scores(scores, of_scores), out),
            deterministic=deterministic,
            wants_offset=wants_offset,
            lse_given=lse_given,
        )
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), out.new_empty(0) if doffset is None else doffset


@_backward.register_fake
def _(inputs: list[Tensor], kept: list[Tensor], out: Tensor, lse: Tensor, *others: Any) -> tuple[Tensor, ...]:
    offset, *_, q_shape, k_shape, v_shape, _, wants_offset, _ = others
    doffset = out.new_empty(0) if offset is None or not wants_offset else torch.empty_like(offset)
    return out.new_empty(q_shape), out.new_empty(k_shape), out.new_empty(v_shape), doffset


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, offset, scores, ctx.of_scores, plan, cp, _, kept_kinds, needs_inputs, deterministic, _, lse_given = inputs
    out, lse, max_logit, *kept = output
    ctx.save_for_backward(out, lse, offset, plan, cp, *scores, *kept, *((q, k, v) if needs_inputs else ()))
    ctx.shapes, ctx.scores = [list(x.shape) for x in (q, k, v)], len(scores)
    ctx.kept_count, ctx.deterministic, ctx.lse_given = len(kept_kinds), deterministic, lse_given
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(max_logit, *kept)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> Any:
    out, lse, offset, plan, cp, *rest = ctx.saved_tensors
    scores, rest = rest[: ctx.scores], rest[ctx.scores :]
    kept, inputs = rest[: ctx.kept_count], rest[ctx.kept_count :]
    dout, dlse = grads[:2]
    wants_offset = offset is not None and ctx.needs_input_grad[3]
    how = ctx.deterministic, wants_offset, ctx.lse_given
    given = inputs, kept, out, lse, offset, dout, dlse, scores, ctx.of_scores
    dq, dk, dv, doffset = _backward(*given, plan, cp, *ctx.shapes, *how)
    return dq, dk, dv, doffset if wants_offset else None, [None] * ctx.scores, *(None,) * 9


_forward.register_autograd(_differentiate, setup_context=_keep)
_LIBRARY = torch.library.Library("cp_attention", "FRAGMENT")
_LIBRARY.impl("attention_backward", raise_for_batched, "Batched")  # of `is_grads_batched`, in compiled graphs

FORWARD: Any = torch.ops.cp_attention.attention_forward.default


# ---- the passes as an autograd function


class Attention(torch.autograd.Function):
    """From q, k, v and offset to out, lse and max_logit (or None). All but max_logit are differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        call: CheckedCall,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        offset: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        plan, batch, compiled_call, cp, flags, scores, _ = call
        # saved like this, the backward pass need not do it again
        q, k, v = q.detach(), k.detach(), v.detach()
        if is_selective():
            of_graph = PlanInGraph.of(plan)
            out, lse, max_logit, *kept = attention_as_operator(of_graph, cp, flags, scores, q, k, v, offset)
            max_logit = max_logit if max_logit.numel() else None
        else:
            with cp.naming_errors("attention, forward"), no_autocast(q.device):
                how = {"return_max_logit": flags.return_max_logit}
                out, lse, max_logit, kept = forward_pass(compiled_call, cp, q, k, v, offset, scores, **how)
        given, of_scores = (q, k, v) if batch.needs_inputs else (), () if scores is None else scores.tensors
        ctx.save_for_backward(out.detach(), lse.detach(), offset, *kept, *given, *of_scores)
        ctx.call, ctx.kept_count, ctx.saved = call, len(kept), len(kept) + len(given)
        ctx.set_materialize_grads(False)  # an lse that nobody differentiates must not cost its gradient's feature
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
        return out, lse, max_logit

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call: CheckedCall = ctx.call
        plan, _, compiled_call, cp, flags, scores, number = call
        wants_offset = ctx.needs_input_grad[4]
        if number:
            details = ("of_call", number), ("deterministic", flags.deterministic), ("wants", wants_offset)
            agree_on_call(cp, plan, "backward", lambda: (call.check_batch(), details))
        call.check_batch()
        out, lse, offset, *tensors = ctx.saved_tensors
        tensors, of_scores = tensors[: ctx.saved], tensors[ctx.saved :]
        with cp.naming_errors("attention, backward"), no_autocast(out.device):
            dq, dk, dv, doffset = backward_pass(
                compiled_call,
                cp,
                tuple(tensors[ctx.kept_count :]) or None,
                tensors[: ctx.kept_count],
                out,
                lse,
                offset,
                grads[0],
                grads[1],
                None if scores is None else scores.with_tensors(*of_scores),
                deterministic=flags.deterministic,
                wants_offset=wants_offset,
                lse_given=flags.return_lse,
            )
        return None, dq, dk, dv, doffset


# ---- the call


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
    flags = CallFlags(deterministic, return_max_logit, return_lse)
    scores = ScoreTensors.given(arguments) if arguments else NOT_GIVEN
    given = {"q": q, "k": k, "v": v}
    if torch.compiler.is_compiling():
        return _while_compiling(given, cp, flags, scores, softmax_offset, plan, arguments)
    refuse_transforms()
    planned = isinstance(plan, Plan) and not checking()  # then the ranks do not meet
    if isinstance(plan, Plan) and planned and not (arguments or torch.is_autocast_enabled(plan.batch.device.type)):
        tensors = q, k, v, softmax_offset
        if (known := known_call(plan, cp, flags, scores, tensors)) is not None:
            return asked_for(Attention.apply(known, *tensors), return_lse, return_max_logit)
    check_context(cp, ContextParallel)

    def read() -> AttentionCall:
        return _asked(given, cp, flags, scores, softmax_offset, plan, arguments)

    asked = read() if planned else agreed(cp, "an agreement on a call", read)
    with hide_from_checkpointing():
        made = plan if isinstance(plan, Plan) else plan_of_call(asked)
        call = agree_on_forward(asked, made)
    results = Attention.apply(call, *asked.tensors, asked.offset)
    results = placed_like(q, made.problem.qkv_format, results)
    return asked_for(results, return_lse, return_max_logit)


def plan_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cp: ContextParallel, **arguments: Any) -> Plan:
    """Find or make the plan of a call of `attention` with these arguments, to give it to all calls like this one.
    Collective where the ranks have not agreed on an equal call lately.

    Args:
        arguments: others of `attention` that decide the plan, `softmax_offset` and the tensors of scores among them.
    """
    check_context(cp, ContextParallel)
    scores, offset = ScoreTensors.given(arguments), arguments.pop("softmax_offset", None)

    def read() -> AttentionCall:
        flags, given = CallFlags(False, False, False), {"q": q, "k": k, "v": v}
        return _asked(given, cp, flags, scores, offset, None, arguments)

    asked = agreed(cp, "an agreement on a call", read)
    with hide_from_checkpointing():
        return plan_of_call(asked)


def _asked(
    given: dict[str, Any],
    cp: ContextParallel,
    flags: CallFlags,
    scores: ScoreTensors,
    offset: Any,
    plan: Any,
    arguments: dict[str, Any],
) -> AttentionCall:
    """The call, with lengths on the host, and the tensors under autocast. given: q, k and v."""
    arguments = on_host(problem_arguments(arguments))
    q, k, v = (autocast(local_part(x)) for x in given.values())
    return AttentionCall(cp, plan, flags, given, (q, k, v), one_a_head(offset), scores, arguments)


def _while_compiling(
    given: dict[str, Any],
    cp: ContextParallel,
    flags: CallFlags,
    scores: ScoreTensors,
    softmax_offset: Any,
    plan: Plan | None,
    arguments: dict[str, Any],
) -> Any:
    """A call under torch.compile: an operator of the graph if there is a plan, else a graph break."""
    check_context(cp, ContextParallel)
    eager = not can_travel(scores) or arguments.get("score_mod") is not None  # a graph has no digests
    if eager or not isinstance(plan, Plan) or any(hasattr(x, "placements") for x in given.values()):
        arguments = {**given, "cp": cp, "softmax_offset": softmax_offset, "plan": plan, **arguments, **scores.arguments}
        return outside_of_graphs(attention, **arguments, **dict(zip(CallFlags._fields, flags, strict=True)))
    problem_arguments(arguments)
    q, k, v = (autocast(x) for x in given.values())
    flags.check()
    check_settled(plan.problem, **with_digest(arguments))
    found = attention_as_operator(PlanInGraph.of(plan), cp, flags, scores, q, k, v, one_a_head(softmax_offset))
    return asked_for((found[0], found[1], found[2]), flags.return_lse, flags.return_max_logit)
