"""The arguments of linear layers, checked in both packages before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from numbers import Real
from typing import Any, TypeVar

import torch

from cp_ref.common.context import ContextParallel
from cp_ref.common.linear.linear_calls import ACTIVATIONS, KINDS
from cp_ref.common.linear.slice_checks import check_dtype, check_last, check_plan, check_rows, check_tensor, name_of
from cp_ref.common.plan_arguments import Plan
from cp_ref.spec import check_choice, check_flag, read_together

__all__ = ["ConvolutionCall", "LinearCall", "agree_on_layer", "read_convolution", "read_linear_attention"]


@dataclass(frozen=True)
class _Call:
    """The sizes of a call that all ranks must have in common: they decide what is sent."""

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal for equal calls."""
        return blake2b(repr(self).encode()).digest()[:32]


@dataclass(frozen=True)
class LinearCall(_Call):
    """A checked call of `linear_attention`. `scale` is resolved, dtypes are PyTorch's names without "torch."."""

    kind: str
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
class ConvolutionCall(_Call):
    """A checked call of `causal_conv1d`. `activation` is "silu" or None."""

    channels: int
    kernel_size: int
    dtype: str
    bias: bool
    activation: str | None
    requires_grad: bool


Call = TypeVar("Call", bound=_Call)


def agree_on_layer(cp: ContextParallel, plan: Any, read: Callable[[], Call]) -> Call:
    """This rank's call, once all ranks have read theirs and have the same sizes; else all raise. A plan asks the other
    ranks once about each kind of call.

    read: reads and checks this rank's arguments, the plan included; sends nothing.
    """
    known: set[bytes] = plan.agreed if isinstance(plan, Plan) else set()
    with cp.alone("an agreement on a linear layer"):
        call = read_together(cp.comm, read, lambda found: found, known)
    known.add(call.fingerprint)
    return call


def read_linear_attention(
    cp: ContextParallel,
    plan: Any,
    package_plan: type,
    tensors: dict[str, Any],
    *,
    kind: Any,
    scale: Any,
    initial_state: Any,
    output_final_state: Any,
) -> LinearCall:
    """The arguments of `linear_attention`, checked against the plan. tensors: q, k, v, g and beta, by name, as they go
    into the kernels (after autocast). package_plan: the package's own Plan.

    Raises:
        ValueError, TypeError: naming the argument, its value and the rule.
    """
    check_plan(cp, plan, package_plan)
    check_choice("kind", kind, KINDS)
    check_flag("output_final_state", output_final_state)
    q, k, v, g, beta = (tensors[name] for name in ("q", "k", "v", "g", "beta"))
    if kind == "mamba2" and beta is not None:
        raise ValueError("beta is given, but kind is 'mamba2', which has none; leave it out")
    if kind != "mamba2" and beta is None:
        raise ValueError(f"beta is None, but kind is {kind!r}, which needs it")
    check_rows(plan, "q", q, "h, d_k")
    check_rows(plan, "k", k, "h, d_k", q)
    check_rows(plan, "v", v, "h_v, d_v", q)
    check_rows(plan, "g", g, "h_v, d_k" if kind == "kda" else "h_v", q, wide=True)
    heads, d_k, heads_v, d_v = *q.shape[-2:], *v.shape[-2:]
    for name, size in (("h", heads), ("d_k", d_k), ("h_v", heads_v), ("d_v", d_v)):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    if k.shape != q.shape:
        raise ValueError(f"k has shape {list(k.shape)} and q {list(q.shape)}; they must be equal")
    if heads_v % heads:
        raise ValueError(f"h_v is {heads_v} and h is {heads}; h_v must be a multiple of h")
    check_last("g", g, (heads_v, d_k) if kind == "kda" else (heads_v,))
    if beta is not None:
        check_rows(plan, "beta", beta, "h_v", q, wide=True)
        check_last("beta", beta, (heads_v,))
    if initial_state is not None:
        check_tensor("initial_state", initial_state, q)
        wanted = [len(plan.problem.sequences), heads_v, d_k, d_v]
        if list(initial_state.shape) != wanted:
            raise ValueError(
                f"initial_state has shape {list(initial_state.shape)}; it must be [b, h_v, d_k, d_v] = {wanted}"
            )
        check_dtype("initial_state", initial_state, q, wide=True, wider=True)
    return LinearCall(
        kind,
        heads,
        heads_v,
        d_k,
        d_v,
        name_of(q.dtype),
        _read_scale(scale, d_k),
        initial_state is not None,
        output_final_state,
        _requires_grad(*tensors.values(), initial_state),
    )


def read_convolution(
    cp: ContextParallel, plan: Any, package_plan: type, x: Any, weight: Any, bias: Any, activation: Any
) -> ConvolutionCall:
    """The arguments of `causal_conv1d`, checked against the plan; x after autocast. package_plan: the package's Plan.

    Raises:
        ValueError, TypeError: naming the argument, its value and the rule.
    """
    check_plan(cp, plan, package_plan)
    if activation is not None:
        check_choice("activation", activation, ACTIVATIONS)
    check_rows(plan, "x", x, "channels")
    channels = x.shape[-1]
    for name, tensor, shape in (("weight", weight, "channels, kernel_size"), ("bias", bias, "channels")):
        if name == "bias" and tensor is None:
            continue
        check_tensor(name, tensor, x)
        check_dtype(name, tensor, x, wide=True)
        if len(tensor.shape) != len(shape.split(", ")) or tensor.shape[0] != channels:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, and x has {channels} channels; it must be [{shape}]"
            )
    for name, size in (("channels", channels), ("kernel_size", weight.shape[1])):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    return ConvolutionCall(
        channels,
        weight.shape[1],
        name_of(x.dtype),
        bias is not None,
        None if activation is None else "silu",
        _requires_grad(x, weight, bias),
    )


def _read_scale(scale: Any, d_k: int) -> float:
    if scale is None:
        return d_k**-0.5
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale is {scale!r}; it must be a number")
    try:
        number = float(scale)
    except OverflowError:
        number = float("inf")
    if not isfinite(number):
        raise ValueError(f"scale is {scale!r}; it must be finite")
    return number


def _requires_grad(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors if isinstance(x, torch.Tensor))
