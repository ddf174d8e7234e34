"""Hugging Face transformers: models whose attention runs over sequences that are spread over ranks.

    from cp_fast.integrations import transformers as cp_transformers

    cp_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="cp_fast")
    out = model(**cp_transformers.shard_batch(batch, cp=context), use_cache=False)  # out.loss: see `shard_batch`

What a batch's sequences are goes to every layer as the keyword `cp_batch`, which models hand on; one that does not is
told so. Needs transformers 5; only `register` imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from cp_fast.context import ContextParallel
from cp_fast.integrations.planned import attend, refuse
from cp_fast.sharding import position_ids as positions_of
from cp_fast.sharding import shard
from cp_fast.thd import pad_thd_sequences_for_cp
from cp_ref.spec import check_context

__all__ = ["NAME", "CpBatch", "attention_forward", "refuse_masks", "register", "shard_batch"]

NAME = "cp_fast"
_SILENT = {  # keywords on their way through a model that change nothing about attention
    *("position_ids", "cache_position", "use_cache", "num_items_in_batch", "shift_labels", "labels", "logits_to_keep"),
    *("output_hidden_states", "output_router_logits", "return_dict", "position_embeddings", "past_key_values"),
}
_UNSAID = object()


@dataclass(frozen=True, eq=False)
class CpBatch:
    """The sequences of a batch, for `attention_forward`: `shard_batch` makes it."""

    cp: ContextParallel
    qkv_format: str
    cu_seqlens: torch.Tensor | None = None  # global; None: all sequences are full
    cu_seqlens_padded: torch.Tensor | None = None  # packed batches


def register() -> None:
    """Make `attn_implementation="cp_fast"` known to transformers. Once a process; again does nothing more."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, refuse_masks)


def shard_batch(batch: Mapping[str, torch.Tensor], *, cp: ContextParallel, pad_token_id: int = 0) -> dict[str, Any]:
    """This rank's part of a batch that every rank has whole, as arguments of a model.

    Args:
        batch: input_ids [b, s], and any of
            position_ids [1, t]: the batch is packed; each document starts at position 0.
            attention_mask [b, s]: 1 for tokens, 0 for padding behind them.
            labels [b, s]: not shifted yet, -100 where nothing is to be learnt.
        cp: the group, the schedule and the layout.
        pad_token_id: what lengths are filled up with until they divide.

    Returns:
        input_ids, position_ids (inside each document) and cp_batch; with labels also shift_labels, labels (the same:
        models ask for them) and num_items_in_batch, the counted tokens of all ranks. A rank's loss is then its part of
        the mean: the parts add up to it, and so do the gradients. Where a wrapper averages gradients over n ranks,
        multiply the loss by n.

    Raises:
        ValueError: an argument that is not there, a mask with padding before or between tokens, or a packed batch with
        a mask.
    """
    check_context(cp, ContextParallel)
    unknown = set(batch) - {"input_ids", "position_ids", "attention_mask", "labels"}
    if unknown or "input_ids" not in batch:
        raise ValueError(
            f"batch has {', '.join(sorted(batch))}; it must have input_ids, and may have position_ids, attention_mask "
            "and labels"
        )
    ids, labels = batch["input_ids"], batch.get("labels")
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    labels = torch.full_like(ids, -100) if labels is None else labels
    if positions is not None:
        if mask is not None or ids.shape[0] != 1:
            raise ValueError(
                f"position_ids is given with input_ids {list(ids.shape)}{' and attention_mask' * (mask is not None)}; "
                "it says where the documents of one packed row [1, t] start, and needs no mask"
            )
        parts, sequences = _packed(ids[0], labels[0], positions[0], cp, pad_token_id)
    else:
        parts, sequences = _padded(ids, labels, mask, cp, pad_token_id)
    local = dict(zip(("input_ids", "shift_labels", "position_ids"), parts, strict=True))
    shifted, count = local.pop("shift_labels")
    given = {"labels": shifted, "shift_labels": shifted, "num_items_in_batch": count} if "labels" in batch else {}
    return {**local, **given, "cp_batch": sequences}


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
    lengths = {"cu_seqlens_q": cp_batch.cu_seqlens, "cu_seqlens_q_padded": cp_batch.cu_seqlens_padded}
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
        **{name: x for name, x in lengths.items() if x is not None},
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


Parts = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]


def _packed(
    ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor, cp: ContextParallel, pad_token_id: int
) -> tuple[Parts, CpBatch]:
    starts = (positions == 0).nonzero()[:, 0].cpu()
    if len(starts) == 0 or starts[0] != 0:
        raise ValueError("position_ids does not begin with 0; each document of a packed batch starts at position 0")
    cu_seqlens = torch.cat((starts, torch.tensor([len(ids)]))).to(torch.int32)
    shifted = labels.roll(-1)
    shifted[(cu_seqlens[1:] - 1).long().to(labels.device)] = -100
    padded = pad_thd_sequences_for_cp(ids, shifted, cu_seqlens, _divisor(cp), pad_token_id, -100)
    ids, shifted, cu_padded = padded
    how: dict[str, Any] = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": cu_padded}
    local = positions_of(**how, device=ids.device)[None]
    targets = shard(shifted, **how)[None], (shifted != -100).sum()
    return (shard(ids, **how)[None], targets, local), CpBatch(cp, "thd", cu_seqlens, cu_padded.cpu())


def _padded(
    ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None, cp: ContextParallel, pad_token_id: int
) -> tuple[Parts, CpBatch]:
    lengths = torch.full((len(ids),), ids.shape[1]) if mask is None else mask.cpu().sum(dim=1)
    if mask is not None and not torch.equal(mask.cpu().bool(), torch.arange(ids.shape[1]) < lengths[:, None]):
        raise ValueError("attention_mask has padding before or between tokens; pad behind them (padding_side='right')")
    labels = labels.masked_fill(mask == 0, -100) if mask is not None else labels
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    missing = -ids.shape[1] % _divisor(cp)
    ids, shifted = F.pad(ids, (0, missing), value=pad_token_id), F.pad(shifted, (0, missing), value=-100)
    full = missing == 0 and bool((lengths == ids.shape[1]).all())
    cu_seqlens = None if full else F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    local = positions_of(cp=cp, seqlen=ids.shape[1], device=ids.device).expand(len(ids), -1)
    targets = shard(shifted, cp=cp), (shifted != -100).sum()
    return (shard(ids, cp=cp), targets, local), CpBatch(cp, "bshd", cu_seqlens)


def _divisor(cp: ContextParallel) -> int:
    return cp.size * (2 if cp.layout == "dual_chunk" else 1)


def _mask(causal: bool, batch: CpBatch) -> str:
    if batch.cu_seqlens is None:
        return "causal" if causal else "no_mask"
    return "padding_causal" if causal else "padding"
