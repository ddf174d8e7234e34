"""`passes` as operators of torch.library, for torch.compile: a layer that calls `attention` with a plan is one graph.

    attention_forward    (q, k, v, offset, plan, cp) -> (out, lse, max_logit, what only the backward pass needs)
    attention_backward   (that, dout, dlse) -> (dq, dk, dv, doffset)

Both are opaque to the compiler, which sees shapes alone. In eager mode `autograd.Attention` does the same with less
overhead. An operator's results must not share memory with its arguments, so the forward operator gives back only what
the backward pass cannot find among them: the group's rows, in the a2a schedules. How many these are is known to the
plan alone, so the compiler takes them for unknown sizes.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_fast.autograd import no_autocast
from cp_fast.calls import agree_on_forward, check_planned_call
from cp_fast.checking import agree_on_call, checking
from cp_fast.context import ContextParallel
from cp_fast.execute import wide_dtype
from cp_fast.handles import object_of
from cp_fast.passes import Saved, backward_pass, forward_pass
from cp_fast.plan import Plan

__all__ = ["attention_in_graph"]

Tensor = torch.Tensor


def attention_in_graph(
    plan: Plan,
    cp: ContextParallel,
    deterministic: bool,
    return_max_logit: bool,
    return_lse: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `Attention.apply` does, as one operator. The call's arguments are checked when it runs."""
    out, lse, max_logit, *_ = _forward(
        q,
        k,
        v,
        offset,
        plan.handle,
        cp.handle,
        plan.problem.qkv_format,
        cp.cp_comm_type.startswith("a2a"),
        deterministic,
        return_max_logit,
        return_lse,
    )
    return out, lse, max_logit


Eight = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _flat(out: Tensor, lse: Tensor, max_logit: Tensor, kept: Saved) -> Eight:
    return out, lse, max_logit, kept.q, kept.k, kept.v, kept.out, kept.lse


@torch.library.custom_op("cp_attention::attention_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: Tensor | None,
    plan: Tensor,
    cp: Tensor,
    qkv_format: str,
    group_rows: bool,
    deterministic: bool,
    return_max_logit: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    the_plan, context = object_of(plan), object_of(cp)

    def look() -> None:
        check_planned_call(the_plan, context, q, k, v, offset, deterministic=deterministic, max_logit=return_max_logit)

    agree_on_forward(the_plan, context, look, (deterministic, return_max_logit, return_lse), q, k, v, offset)
    with context.alone("attention, forward"), no_autocast(q.device.type):
        done = forward_pass(the_plan, context, q, k, v, offset, return_max_logit=return_max_logit)
    max_logit = q.new_empty(0) if done.max_logit is None else done.max_logit
    kept = done.saved if group_rows else Saved(*(q.new_empty(0) for _ in Saved._fields))
    return _flat(done.out.contiguous(), done.lse.contiguous(), max_logit, kept)


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: Tensor | None,
    plan: Tensor,
    cp: Tensor,
    qkv_format: str,
    group_rows: bool,
    deterministic: bool,
    return_max_logit: bool,
    return_lse: bool,
) -> Eight:
    wide, (*tokens, heads, _) = wide_dtype(q.dtype), q.shape
    lse_shape = {"bshd": (*tokens[:1], heads, *tokens[1:]), "sbhd": (*tokens[1:], heads, *tokens[:1])}
    out, lse = q.new_empty(*tokens, heads, v.shape[-1]), lse_shape.get(qkv_format, (heads, *tokens))
    kept = Saved(*(q.new_empty(0) for _ in Saved._fields))
    if group_rows:
        new_size = torch.library.get_ctx().new_dynamic_size
        n, m, own_q, own_kv = (new_size() for _ in range(4))
        kept = Saved(
            q.new_empty(n, own_q, q.shape[-1]),
            k.new_empty(m, own_kv, k.shape[-1]),
            v.new_empty(m, own_kv, v.shape[-1]),
            q.new_empty(n, own_q, v.shape[-1]),
            q.new_empty(own_q, n, dtype=wide),
        )
    max_logit = q.new_empty(heads if return_max_logit else 0, dtype=wide)
    return _flat(out, q.new_empty(lse, dtype=wide), max_logit, kept)


@torch.library.custom_op("cp_attention::attention_backward", mutates_args=())
def _backward(
    saved: list[Tensor],
    out: Tensor,
    lse: Tensor,
    offset: Tensor | None,
    dout: Tensor | None,
    dlse: Tensor | None,
    plan: Tensor,
    cp: Tensor,
    q_shape: list[int],
    k_shape: list[int],
    v_shape: list[int],
    group_rows: bool,
    deterministic: bool,
    wants_offset: bool,
    lse_given: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    the_plan, context = object_of(plan), object_of(cp)
    if checking():
        agree_on_call(context, the_plan, "backward", lambda: None, ("wants", wants_offset))
    packing = the_plan.packing
    rows = saved if group_rows else [*(packing.pack(x) for x in (*saved, out)), packing.pack_lse(lse)]
    with context.alone("attention, backward"), no_autocast(out.device.type):
        dq, dk, dv, doffset = backward_pass(
            the_plan,
            context,
            Saved(*rows),
            out,
            lse,
            offset,
            dout,
            dlse,
            (packing.rows(q_shape), packing.rows(k_shape)),
            deterministic=deterministic,
            wants_offset=wants_offset,
            lse_given=lse_given,
        )
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), out.new_empty(0) if doffset is None else doffset


@_backward.register_fake
def _(
    saved: list[Tensor],
    out: Tensor,
    lse: Tensor,
    offset: Tensor | None,
    dout: Tensor | None,
    dlse: Tensor | None,
    plan: Tensor,
    cp: Tensor,
    q_shape: list[int],
    k_shape: list[int],
    v_shape: list[int],
    group_rows: bool,
    deterministic: bool,
    wants_offset: bool,
    lse_given: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    doffset = out.new_empty(0) if offset is None or not wants_offset else torch.empty_like(offset)
    return out.new_empty(q_shape), out.new_empty(k_shape), out.new_empty(v_shape), doffset


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, offset, plan, cp, _, group_rows, deterministic, _, lse_given = inputs
    out, lse, max_logit, *kept = output
    ctx.save_for_backward(out, lse, offset, plan, cp, *(kept if group_rows else (q, k, v)))
    ctx.shapes = [list(x.shape) for x in (q, k, v)]
    ctx.group_rows, ctx.deterministic, ctx.lse_given = group_rows, deterministic, lse_given
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(max_logit, *kept)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Tensor | None) -> Any:
    out, lse, offset, plan, cp, *saved = ctx.saved_tensors
    wants_offset = offset is not None and ctx.needs_input_grad[3]
    how = ctx.group_rows, ctx.deterministic, wants_offset, ctx.lse_given
    dq, dk, dv, doffset = _backward(saved, out, lse, offset, dout, dlse, plan, cp, *ctx.shapes, *how)
    return dq, dk, dv, doffset if wants_offset else None, *(None,) * 7


_forward.register_autograd(_differentiate, setup_context=_keep)
