"""`causal_conv1d`: a short convolution of a hybrid model, on the slices of attention."""

from __future__ import annotations

from typing import Any

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.make_plan import Plan
from cp_fast.dispatch.selective_checkpointing import unseen
from cp_fast.linear.convolution.convolution_passes import convolve, gradients, with_halo
from cp_fast.linear.linear_plan import LinearPlan, check_not_captured, check_same_batch
from cp_ref.common.autocast import autocast, no_autocast
from cp_ref.common.declared import implements
from cp_ref.common.derivatives import differentiable_once, refuse_transforms
from cp_ref.common.linear import linear_calls
from cp_ref.common.linear.linear_checks import ConvolutionCall, agree_on_layer, read_convolution
from cp_ref.spec import check_context

__all__ = ["causal_conv1d"]


@implements(linear_calls.causal_conv1d)
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    cp: ContextParallel,
    plan: Plan,
    activation: str | None,
) -> torch.Tensor:
    check_context(cp, ContextParallel)
    if torch.compiler.is_compiling():
        from cp_fast.dispatch.graph_break import graph_break  # imports Dynamo, as slow as importing PyTorch

        return graph_break(causal_conv1d, x, weight, bias, cp=cp, plan=plan, activation=activation)
    refuse_transforms()
    x = autocast(x)

    def read() -> ConvolutionCall:
        check_not_captured(plan)
        return read_convolution(cp, plan, Plan, x, weight, bias, activation)

    with unseen():
        call = agree_on_layer(cp, plan, read)
    return Convolution.apply(plan, cp, call, x, weight, bias)


class Convolution(torch.autograd.Function):
    """From x, weight and bias to the slice of the result."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: Plan,
        cp: ContextParallel,
        call: ConvolutionCall,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        plan = owner.linear_plan
        with unseen(), cp.alone("causal_conv1d, forward"), no_autocast(x.device):
            tables = plan.halo(call.kernel_size)
            held = with_halo(tables, cp.comm, plan.rows.take(x.detach()))
            sums = convolve(tables, held, weight.detach().to(wide), None if bias is None else bias.detach().to(wide))
            out = torch.nn.functional.silu(sums) if call.activation else sums
            out = plan.rows.put(out.to(x.dtype), x)
        ctx.save_for_backward(held, weight, bias)
        ctx.owner, ctx.plan, ctx.cp, ctx.call, ctx.shape = owner, plan, cp, call, x.shape
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        plan: LinearPlan = ctx.plan
        check_same_batch(ctx.owner, plan)
        held, weight, bias = ctx.saved_tensors
        wide = torch.float64 if held.dtype == torch.float64 else torch.float32
        with unseen(), ctx.cp.alone("causal_conv1d, backward"), no_autocast(held.device):
            tables, factors = plan.halo(ctx.call.kernel_size), weight.to(wide)
            dsums = plan.rows.take(dout).to(wide)
            if ctx.call.activation:
                sums = convolve(tables, held, factors, None if bias is None else bias.to(wide))
                gate = torch.sigmoid(sums)
                dsums = dsums * gate * (1 + sums * (1 - gate))
            dx, dweight = gradients(tables, ctx.cp.comm, held, factors, dsums)
            dx = plan.rows.put(dx.to(held.dtype), dout)
            dbias = None if bias is None else dsums.sum(0).to(bias.dtype)
        return None, None, None, dx, dweight.to(weight.dtype), dbias
