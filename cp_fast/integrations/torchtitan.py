"""torchtitan: its varlen attention over packed documents that are spread over ranks.

    from cp_fast.integrations import torchtitan as cp_titan

    cp_titan.apply_cp_to_forward([block.attention.inner_attention for block in model.layers.values()], context)
    inputs, labels, extra_kwargs = cp_titan.prepare_context_parallel_input(inputs, labels, extra_kwargs, context)

Both stand in the place of torchtitan's functions of these names, with a `ContextParallel` for `cp_mesh`. torchtitan
itself is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from cp_fast.context import ContextParallel
from cp_fast.integrations.planned import attend, check_longest, refuse
from cp_ref.common.slices import shard
from cp_ref.spec import check_context

__all__ = ["apply_cp_to_forward", "attention_forward", "prepare_context_parallel_input"]


def apply_cp_to_forward(attention_modules: Iterable[torch.nn.Module], cp: ContextParallel) -> None:
    """Give every VarlenAttention module this package's forward. Its window stays.

    Raises:
        TypeError: a module of another kind; `cp` is no ContextParallel.
    """
    check_context(cp, ContextParallel)
    modules = list(attention_modules)
    for module in modules:
        if type(module).__name__ != "VarlenAttention":
            raise TypeError(f"attention_modules has a {type(module).__name__}; each must be a VarlenAttention")
    for module in modules:
        module.forward = partial(attention_forward, cp=cp, window_size=module.window_size)  # type: ignore[method-assign]


def prepare_context_parallel_input(
    inputs: torch.Tensor, labels: torch.Tensor, extra_kwargs: dict[str, Any], cp: ContextParallel
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """This rank's part of a batch that every rank has whole.

    Args:
        inputs, labels: [b, s]; seen as one packed row [1, b * s].
        extra_kwargs: "positions" [b, s] and "attention_masks", the VarlenMetadata of the whole batch. Its lengths are
            best on the CPU; on a GPU they are waited for, once for all layers.
        cp: with layout "contiguous" b * s divides by cp_size, and documents may have any lengths; with "dual_chunk"
            every document's length divides by 2 * cp_size.

    Returns:
        inputs, labels and positions as [1, b * s / cp]; attention_masks stay those of the whole batch.

    Raises:
        ValueError: a length does not divide; it is named.
    """
    check_context(cp, ContextParallel)
    lengths = extra_kwargs["attention_masks"].cu_seq_q
    how: dict[str, Any] = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": lengths}
    parts = [shard(x.flatten(), **how)[None] for x in (inputs, labels, extra_kwargs["positions"])]
    return parts[0], parts[1], {**extra_kwargs, "positions": parts[2]}


def attention_forward(
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    *,
    attention_masks: Any,
    scale: float | None = None,
    out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    enable_gqa: bool = False,
    cp: ContextParallel,
    window_size: tuple[int, int],
    **kwargs: Any,
) -> torch.Tensor:
    """One layer's attention, [1, t/cp, n, h] -> [1, t/cp, n, h_v]. Collective.

    Args:
        attention_masks: VarlenMetadata of the whole batch: documents by their global cumulative lengths.
        out_transform: gets out and lse [1, t/cp, n], and gives what is returned.
        window_size: (left, right), counted from the query. On a GPU float32 inputs are cast to bfloat16, as there.

    Raises:
        ValueError: more than one row, or numbers of heads that differ without enable_gqa. NotImplementedError: other
        keywords; the others: as `cp_fast.attention`.
    """
    refuse("VarlenAttention", **kwargs)
    if q_BLNH.shape[0] != 1:
        raise ValueError(
            f"q has {q_BLNH.shape[0]} rows; prepare_context_parallel_input makes one packed row of a batch"
        )
    if not enable_gqa and q_BLNH.shape[2] != k_BLNH.shape[2]:
        raise ValueError(f"q has {q_BLNH.shape[2]} heads and k {k_BLNH.shape[2]}; that needs enable_gqa=True")
    cu_q, cu_k = attention_masks.cu_seq_q, attention_masks.cu_seq_k
    check_longest("max_q", attention_masks.max_q, cu_q)
    check_longest("max_k", attention_masks.max_k, cu_k)
    if cu_q is not cu_k and not torch.equal(cu_q, cu_k):
        raise ValueError("attention_masks has other lengths for keys than for queries; documents attend to themselves")
    narrow = q_BLNH.is_cuda and q_BLNH.dtype == torch.float32
    q, k, v = (x[0].to(torch.bfloat16) if narrow else x[0] for x in (q_BLNH, k_BLNH, v_BLNH))
    results = attend(
        q,
        k,
        v,
        cp=cp,
        qkv_format="thd",
        attn_mask_type="causal" if window_size[1] == 0 else "no_mask",
        window_size=window_size,
        cu_seqlens_q=cu_q,
        softmax_scale=scale,
        return_lse=out_transform is not None,
    )
    if out_transform is None:
        return results[None].to(q_BLNH.dtype)
    out, lse = results
    return out_transform(out[None].to(q_BLNH.dtype), lse.transpose(0, 1)[None])
