"""Linear attention and causal convolutions by their definition: global tensors, token by token, in float64.

Documents are computed one after the other. The code knows no rank, no fragment and no schedule; gradients come from
autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from cp_ref.api.packed_formats import to_format, to_packed
from cp_ref.common.linear.linear_calls import ACTIVATIONS, KINDS
from cp_ref.spec import QKV_FORMATS, check_choice, read_lengths

__all__ = ["dense_causal_conv1d", "dense_linear_attention"]


def dense_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    kind: str = "gated_delta_rule",
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    qkv_format: str = "bshd",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear attention of whole (global) tensors, in float64.

    Args:
        q ... initial_state: as in `cp_ref.linear_attention`, for all tokens of the batch.
        qkv_format: "bshd", "sbhd" or "thd".
        cu_seqlens, cu_seqlens_padded: as `cu_seqlens_q` and `cu_seqlens_q_padded` in `cp_ref.attention`.

    Returns:
        (out, final_state): float64, out in v's format, zero in padding and tail; final_state [b, h_v, d_k, d_v].

    Raises:
        ValueError, TypeError: a word that does not exist, or lengths that are wrong.

    >>> one = torch.ones(1, 2, 1, 1)                                     # b 1, s 2, h 1, d 1
    >>> out, state = dense_linear_attention(one, one, one, torch.zeros(1, 2, 1), kind="mamba2")
    >>> out.flatten().tolist(), state.item()                             # no decay: S = 1, then 2
    ([1.0, 2.0], 2.0)
    """
    check_choice("kind", kind, KINDS)
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    documents = list(_documents(v, qkv_format, cu_seqlens, cu_seqlens_padded))
    q, k, v, g = (to_packed(x, qkv_format).double() for x in (q, k, v, g))
    shared = v.shape[1] // q.shape[1]  # heads of v that share a head of q and k
    q, k = (x.repeat_interleave(shared, dim=1) for x in (q, k))
    decay = (g if kind == "kda" else g[..., None]).exp()[..., None]  # [t, h_v, d_k or 1, 1]
    strength = None if beta is None else to_packed(beta, qkv_format).double()[..., None]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    rows = [v.new_zeros(v.shape[1:])] * len(v)
    final: list[torch.Tensor] = []
    for number, (start, stop) in enumerate(documents):
        state = v.new_zeros(v.shape[1], q.shape[-1], v.shape[-1])
        if initial_state is not None:
            state = initial_state[number].double()
        for i in range(start, stop):
            state = decay[i] * state
            write = v[i]
            if strength is not None:
                write = strength[i] * (v[i] - torch.einsum("hkv,hk->hv", state, k[i]))
            state = state + torch.einsum("hk,hv->hkv", k[i], write)
            rows[i] = factor * torch.einsum("hkv,hk->hv", state, q[i])
        final.append(state)
    out = torch.stack(rows) if rows else v
    return to_format(out, qkv_format, len(documents)), torch.stack(final)


def dense_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    qkv_format: str = "bshd",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
) -> torch.Tensor:
    """A causal convolution of whole (global) tensors, in float64.

    Args:
        x ... activation: as in `cp_ref.causal_conv1d`, for all tokens of the batch.
        qkv_format, cu_seqlens, cu_seqlens_padded: as in `dense_linear_attention`.

    Returns:
        x's shape, float64, zero in padding and tail.

    Raises:
        ValueError, TypeError: a word that does not exist, or lengths that are wrong.

    >>> x = torch.tensor([[[1.0], [2.0], [4.0]]])                        # b 1, s 3, one channel
    >>> dense_causal_conv1d(x, torch.tensor([[10.0, 1.0]])).flatten().tolist()
    [1.0, 12.0, 24.0]
    """
    if activation is not None:
        check_choice("activation", activation, ACTIVATIONS)
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    documents = list(_documents(x, qkv_format, cu_seqlens, cu_seqlens_padded))
    x, weight = to_packed(x, qkv_format).double(), weight.double()
    rows = [x.new_zeros(x.shape[1:])] * len(x)
    for start, stop in documents:
        for i in range(start, stop):
            seen = x[max(start, i - weight.shape[1] + 1) : i + 1]
            row = (weight[:, -len(seen) :].T * seen).sum(dim=0)
            row = row if bias is None else row + bias.double()
            rows[i] = row if activation is None else row * torch.sigmoid(row)
    return to_format(torch.stack(rows) if rows else x, qkv_format, len(documents))


def _documents(
    x: torch.Tensor, qkv_format: str, cu_seqlens: torch.Tensor | None, cu_seqlens_padded: torch.Tensor | None
) -> Iterator[tuple[int, int]]:
    """The real tokens of each document: rows of the packed buffer."""
    real = read_lengths("cu_seqlens", cu_seqlens)
    if qkv_format == "thd":
        slots = read_lengths("cu_seqlens_padded", cu_seqlens_padded) or real
        if real is None or slots is None:
            raise ValueError("cu_seqlens is None; qkv_format 'thd' needs it")
        starts = slots[:-1]
    else:
        batch, longest = (x.shape[0], x.shape[1]) if qkv_format == "bshd" else (x.shape[1], x.shape[0])
        starts = [n * longest for n in range(batch)]
        real = [n * longest for n in range(batch + 1)] if real is None else real
    for start, (first, last) in zip(starts, pairwise(real), strict=True):
        yield start, start + last - first
