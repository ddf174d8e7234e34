"""Hugging Face transformers: models whose attention runs over sequences that are spread over ranks.

    from cp_fast.integrations import transformers as cp_transformers

    cp_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="cp_fast")
    out = model(**cp_transformers.shard_batch(batch, cp=context), use_cache=False)  # out.loss: see `shard_batch`

What a batch's sequences are goes to every layer as the keyword `cp_batch`, which models hand on; one that does not is
told so. Needs transformers 5; only `register` imports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from cp_fast.integrations.planned import attend, refuse
from cp_fast.integrations.token_batches import CpBatch, shard_batch

__all__ = ["NAME", "CpBatch", "attention_forward", "refuse_masks", "register", "shard_batch"]

NAME = "cp_fast"
_SILENT = {  # keywords on their way through a model that change nothing about attention
    *("position_ids", "cache_position", "use_cache", "num_items_in_batch", "shift_labels", "labels", "logits_to_keep"),
    *("output_hidden_states", "output_router_logits", "return_dict", "position_embeddings", "past_key_values"),
}
_UNSAID = object()


def register() -> None:
    """Make `attn_implementation="cp_fast"` known to transformers. Once a process; again does nothing more."""
    theirs = importlib.import_module("transformers")
    theirs.AttentionInterface.register(NAME, attention_forward)
    theirs.AttentionMaskInterface.register(NAME, refuse_masks)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: Any = _UNSAID,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    cp_batch: CpBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, as transformers calls it: [b, h, s/cp, d] -> ([b, s/cp, h, d], None).

    `sliding_window` counts the query itself, so it is one more than the left side of a window here; `s_aux` are sinks.
    """
    if not isinstance(cp_batch, CpBatch):
        raise TypeError(
            f"{type(module).__name__} was given cp_batch={cp_batch!r}: call the model with what shard_batch returns; "
            "a model that does not hand its keywords on to its attention cannot be run under context parallelism"
        )
    unheard = {name: value for name, value in kwargs.items() if name not in _SILENT}
    refuse(type(module).__name__, attention_mask=attention_mask, dropout=dropout, **unheard)
    if key.shape[2] != query.shape[2]:
        raise NotImplementedError(f"key has {key.shape[2]} tokens and query {query.shape[2]}: a cache is not supported")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = _window(module, sliding_window, causal)
    packed = cp_batch.qkv_format == "thd"
    q, k, v = (x.transpose(1, 2)[0] if packed else x.transpose(1, 2) for x in (query, key, value))
    out = attend(
        q,
        k,
        v,
        cp=cp_batch.cp,
        qkv_format=cp_batch.qkv_format,
        attn_mask_type=_mask(causal, cp_batch),
        window_size=window,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        softmax_type="vanilla" if s_aux is None else "learnable",
        softmax_offset=s_aux,
        cu_seqlens_q=cp_batch.cu_seqlens,
        cu_seqlens_q_padded=cp_batch.cu_seqlens_padded,
    )
    return out[None] if packed else out, None


def refuse_masks(*_: Any, attention_mask: Any = None, mask_function: Callable[..., Any], **given: Any) -> None:
    """No mask is built; `attention_forward` knows causal masks and windows. Raises for a mask that is none of them."""
    refuse("cp_fast", attention_mask=attention_mask)
    if given.get("use_vmap") or "or_mask" in mask_function.__qualname__:
        raise NotImplementedError(
            f"mask_function is {mask_function.__qualname__}; cp_fast has causal masks and windows"
        )


def _window(module: torch.nn.Module, sliding_window: Any, causal: bool) -> tuple[int, int]:
    """The layer's window. Raises where its configuration asks for attention that its arguments do not say."""
    config: Any = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds is not None and layer is not None else None
    if kind not in (None, "full_attention", "sliding_attention"):
        raise NotImplementedError(f"layer_types[{layer}] is {kind!r}; cp_fast has full_attention and sliding_attention")
    size = None if sliding_window is _UNSAID else sliding_window
    hidden = kind is None and sliding_window is _UNSAID and getattr(config, "sliding_window", None) is not None
    if (kind == "sliding_attention" and size is None) or hidden:
        raise NotImplementedError(
            f"{type(module).__name__} has a sliding window that it does not pass to its attention"
        )
    if size is None:
        return -1, -1
    if not causal:
        raise NotImplementedError(f"sliding_window is {size} in attention that is not causal")
    return size - 1, 0


def _mask(causal: bool, batch: CpBatch) -> str:
    if batch.cu_seqlens is None:
        return "causal" if causal else "no_mask"
    return "padding_causal" if causal else "padding"
