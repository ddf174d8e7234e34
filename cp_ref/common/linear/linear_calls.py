"""`linear_attention` and `causal_conv1d`, declared."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from cp_ref.common.context import ContextParallel
from cp_ref.common.plan_arguments import Plan

__all__ = ["ACTIVATIONS", "KINDS", "Activation", "LinearKind", "causal_conv1d", "linear_attention"]

LinearKind = Literal["gated_delta_rule", "kda", "mamba2"]
KINDS: tuple[LinearKind, ...] = ("gated_delta_rule", "kda", "mamba2")
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
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> Any:
    """Linear attention over documents whose tokens are spread over the ranks of `cp`. Collective, forward and backward.

    Each document and head has a state S [d_k, d_v]. It begins as `initial_state`, or as zero. The tokens of the
    document act on it one after the other, and each reads it:

        gated_delta_rule   S = exp(g) S;         S = S + beta k (v - S^T k)^T;   out = scale S^T q
        kda                S = diag(exp(g)) S;   S = S + beta k (v - S^T k)^T;   out = scale S^T q
        mamba2             S = exp(g) S;         S = S + k v^T;                  out = scale S^T q

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
        g: the logarithm of the decay, at most 0 in any stable layer: [..., h_v]; for "kda" [..., h_v, d_k]. In q's
            dtype or float32.
        beta: the writing strength [..., h_v], needed by the delta rules, in q's dtype or float32; None for "mamba2".
        cp: the group and the layout.
        plan: from `make_plan(..., linear=True)`, for this batch.
        kind: the recurrence. "gated_delta_rule" is that of Qwen3-Next, "kda" that of Kimi Linear, "mamba2" the
            recurrence of Mamba-2's scalar decay; there k is B, q is C, v is dt x, g is dt A, and scale is 1.
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

    Sources: Gated Delta Networks (Yang et al., 2024), Kimi Linear (2025), Transformers are SSMs (Dao and Gu, 2024); the
    meaning of g, beta, scale and the state's layout is that of flash-linear-attention.
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
    """A causal convolution of each channel along documents that are spread over the ranks of `cp`. Collective, forward
    and backward.

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
