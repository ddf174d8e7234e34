"""ring-flash-attention's functions by their names and arguments, with `cp` in the place of `group`.

    from cp_fast.integrations.ring_flash_attn import zigzag_ring_flash_attn_func

Which rank holds what is as there: "zigzag" is the layout dual_chunk, "llama3" is contiguous. Whatever the name says of
a ring or a gathering, the schedule is the context's.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_fast.context import ContextParallel
from cp_fast.integrations.flash_attn import attend_aligned
from cp_fast.integrations.planned import check_longest, once, refuse
from cp_ref.spec import check_context

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_varlen_func",
]


def zigzag_ring_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    cp: ContextParallel,
) -> Any:
    """Attention of [b, s/cp, h, d], rank r holding chunks r and 2 * cp - 1 - r. Collective.

    Returns:
        out, or with return_attn_probs (out, lse, None), lse [b, h, s/cp].

    Raises:
        NotImplementedError: dropout_p or alibi_slopes is given. ValueError: the context's layout is another; the
        others: as `cp_fast.attention`.
    """
    refuse("zigzag_ring_flash_attn_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    _check_layout(cp, "dual_chunk")
    how = {"cp": cp, "softmax_scale": softmax_scale, "deterministic": deterministic}
    return attend_aligned(q, k, v, causal, window_size, q.shape[1] == k.shape[1], return_attn_probs, **how)


def zigzag_ring_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    cp: ContextParallel,
) -> Any:
    """Attention of packed [t/cp, h, d], rank r holding chunks r and 2 * cp - 1 - r of every sequence. Collective.

    Args:
        cu_seqlens: cumulative lengths of this rank's slices, int32 [b + 1]: the global ones // cp, as there.
        max_seqlen: the longest of them, or longer; not needed.

    Returns, Raises: as `zigzag_ring_flash_attn_func`; lse is [h, t/cp].
    """
    refuse("zigzag_ring_flash_attn_varlen_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    _check_layout(cp, "dual_chunk")
    check_longest("max_seqlen", max_seqlen, cu_seqlens)
    how = {"cp": cp, "softmax_scale": softmax_scale, "deterministic": deterministic}
    lengths = {"qkv_format": "thd", "cu_seqlens_q": once(torch.mul, cu_seqlens, cp.size)}
    return attend_aligned(q, k, v, causal, window_size, True, return_attn_probs, **lengths, **how)


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """What `llama3_flash_attn_varlen_func` is to be given. There, lengths of what a rank sees; here the global ones, of
    which each rank finds its part by itself.

    Returns:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice.
    """
    longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    return cu_seqlens, cu_seqlens, longest, longest, slice(0, int(cu_seqlens[-1]))


def llama3_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    cp: ContextParallel,
) -> Any:
    """Attention of packed [t/cp, h, d], rank r holding the r-th of cp equal parts of the whole. Collective.

    Args:
        cu_seqlens_q ... local_k_slice: from this module's `llama3_flash_attn_prepare_cu_seqlens`.
        heads_k_stride: how many kv heads were to travel at once, a divisor of h_kv. Here all do.

    Returns, Raises: as `zigzag_ring_flash_attn_func`; lse is [h, t/cp]. ValueError: lengths from elsewhere.
    """
    refuse("llama3_flash_attn_varlen_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    _check_layout(cp, "contiguous")
    if heads_k_stride < 1 or k.shape[-2] % heads_k_stride:
        raise ValueError(f"heads_k_stride is {heads_k_stride}; it must divide the {k.shape[-2]} heads of k")
    if cu_seqlens_k is not cu_seqlens_q or local_k_slice.start != 0:
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_k and local_k_slice are not from this module's "
            "llama3_flash_attn_prepare_cu_seqlens, which keeps the global lengths"
        )
    check_longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q)
    check_longest("max_seqlen_k", max_seqlen_k, cu_seqlens_k)
    how = {"cp": cp, "softmax_scale": softmax_scale, "deterministic": deterministic}
    lengths = {"qkv_format": "thd", "cu_seqlens_q": cu_seqlens_q}
    return attend_aligned(q, k, v, causal, window_size, True, return_attn_probs, **lengths, **how)


def _check_layout(cp: ContextParallel, layout: str) -> None:
    check_context(cp, ContextParallel)
    if cp.layout != layout:
        raise ValueError(f"cp has layout {cp.layout!r}; this function's slices are those of {layout!r}")
