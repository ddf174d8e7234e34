"""Attention of one layer as an autograd function."""

from __future__ import annotations

from typing import Any

import torch

from cp_fast.api.checked_calls import agree_on_call
from cp_fast.api.library_operators import forward_as_operator
from cp_fast.api.planned_call import AttentionCall
from cp_fast.dispatch.selective_checkpointing import is_selective
from cp_fast.runtime.forward_backward import backward_pass, forward_pass
from cp_ref.contract.tensors import differentiable_once, no_autocast

__all__ = ["Attention"]


class Attention(torch.autograd.Function):
    """From q, k, v and offset to out, lse and max_logit (or None). All but max_logit are differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        offset: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        plan, compiled, cp, flags, _, scores = call
        # saved like this, the backward pass need not do it again
        q, k, v = q.detach(), k.detach(), v.detach()
        if is_selective():
            out, lse, max_logit, kept = forward_as_operator(plan, cp, flags, scores, q, k, v, offset)
        else:
            with cp.alone("attention, forward"), no_autocast(q.device):
                how = {"return_max_logit": flags.return_max_logit}
                out, lse, max_logit, kept = forward_pass(compiled, cp, q, k, v, offset, scores, **how)
        given, of_scores = (q, k, v) if plan.needs_inputs else (), () if scores is None else scores.tensors
        ctx.save_for_backward(out.detach(), lse.detach(), offset, *kept, *given, *of_scores)
        ctx.call, ctx.handle, ctx.kept, ctx.saved = call, plan.handle, len(kept), len(kept) + len(given)
        ctx.set_materialize_grads(False)  # an lse that nobody differentiates must not cost its gradient's feature
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
        return out, lse, max_logit

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        plan, compiled, cp, flags, number, scores = ctx.call
        wants_offset = ctx.needs_input_grad[4]

        def look() -> None:
            if plan.handle is not ctx.handle:  # every batch of a plan has its own
                raise RuntimeError("the plan was updated between the forward and the backward pass of a call")

        if number:
            details = ("of_call", number), ("deterministic", flags.deterministic), ("wants", wants_offset)
            agree_on_call(cp, plan, "backward", look, *details)
        look()
        out, lse, offset, *tensors = ctx.saved_tensors
        tensors, of_scores = tensors[: ctx.saved], tensors[ctx.saved :]
        with cp.alone("attention, backward"), no_autocast(out.device):
            dq, dk, dv, doffset = backward_pass(
                compiled,
                cp,
                tuple(tensors[ctx.kept :]) or None,
                tensors[: ctx.kept],
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
