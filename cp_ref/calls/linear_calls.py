"""`linear_attention` and `causal_conv1d`, declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from cp_ref.batches.tensors import autocast, needs_grad
from cp_ref.calls.layer import (
    Layer,
    LayerCall,
    Operand,
    check_last,
    check_linear_plan,
    check_local,
    check_rows,
    read_scale,
)
from cp_ref.calls.plan_arguments import Plan
from cp_ref.groups.context import ContextParallel
from cp_ref.schedules.values import check_choice, check_dtype, check_flag, dtype_of

__all__ = [
    "ACTIVATIONS",
    "CONVOLUTION",
    "LINEAR",
    "LINEAR_KINDS",
    "Activation",
    "ConvolutionCall",
    "LinearCall",
    "LinearKind",
    "causal_conv1d",
    "columns_apart",
    "columns_together",
    "linear_attention",
]

LinearKind = Literal["gated_delta_rule", "kda", "mamba2", "mamba"]
LINEAR_KINDS: tuple[LinearKind, ...] = ("gated_delta_rule", "kda", "mamba2", "mamba")
_DELTA_RULES = ("gated_delta_rule", "kda")  # which have beta
Activation = Literal["silu", "swish"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "swish")


@overload
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    cp: ContextParallel,
    plan: Plan,
    kind: LinearKind = "gated_delta_rule",
    A: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    cp: ContextParallel,
    plan: Plan,
    kind: LinearKind = "gated_delta_rule",
    A: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    cp: ContextParallel,
    plan: Plan,
    kind: LinearKind = "gated_delta_rule",
    A: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    cp: ContextParallel,
    plan: Plan,
    kind: LinearKind = "gated_delta_rule",
    A: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> Any:
    """Compute linear attention over documents whose tokens are spread over the ranks of `cp`. Collective, forward and
    backward.

    Each document and head has a state S [d_k, d_v]. It begins as `initial_state`, or as zero. The tokens of the
    document act on it one after the other, and each reads it:

        gated_delta_rule   S = exp(g) S;         S = S + beta k (v - S^T k)^T;   out = scale S^T q
        kda                S = diag(exp(g)) S;   S = S + beta k (v - S^T k)^T;   out = scale S^T q
        mamba2             S = exp(g) S;         S = S + k v^T;                  out = scale S^T q
        mamba              S = exp(A * g) S;     S = S + k v^T;                  out = scale S^T q

    In "mamba" each number of S decays by itself: A is of S's shape, and g has a number for each column.

    The slices are those of attention, in every layout. The schedule of states is planned by
    `make_plan(..., linear=True)`, and does not depend on `cp_comm_type`: the map of a fragment goes straight to the
    ranks that hold later fragments of its document. A document that lies on one rank sends nothing. Masks, windows and
    heads of the plan are those of attention, and mean nothing here.

    Args:
        q, k: this rank's slices: bshd [b, s/cp, h, d_k], sbhd [s/cp, b, h, d_k], thd [t/cp, h, d_k] (or longer: the
            rest is tail). float16, bfloat16, float32, or float64. Under torch.autocast q, k and v are cast to its
            dtype. Nothing is normalised here: delta rules need k of length at most 1 to be stable.
        v: the same with h_v heads of d_v; h_v is a multiple of h. Head j of v, g and beta uses head j // (h_v // h) of
            q and k.
        g: the logarithm of the decay, at most 0 in any stable layer: [..., h_v]; for "kda" [..., h_v, d_k]; for "mamba"
            the step of time [..., h_v, d_v], which A multiplies. In q's dtype or float32.
        beta: the writing strength [..., h_v], needed by the delta rules, in q's dtype or float32; None for the others.
        cp: the group and the layout.
        plan: from `make_plan(..., linear=True)`, for this batch.
        kind: the recurrence. "gated_delta_rule" is that of Qwen3-Next, "kda" that of Kimi Linear, "mamba2" the
            recurrence of Mamba-2's scalar decay; there k is B, q is C, v is dt x, g is dt A, and scale is 1. "mamba" is
            the selective scan of Mamba, and with d_k = 1 the RG-LRU of RecurrentGemma: there k is B, q is C, v is dt x,
            g is dt, h and h_v are 1, d_k is the size of a channel's state, d_v counts channels, and scale is 1.
        A: the rates of decay [h_v, d_k, d_v] of kind "mamba", the same on every rank, in q's dtype or float32; None for
            the others. A * g is at most 0 in any stable layer. Its gradient is this rank's share, as those of weights.
        scale: a finite number; default d_k ** -0.5.
        initial_state: [b, h_v, d_k, d_v], one state a document of the plan, the same on every rank; in q's dtype,
            float32, or float64. Its gradient is this rank's share, as the gradients of weights are: the shares of all
            ranks add up to the gradient.
        output_final_state: return the final states too.

    Returns:
        out, or (out, final_state): out in v's shape and q's dtype, zero in padding and tail; final_state
        [b, h_v, d_k, d_v], float32 (float64 for float64), the same on every rank. A document without tokens ends in its
        initial state. Differentiable once in all tensors, through both results. Gradients of final_state on different
        ranks add up, since each rank's loss is its own. With output_final_state the backward pass is collective even
        where only final_state has a gradient.

    Raises:
        ValueError, TypeError: an argument is wrong, here or, in the first call of these sizes with this plan, on
        another rank; named with its value and the rule, before anything is sent. Unsupported: naming what is missing.

    Sources: Gated Delta Networks (Yang et al., 2024), Kimi Linear (2025), Transformers are SSMs (Dao and Gu, 2024),
    Mamba (Gu and Dao, 2023), Griffin (De et al., 2024); the meaning of g, beta, scale and the state's layout is that of
    flash-linear-attention.
    """
    raise NotImplementedError


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cp: ContextParallel,
    plan: Plan,
    activation: Activation | None = None,
) -> torch.Tensor:
    """Convolve each channel causally along documents that are spread over the ranks of `cp`. Collective, forward and
    backward.

    Row i of a document is `bias + sum over j of weight[:, j] * x[i - (kernel_size - 1) + j]`, and then the activation.
    Rows before the document count as zero, so `weight[:, -1]` is the factor of the row itself. A rank receives at most
    kernel_size - 1 rows for each of its fragments, straight from their owners, whatever `cp_comm_type` is.

    Args:
        x: this rank's slice: bshd [b, s/cp, channels], sbhd [s/cp, b, channels], thd [t/cp, channels] (or longer: the
            rest is tail). float16, bfloat16, float32, or float64. Under torch.autocast it is cast to its dtype.
        weight: [channels, kernel_size], the same on every rank; in x's dtype or float32. (A torch.nn.Conv1d with groups
            has [channels, 1, kernel_size]: give weight[:, 0].)
        bias: [channels], likewise.
        cp: the group and the layout.
        plan: from `make_plan(..., linear=True)`, for this batch.
        activation: None, or "silu" ("swish" is the same).

    Returns:
        The slice of the result, in x's shape and dtype, zero in padding and tail. Sums are in float32 or wider.
        Differentiable once in x, weight and bias. The gradients of weight and bias are this rank's share: those of all
        ranks add up to the gradient.

    Raises:
        As `linear_attention`.

    Source: the short convolutions of Mamba (Gu and Dao, 2023), as in causal-conv1d and flash-linear-attention.
    """
    raise NotImplementedError


@dataclass(frozen=True)
class LinearCall(LayerCall):
    """A checked call of `linear_attention`. `scale` is resolved, dtypes are PyTorch's names without "torch."."""

    kind: LinearKind
    heads: int
    heads_v: int
    d_k: int
    d_v: int
    dtype: str
    scale: float
    initial_state: bool
    output_final_state: bool
    requires_grad: bool


@dataclass(frozen=True)
class ConvolutionCall(LayerCall):
    """A checked call of `causal_conv1d`. `activation` is "silu" or None."""

    channels: int
    kernel_size: int
    dtype: str
    bias: bool
    activation: str | None
    requires_grad: bool


def _read_linear_attention(
    cp: ContextParallel,
    plan: Any,
    package_plan: type,
    /,
    *,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A: Any,
    initial_state: Any,
    kind: Any,
    scale: Any,
    output_final_state: Any,
) -> LinearCall:
    check_linear_plan(cp, plan, package_plan)
    check_choice("kind", kind, LINEAR_KINDS)
    check_flag("output_final_state", output_final_state)
    for name, x, has_it in (("beta", beta, kind in _DELTA_RULES), ("A", A, kind == "mamba")):
        if x is not None and not has_it:
            raise ValueError(f"{name} is given, but kind is {kind!r}, which has none; leave it out")
        if x is None and has_it:
            raise ValueError(f"{name} is None, but kind is {kind!r}, which needs it")
    check_rows(plan, "q", q, "h, d_k")
    check_rows(plan, "k", k, "h, d_k", q)
    check_rows(plan, "v", v, "h_v, d_v", q)
    check_rows(plan, "g", g, {"kda": "h_v, d_k", "mamba": "h_v, d_v"}.get(kind, "h_v"), q, wide=True)
    heads, d_k, heads_v, d_v = *q.shape[-2:], *v.shape[-2:]
    for name, size in (("h", heads), ("d_k", d_k), ("h_v", heads_v), ("d_v", d_v)):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    if k.shape != q.shape:
        raise ValueError(f"k has shape {list(k.shape)} and q {list(q.shape)}; they must be equal")
    if heads_v % heads:
        raise ValueError(f"h_v is {heads_v} and h is {heads}; h_v must be a multiple of h")
    check_last("g", g, {"kda": (heads_v, d_k), "mamba": (heads_v, d_v)}.get(kind, (heads_v,)))
    if beta is not None:
        check_rows(plan, "beta", beta, "h_v", q, wide=True)
        check_last("beta", beta, (heads_v,))
    if A is not None:
        check_local("A", A, "q", q)
        check_dtype("A", A, dtype_of(q), "float32")
        if list(A.shape) != [heads_v, d_k, d_v]:
            raise ValueError(f"A has shape {list(A.shape)}; it must be [h_v, d_k, d_v] = {[heads_v, d_k, d_v]}")
    if initial_state is not None:
        check_local("initial_state", initial_state, "q", q)
        wanted = [len(plan.problem.sequences), heads_v, d_k, d_v]
        if list(initial_state.shape) != wanted:
            raise ValueError(
                f"initial_state has shape {list(initial_state.shape)}; it must be [b, h_v, d_k, d_v] = {wanted}"
            )
        check_dtype("initial_state", initial_state, dtype_of(q), "float32", "float64")
    return LinearCall(
        "linear_attention",
        kind,
        heads,
        heads_v,
        d_k,
        d_v,
        dtype_of(q),
        read_scale(scale, d_k),
        initial_state is not None,
        output_final_state,
        needs_grad(q, k, v, g, beta, A, initial_state),
    )


def columns_apart(states: torch.Tensor) -> torch.Tensor:
    """States of kind "mamba" with each column as a head of its own: [..., h_v, d_k, d_v] -> [..., h_v * d_v, d_k, 1].

    >>> columns_apart(torch.arange(6).view(1, 2, 3))[..., 0].tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    return states.transpose(-1, -2).flatten(-3, -2)[..., None]


def columns_together(states: torch.Tensor, d_v: int) -> torch.Tensor:
    """`columns_apart` undone."""
    *before, _, d_k, _ = states.shape
    return states.reshape(*before, -1, d_v, d_k).transpose(-1, -2)


LINEAR = Layer(
    "linear_attention",
    (
        Operand("q", autocast),
        Operand("k", autocast),
        Operand("v", autocast),
        Operand("g"),
        Operand("beta", optional=True),
        Operand("A", optional=True),
        Operand("initial_state", optional=True),
    ),
    {"kind": "str", "scale": "float?", "output_final_state": "bool"},
    _read_linear_attention,
    second="output_final_state",
)


def _read_convolution(
    cp: ContextParallel, plan: Any, package_plan: type, /, *, x: Any, weight: Any, bias: Any, activation: Any
) -> ConvolutionCall:
    check_linear_plan(cp, plan, package_plan)
    if activation is not None:
        check_choice("activation", activation, ACTIVATIONS)
    check_rows(plan, "x", x, "channels")
    channels = x.shape[-1]
    for name, tensor, shape in (("weight", weight, "channels, kernel_size"), ("bias", bias, "channels")):
        if name == "bias" and tensor is None:
            continue
        check_local(name, tensor, "x", x)
        check_dtype(name, tensor, dtype_of(x), "float32")
        if len(tensor.shape) != len(shape.split(", ")) or tensor.shape[0] != channels:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, and x has {channels} channels; it must be [{shape}]"
            )
    for name, size in (("channels", channels), ("kernel_size", weight.shape[1])):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    return ConvolutionCall(
        "causal_conv1d",
        channels,
        weight.shape[1],
        dtype_of(x),
        bias is not None,
        None if activation is None else "silu",
        needs_grad(x, weight, bias),
    )


CONVOLUTION = Layer(
    "causal_conv1d",
    (Operand("x", autocast), Operand("weight"), Operand("bias", optional=True)),
    {"activation": "str?"},
    _read_convolution,
)
