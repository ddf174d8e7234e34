"""`linear_attention`: a linear layer of a hybrid model, on the slices of attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch

from cp_fast.api.checked_calls import agree_on_backward, layer_call
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan, messages_of
from cp_fast.backends.backend_protocol import NotInstalled
from cp_fast.dispatch.handles import hide_from_checkpointing, outside_of_graphs
from cp_fast.linear.chunked import ChunkedKernels
from cp_fast.linear.fla.fla_kernels import FlaKernels
from cp_fast.linear.linear_kernels import Kind, LinearInputs, LinearKernels
from cp_fast.linear.linear_passes import Saved, backward_pass, forward_pass
from cp_fast.linear.linear_plan import LinearTables, linear_tables
from cp_fast.log import log_once
from cp_ref.contract import linear_calls
from cp_ref.contract.call_checks import check_context
from cp_ref.contract.declared import implements
from cp_ref.contract.linear_calls import LinearCall, read_linear_attention
from cp_ref.contract.tensors import autocast, differentiable_once, no_autocast, refuse_transforms
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "LIBRARIES",
    "choose_kernels",
    "features_of_call",
    "linear_attention",
]

# ---- the choice of a library
#
# The choice of a library of linear attention, by the rule of `cp_fast.backends.choose`.


LIBRARIES: tuple[LinearKernels, ...] = FlaKernels(), ChunkedKernels()
_NAMES = {"torch": ("torch",), "cpu": ("torch",)}  # by ContextParallel.backend; others mean all, in their order


def features_of_call(device: str, dtype: str, d_k: int, d_v: int) -> frozenset[Feature]:
    """What a call asks of a library. dtype: PyTorch's name without "torch.".

    >>> sorted(features_of_call("cpu", "float32", 128, 20))
    [<Feature.CPU: 'device cpu'>, <Feature.FLOAT32: 'float32'>, <Feature.HEAD_DIM_ODD: 'head dim not a multiple of 8'>]
    """
    conditions = {
        Feature.HEAD_DIM_OVER_128: max(d_k, d_v) > 128,
        Feature.HEAD_DIM_OVER_256: max(d_k, d_v) > 256,
        Feature.HEAD_DIM_ODD: d_k % 8 != 0 or d_v % 8 != 0,
    }
    always = {Feature(f"device {device}"), Feature(dtype)}
    return frozenset(always | {feature for feature, needed in conditions.items() if needed})


@cache
def choose_kernels(required: frozenset[Feature], backend: str) -> LinearKernels:
    """The first library that works here and has every feature. `ContextParallel.backend` "torch" or "cpu" takes plain
    PyTorch; "auto", and the name of a library of attention, take flash-linear-attention first.

    Raises:
        Unsupported: there is none; it names for every library the features that it lacks, or why it does not work.
    """
    names = _NAMES.get(backend)
    missing: dict[str, frozenset[Feature]] = {}
    reasons: list[str] = []
    missed: list[str] = []
    for library in LIBRARIES:
        if names is not None and library.name not in names:
            continue
        if lacking := required - library.features:
            missing[library.name] = lacking
        elif (reason := library.why_not()) is not None:
            reasons.append(f"{library.name} does not work here: {reason}")
            if isinstance(reason, NotInstalled):
                missed.append(f"{library.name}: {reason}")
        else:
            if missed:
                log_once(
                    f"linear attention runs on {library.name}; what this GPU prefers is not installed "
                    f"({'; '.join(missed)}); ContextParallel(backend={library.name!r}) takes it without a word"
                )
            return library
    raise Unsupported(f"linear attention with backend {backend!r}", missing, hint="\n  ".join(reasons))


# ---- the layer


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
        return outside_of_graphs(linear_attention, q, k, v, g, beta, cp=cp, plan=plan, **options)
    refuse_transforms()

    tensors = {"q": autocast(q), "k": autocast(k), "v": autocast(v), "g": g, "beta": beta}
    given = *tensors.values(), initial_state

    def read() -> LinearCall:
        call = read_linear_attention(cp, plan, Plan, tensors, **options)
        kernels_for(call, cp, tensors["q"].device)
        return call

    call, number = layer_call(cp, plan, "linear_attention", (kind, scale, output_final_state), given, read)
    kernels = kernels_for(call, cp, tensors["q"].device)
    out, final = LinearAttention.apply(plan, kernels, cp, call, number, *given)
    return (out, final) if output_final_state else out


def kernels_for(call: LinearCall, cp: ContextParallel, device: torch.device) -> LinearKernels:
    """The library of a call. Raises Unsupported."""
    return _kernels_for(device.type, call.dtype, call.d_k, call.d_v, cp.backend)


@cache
def _kernels_for(device: str, dtype: str, d_k: int, d_v: int, backend: str) -> LinearKernels:
    return choose_kernels(features_of_call(device, dtype, d_k, d_v), backend)


class LinearAttention(torch.autograd.Function):
    """From q, k, v, g, beta and initial_state to out and final_state (or None)."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        kernels: LinearKernels,
        cp: ContextParallel,
        call: LinearCall,
        number: int,
        *given: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tables = linear_tables(plan)
        *tensors, initial = (None if x is None else x.detach() for x in given)
        first = cast(torch.Tensor, tensors[0])
        with hide_from_checkpointing(), cp.naming_errors("linear_attention, forward"), no_autocast(first.device):
            inputs = _packed(tables, call, tensors)
            if initial is not None:
                initial = initial.to(_state_dtype(call.dtype))
            group = messages_of(plan, cp.comm)
            out, final, saved = forward_pass(tables, kernels, group, inputs, initial, final=call.output_final_state)
            out = tables.sequences.put(out.to(first.dtype), first)
        kept, maps, entering = saved
        ctx.save_for_backward(*given, maps, entering, *kept)
        ctx.plan, ctx.tables, ctx.kernels, ctx.cp, ctx.call, ctx.number = plan, tables, kernels, cp, call, number
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: torch.Tensor | None, dfinal: torch.Tensor | None) -> Any:
        tables, call = ctx.tables, ctx.call
        agree_on_backward(ctx, "linear_attention, backward")
        *tensors, initial, maps, entering = (everything := ctx.saved_tensors)[:8]
        device = tensors[0].device
        with hide_from_checkpointing(), ctx.cp.naming_errors("linear_attention, backward"), no_autocast(device):
            inputs = _packed(tables, call, tensors)
            dpacked = torch.zeros_like(inputs.v) if dout is None else tables.sequences.take(dout).to(inputs.v.dtype)
            if call.output_final_state and dfinal is None:
                shape = len(tables.problem.lengths.len_q), call.heads_v, call.d_k, call.d_v
                dfinal = dpacked.new_zeros(shape, dtype=_state_dtype(call.dtype))
            saved = Saved(everything[8:], maps, entering)
            group = messages_of(ctx.plan, ctx.cp.comm)
            found = backward_pass(tables, ctx.kernels, group, inputs, saved, dpacked, dfinal)
            grads = [
                None if x is None or grad is None else tables.sequences.put(grad.to(x.dtype), x)
                for x, grad in zip(tensors, found[:5], strict=True)
            ]
        dinitial = None if initial is None or found.dinitial is None else found.dinitial.to(initial.dtype)
        return None, None, None, None, None, *grads, dinitial


def _packed(tables: LinearTables, call: LinearCall, tensors: Sequence[Any]) -> LinearInputs:
    q, k, v, g = (tables.sequences.take(x) for x in tensors[:4])
    beta = None if tensors[4] is None else tables.sequences.take(tensors[4])
    return LinearInputs(q, k, v, g, beta, call.scale, cast(Kind, call.kind))


def _state_dtype(dtype: str) -> torch.dtype:
    """Of states: float64 for float64, else float32."""
    return torch.float64 if dtype == "float64" else torch.float32
