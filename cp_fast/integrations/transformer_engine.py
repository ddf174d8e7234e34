"""TransformerEngine: its attention modules, with cp_fast where they would run their own context parallelism.

    from cp_fast.integrations import transformer_engine as cp_te

    cp_te.patch()  # DotProductAttention and what is built on it call cp_fast from now on; cp_te.unpatch() takes it back

The function is `attn_forward_func_with_cp` with its 33 arguments. Which problems reach it is TransformerEngine's
choice: its own checks come first. Only `patch` and `unpatch` import TransformerEngine.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.shared.drop_in import (
    Asked,
    check_tensors,
    check_two_chunks,
    context_for,
    drop_in,
    lengths_on_host,
    refuse,
)
from cp_ref.batches.sharding import unshard
from cp_ref.schedules.values import check_choice, check_flag, kind_of
from cp_ref.schedules.words import MASKS, QKV_FORMATS, SOFTMAX_TYPES, Unsupported

__all__ = ["attn_forward_func_with_cp", "patch", "unpatch"]

_FOLDER = "transformer_engine.pytorch.attention.dot_product_attention."
_USERS = (_FOLDER + "context_parallel", _FOLDER + "backends")  # where the function is defined, and where it is called
_NAME = "attn_forward_func_with_cp"
_originals: dict[str, Any] = {}


def patch(**context: Any) -> None:
    """Put `attn_forward_func_with_cp` in the place of TransformerEngine's.

    Args:
        context: keywords of `ContextParallel`, such as backend="fa4" or softmax_offset_grad="total", which is what
            TransformerEngine gives.

    Raises:
        ImportError, AttributeError: TransformerEngine is not installed, or has no such function (it has since 2.0).
    """
    modules = [importlib.import_module(name) for name in _USERS]
    for module in modules:
        _originals.setdefault(module.__name__, getattr(module, _NAME))
    for module in modules:
        setattr(module, _NAME, partial(attn_forward_func_with_cp, context=context))


def unpatch() -> None:
    """Put TransformerEngine's function back."""
    while _originals:
        name, original = _originals.popitem()
        setattr(importlib.import_module(name), _NAME, original)


def _context(given: dict[str, Any]) -> ContextParallel:
    """A context of the ranks that a call names, whatever else of it is wrong."""
    group = given.get("cp_group")
    return context_for(group, "a2a+p2p" if isinstance(group, list | tuple) else "p2p")


@drop_in(_context)
def attn_forward_func_with_cp(
    is_training: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_kv: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
    dropout_p: float,
    cp_group: Any,
    cp_global_ranks: Sequence[int] | None,
    cp_stream: Any,
    cp_comm_type: str,
    softmax_scale: float | None = None,
    qkv_format: str = "bshd",
    attn_mask_type: str = "causal",
    attn_bias_type: str = "no_bias",
    attn_bias: torch.Tensor | None = None,
    deterministic: bool = False,
    use_fused_attention: bool = False,
    window_size: tuple[int, int] | None = None,
    fp8: bool = False,
    fp8_meta: Any = None,
    quantizers: Any = None,
    pad_between_seqs: bool = False,
    use_flash_attn_3: bool = False,
    softmax_type: str = "vanilla",
    softmax_offset: torch.Tensor | None = None,
    fp8_output: bool = False,
    layer_number: int = 1,
    return_max_logit: bool = False,
    *,
    context: dict[str, Any] | None = None,
) -> Asked:
    """Compute TransformerEngine's function of this name. Collective.

    Args:
        q, k, v: this rank's slices, rank r holding chunks r and 2 * cp - 1 - r.
        cu_seqlens_q ... cu_seqlens_kv_padded: global; used in thd, and in bshd and sbhd with a padding mask. On a GPU
            they are waited for, by every call. In thd the length of every sequence's slot divides by 2 * cp: that of
            cu_seqlens_q_padded, or of cu_seqlens_q without it.
        cp_group: a ProcessGroup, or [a2a_group, p2p_group] for "a2a+p2p".
        softmax_offset: [1, h, 1, 1] or [h].
        attn_bias: with attn_bias_type "post_scale_bias", in bshd and sbhd: [b, h, s_q/cp, s_kv], of this rank's queries
            and all keys, added to the scaled scores; each of the first three sizes may be 1. It is gathered from all
            ranks in every call, and no gradient flows to it.
        max_seqlen_q, max_seqlen_kv, cp_global_ranks, cp_stream, use_fused_attention, use_flash_attn_3, quantizers,
        fp8_meta, pad_between_seqs, layer_number, is_training: not needed. They choose among TransformerEngine's
            kernels, or follow from the others.
        context: keywords of `ContextParallel`.

    Returns:
        out in q's format, [..., h, d_v]; or (out, max_logit) with return_max_logit.

    Raises:
        NotImplementedError: dropout_p (in training), another attn_bias_type, fp8 or fp8_output asks for something;
        attn_bias in thd. Unsupported: attn_bias requires a gradient.
        ValueError: a slot in thd does not divide by 2 * cp. The others: as `cp_fast.attention`.
    """
    if not isinstance(context, dict | None):
        raise TypeError(f"context is {kind_of(context)}; it must be a dictionary of keywords of ContextParallel")
    cp = context_for(cp_group, cp_comm_type, **(context or {}))
    check_flag("is_training", is_training)
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    check_choice("attn_mask_type", attn_mask_type, MASKS)
    check_choice("softmax_type", softmax_type, SOFTMAX_TYPES)
    unbiased = isinstance(attn_bias_type, str) and attn_bias_type == "no_bias"
    biased = isinstance(attn_bias_type, str) and attn_bias_type == "post_scale_bias"
    refuse(
        _NAME,
        dropout_p=dropout_p if is_training else 0.0,
        attn_bias_type="" if unbiased or biased else attn_bias_type,
        attn_bias=None if biased else attn_bias,
        fp8=fp8,
        fp8_output=fp8_output,
    )
    packed = qkv_format == "thd"
    lengths: dict[str, Any] = {}
    if packed or attn_mask_type.startswith("padding"):
        lengths |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    if packed:
        lengths |= {"cu_seqlens_q_padded": cu_seqlens_q_padded, "cu_seqlens_kv_padded": cu_seqlens_kv_padded}
        lengths = lengths_on_host(**{name: x for name, x in lengths.items() if x is not None})
        for side in ("cu_seqlens_q", "cu_seqlens_kv"):
            slots = f"{side}_padded" if f"{side}_padded" in lengths else side
            check_two_chunks(cp, **{name: x for name, x in lengths.items() if name == slots})
    how = {
        "qkv_format": qkv_format,
        "attn_mask_type": attn_mask_type,
        "window_size": (-1, -1) if window_size is None else window_size,
        "softmax_scale": softmax_scale,
        "softmax_type": softmax_type,
        "softmax_offset": softmax_offset if softmax_type == "learnable" else None,
        "deterministic": deterministic,
        "return_max_logit": return_max_logit,
    }
    asked = Asked(q, k, v, cp, how | lengths)
    if not biased:
        return asked
    added = _bias_by_place(attn_bias, q, k, qkv_format, cp)
    return asked._replace(gathered=lambda: {"score_mod": added, "aux_tensors": {"bias": _whole(attn_bias, cp)}})


def _bias_by_place(bias: Any, q: torch.Tensor, k: torch.Tensor, qkv_format: str, cp: ContextParallel) -> Any:
    """The score_mod that adds a bias to scores; the bias is checked."""
    if qkv_format == "thd":
        raise NotImplementedError(
            "attn_bias_type is 'post_scale_bias' with qkv_format 'thd', where rows of the bias have no meaning; give "
            "cp_fast.attention a score_mod"
        )
    check_tensors("b h s_q/cp s_kv", attn_bias=bias)
    axes = {"bshd": (0, 1), "sbhd": (1, 0)}[qkv_format]
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q has {q.ndim} axes and k {k.ndim}; both must have 4 in {qkv_format}")
    wanted = (q.shape[axes[0]], q.shape[2], q.shape[axes[1]], k.shape[axes[1]] * cp.size)
    if bias.shape[3] != wanted[3] or any(n not in (1, most) for n, most in zip(bias.shape, wanted, strict=True)):
        raise ValueError(
            f"attn_bias has shape {list(bias.shape)}; it must be [b, h, s_q/cp, s_kv] = {list(wanted)}, of this rank's "
            "queries and all keys; each of the first three may be 1"
        )
    if bias.device != q.device or not bias.dtype.is_floating_point:
        raise ValueError(f"attn_bias is {bias.dtype} on {bias.device}; it must be floating point on q's {q.device}")
    if bias.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            "attn_bias that requires a gradient",
            {},
            "scores get the bias by a score_mod, and no gradient flows to its tensors; give attn_bias.detach(), or "
            "keep a bias that is learned on TransformerEngine's own p2p (unpatch)",
        )
    by_b, by_h, by_q = (n > 1 for n in bias.shape[:3])

    def post_scale_bias(
        score: torch.Tensor,
        b: torch.Tensor,
        h: torch.Tensor,
        q_idx: torch.Tensor,
        kv_idx: torch.Tensor,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        return score + bias[b if by_b else b * 0, h if by_h else h * 0, q_idx if by_q else q_idx * 0, kv_idx]

    return post_scale_bias


def _whole(bias: Any, cp: ContextParallel) -> torch.Tensor:
    """The bias of all ranks' queries: [b, h, s_q, s_kv]."""
    bias = bias.detach()
    if bias.shape[2] == 1:
        return bias
    return unshard(bias.permute(2, 0, 1, 3).contiguous(), cp=cp, qkv_format="sbhd").permute(1, 2, 0, 3).contiguous()
