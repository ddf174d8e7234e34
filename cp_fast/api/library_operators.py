"""Both passes as operators of torch.library, for torch.compile: a layer that calls `attention` with a plan is one
graph.

    attention_forward    (q, k, v, offset, scores, plan, cp) -> (out, lse, max_logit, what only the backward pass needs)
    attention_backward   (that, dout, dlse) -> (dq, dk, dv, doffset)

Both are opaque to the compiler, which sees shapes alone. In eager mode `autograd.Attention` does the same with less
overhead; it calls the forward operator only where selective checkpointing looks at operators
(`selective_checkpointing.py`). An operator's results must not share memory with its arguments, so the forward operator
gives back only what the backward pass cannot find among them: the group's rows, in the a2a schedules. Only the plan
knows how many these are, so the compiler takes them for unknown sizes.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_fast.api.checked_calls import agree_on_call, checking
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan
from cp_fast.api.planned_call import CallFlags, agree_on_forward, call_of_kinds, check_planned_call, compiled_call
from cp_fast.api.score_arguments import ScoreArguments
from cp_fast.dispatch.opaque import object_of
from cp_fast.runtime.forward_backward import backward_pass, forward_pass
from cp_fast.runtime.run import Results
from cp_ref.contract.score_inputs import ScoreInputs
from cp_ref.contract.tensors import no_autocast, raise_for_batched, wide_dtype

__all__ = ["FORWARD", "attention_in_graph", "forward_as_operator"]

Tensor = torch.Tensor


def attention_in_graph(
    plan: Plan,
    cp: ContextParallel,
    flags: CallFlags,
    scores: ScoreArguments,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`Attention.apply` as one operator. The call's arguments are checked when it runs."""
    out, lse, max_logit, *_ = _called(plan, cp, flags, scores, q, k, v, offset)
    return out, lse, max_logit


def forward_as_operator(
    plan: Plan,
    cp: ContextParallel,
    flags: CallFlags,
    scores: ScoreInputs | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: Tensor | None,
) -> Results:
    """`forward_pass` as the one operator that selective checkpointing sees."""
    out, lse, max_logit, *kept = _called(plan, cp, flags, ScoreArguments.of_inputs(scores), q, k, v, offset)
    return Results(out, lse, max_logit if max_logit.numel() else None, kept)


def _called(
    plan: Plan, cp: ContextParallel, flags: CallFlags, scores: ScoreArguments, q: Tensor, *others: Tensor | None
) -> list[Tensor]:
    """The forward operator's results. others: k, v and offset."""
    how = plan.problem.qkv_format, plan.kept, plan.needs_inputs, *flags
    return _forward(q, *others, *scores.packed(q.device), plan.handle, cp.handle, *how)


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
    kept: str,
    needs_inputs: bool,
    deterministic: bool,
    return_max_logit: bool,
    return_lse: bool,
) -> list[Tensor]:
    the_plan, context = object_of(plan), object_of(cp)
    flags, tensors = CallFlags(deterministic, return_max_logit, return_lse), (q, k, v, offset)
    given = ScoreArguments.unpacked(scores, of_scores)

    def look() -> ScoreInputs | None:
        return check_planned_call(the_plan, context, flags, given, *tensors)

    _, inputs = agree_on_forward(the_plan, context, flags, look, given, *tensors)
    q, k, v = q.detach(), k.detach(), v.detach()
    call = compiled_call(the_plan, context, q, k, v)
    with context.alone("attention, forward"), no_autocast(q.device):
        done = forward_pass(call, context, q, k, v, offset, inputs, return_max_logit=return_max_logit)
    max_logit = q.new_empty(0) if done.max_logit is None else done.max_logit
    return [done.out.contiguous(), done.lse.contiguous(), max_logit, *done.kept]


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> list[Tensor]:
    qkv_format, kept, _, _, return_max_logit, _ = others[-6:]
    wide, (*tokens, heads, _) = wide_dtype(q.dtype), q.shape
    lse_shape = {"bshd": (*tokens[:1], heads, *tokens[1:]), "sbhd": (*tokens[1:], heads, *tokens[:1])}
    out, lse = q.new_empty(*tokens, heads, v.shape[-1]), lse_shape.get(qkv_format, (heads, *tokens))
    results = [out, q.new_empty(lse, dtype=wide), q.new_empty(heads if return_max_logit else 0, dtype=wide)]
    for letter in kept:  # sizes that only the plan knows
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
        agree_on_call(context, the_plan, "backward", lambda: None, ("wants", wants_offset))
    shapes = tuple(q_shape), tuple(k_shape), tuple(v_shape)
    call = call_of_kinds(the_plan, context, *((shape, out.dtype, out.device, out.layout) for shape in shapes))
    inputs, kept, (out, lse) = ([x.detach() for x in some] for some in (inputs, kept, (out, lse)))
    with context.alone("attention, backward"), no_autocast(out.device):
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
            ScoreArguments.unpacked(scores, of_scores).read(the_plan, out),
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
    ctx.kept, ctx.deterministic, ctx.lse_given = len(kept_kinds), deterministic, lse_given
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(max_logit, *kept)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> Any:
    out, lse, offset, plan, cp, *rest = ctx.saved_tensors
    scores, rest = rest[: ctx.scores], rest[ctx.scores :]
    kept, inputs = rest[: ctx.kept], rest[ctx.kept :]
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
