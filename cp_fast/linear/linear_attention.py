"""`linear_attention`: a linear layer of a hybrid model, on the slices of attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import NoneType
from typing import Any, cast

import torch

from cp_fast.api.checked_calls import agree_on_call, agree_on_layer_call, checking
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan
from cp_fast.api.planned_call import PLAIN_TENSORS
from cp_fast.dispatch.selective_checkpointing import unseen
from cp_fast.linear.choose_kernels import choose_kernels, features_of_call
from cp_fast.linear.linear_kernels import Kind, LinearInputs, LinearKernels
from cp_fast.linear.linear_passes import Saved, backward_pass, forward_pass
from cp_fast.linear.linear_plan import LinearPlan, captured, check_not_captured, check_same_batch
from cp_ref.contract import linear_calls
from cp_ref.contract.call_checks import check_context
from cp_ref.contract.declared import implements
from cp_ref.contract.linear_calls import LinearCall, read_linear_attention
from cp_ref.contract.tensors import autocast, differentiable_once, no_autocast, refuse_transforms

__all__ = ["linear_attention"]


@implements(linear_calls.linear_attention)
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    *,
    cp: ContextParallel,
    plan: Plan,
    kind: str,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
) -> Any:
    check_context(cp, ContextParallel)
    options = {"kind": kind, "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state}
    if torch.compiler.is_compiling():
        from cp_fast.dispatch.graph_break import graph_break  # imports Dynamo, as slow as importing PyTorch

        return graph_break(linear_attention, q, k, v, g, beta, cp=cp, plan=plan, **options)
    refuse_transforms()

    tensors = {"q": autocast(q), "k": autocast(k), "v": autocast(v), "g": g, "beta": beta}
    key = call_key(cp, plan, (*tensors.values(), initial_state), kind, scale, output_final_state)
    number = 0
    if key is None or checking() or (found := plan.linear_plan.calls.get(key)) is None:

        def read() -> LinearCall:
            check_not_captured(plan)
            call = read_linear_attention(cp, plan, Plan, tensors, **options)
            kernels_for(call, cp, tensors["q"].device)
            return call

        with unseen():
            call, number = agree_on_layer_call(cp, plan, "linear_attention", read)
        found = call, kernels_for(call, cp, tensors["q"].device)
        if key is not None and not number:
            plan.linear_plan.calls[key] = found
    call, kernels = found
    out, final = LinearAttention.apply(plan, kernels, cp, call, number, *tensors.values(), initial_state)
    return (out, final) if output_final_state else out


def call_key(
    cp: ContextParallel, plan: Any, tensors: Sequence[Any], kind: Any, scale: Any, output_final_state: Any
) -> tuple[Any, ...] | None:
    """All values that the checks of a call depend on; None for a call that is always checked."""
    if not isinstance(plan, Plan) or not plan.linear or captured(plan):
        return None
    if type(kind) is not str or type(scale) not in (float, NoneType) or type(output_final_state) is not bool:
        return None
    kinds: list[Any] = []
    for x in tensors:
        if x is None:
            kinds.append(None)
        elif type(x) in PLAIN_TENSORS:
            kinds += x.shape, x.dtype, x.device, x.layout, x.requires_grad
        else:
            return None
    return cp, kind, scale, output_final_state, torch.is_grad_enabled(), *kinds


def kernels_for(call: LinearCall, cp: ContextParallel, device: torch.device) -> LinearKernels:
    """The library of a call. Raises Unsupported."""
    return choose_kernels(features_of_call(device.type, call.dtype, call.d_k, call.d_v), cp.backend)


class LinearAttention(torch.autograd.Function):
    """From q, k, v, g, beta and initial_state to out and final_state (or None)."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: Plan,
        kernels: LinearKernels,
        cp: ContextParallel,
        call: LinearCall,
        number: int,
        *given: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        plan = owner.linear_plan
        *tensors, initial = (None if x is None else x.detach() for x in given)
        first = cast(torch.Tensor, tensors[0])
        with unseen(), cp.alone("linear_attention, forward"), no_autocast(first.device):
            inputs = _packed(plan, call, tensors)
            if initial is not None:
                initial = initial.to(_state_dtype(call.dtype))
            out, final, saved = forward_pass(plan, kernels, cp.comm, inputs, initial, final=call.output_final_state)
            out = plan.sequences.put(out.to(first.dtype), first)
        kept, maps, entering = saved
        ctx.save_for_backward(*given, maps, entering, *kept)
        ctx.owner, ctx.plan, ctx.kernels, ctx.cp, ctx.call, ctx.number = owner, plan, kernels, cp, call, number
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: torch.Tensor | None, dfinal: torch.Tensor | None) -> Any:
        plan, call = ctx.plan, ctx.call
        if ctx.number:
            with unseen():
                look = partial(check_same_batch, ctx.owner, plan)
                agree_on_call(ctx.cp, ctx.owner, "linear_attention, backward", look, ("of_call", ctx.number))
        check_same_batch(ctx.owner, plan)
        *tensors, initial, maps, entering = (everything := ctx.saved_tensors)[:8]
        device = tensors[0].device
        with unseen(), ctx.cp.alone("linear_attention, backward"), no_autocast(device):
            inputs = _packed(plan, call, tensors)
            dpacked = torch.zeros_like(inputs.v) if dout is None else plan.sequences.take(dout).to(inputs.v.dtype)
            if call.output_final_state and dfinal is None:
                shape = len(plan.problem.lengths.len_q), call.heads_v, call.d_k, call.d_v
                dfinal = dpacked.new_zeros(shape, dtype=_state_dtype(call.dtype))
            saved = Saved(everything[8:], maps, entering)
            found = backward_pass(plan, ctx.kernels, ctx.cp.comm, inputs, saved, dpacked, dfinal)
            grads = [
                None if x is None or grad is None else plan.sequences.put(grad.to(x.dtype), x)
                for x, grad in zip(tensors, found[:5], strict=True)
            ]
        dinitial = None if initial is None or found.dinitial is None else found.dinitial.to(initial.dtype)
        return None, None, None, None, None, *grads, dinitial


def _packed(plan: LinearPlan, call: LinearCall, tensors: Sequence[Any]) -> LinearInputs:
    q, k, v, g = (plan.sequences.take(x) for x in tensors[:4])
    beta = None if tensors[4] is None else plan.sequences.take(tensors[4])
    return LinearInputs(q, k, v, g, beta, call.scale, cast(Kind, call.kind))


def _state_dtype(dtype: str) -> torch.dtype:
    """Of states: float64 for float64, else float32."""
    return torch.float64 if dtype == "float64" else torch.float32
