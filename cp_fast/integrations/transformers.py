"""Hugging Face transformers: models with attention over sequences that are sharded over ranks.

    from cp_fast.integrations import transformers as cp_transformers

    model = cp_transformers.prepare(AutoModelForCausalLM.from_pretrained(...), context)
    out = model(**cp_transformers.shard_batch(batch, cp=context))  # out.loss: see `shard_batch`

The sequences of a batch reach every layer as the keyword `cp_batch`, which models pass on. Needs transformers 5; only
`prepare` and `register` import it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from cp_fast.api.attention import attention
from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.hugging_face.alibi_models import SequencesAsMask, has_alibi, sequences_as_mask, with_alibi
from cp_fast.integrations.hugging_face.chosen_keys import (
    INDEXED,
    SequencesToChoose,
    attend_to_chosen,
    choosers,
    give_back,
    put_selectors,
)
from cp_fast.integrations.hugging_face.image_models import is_whole, mark_whole, vision_parts
from cp_fast.integrations.hugging_face.linear_mixers import linear_mixers, put_over_ranks, take_back
from cp_fast.integrations.hugging_face.model_batches import shard_batch
from cp_fast.integrations.hugging_face.model_edge import (
    SILENT,
    Edge,
    ModelCall,
    mark_layers,
    put_around,
    sequences_of,
    take_off,
)
from cp_fast.integrations.hugging_face.pooled_head import pooling_of
from cp_fast.integrations.hugging_face.slice_probe import Probe, at_rest, look_over, takes_cache
from cp_fast.integrations.hugging_face.task_head import head_of, spans_of, transform_of
from cp_fast.integrations.hugging_face.token_mixers import LAYERS, NAME, refuse_adapters, refuse_by_name
from cp_fast.integrations.shared.drop_in import refuse
from cp_fast.integrations.token_batches import CpBatch
from cp_ref.contract.call_checks import check_context

__all__ = ["NAME", "CpBatch", "attention_forward", "prepare", "refuse_masks", "register", "shard_batch"]

Model = TypeVar("Model", bound=torch.nn.Module)

_UNSAID = object()
_POOLED = "{}'s labels are one for each sequence"


def prepare(model: Model, cp: ContextParallel) -> Model:
    """Prepare a transformers model for sequences that are sharded over ranks; returns the same model.

    Its attention becomes `cp_fast`'s, and so do gated delta rule, KDA and Mamba-2 layers and short convolutions, and
    the choice of keys of DeepSeek-V3.2 and GLM-5, in contexts with cp_comm_type "all_gather" or "a2a". All other
    modules must work on one token at a time. `prepare` first looks for known mixers of tokens: layer_types, other
    linear layers and convolutions, pooling, batch norms, routers with auxiliary losses. Then it runs the model on a
    dozen tokens, with attention and linear layers that pass each token on alone. It compares the outputs of a slice
    with those of the whole. The same runs show how the task head uses labels. The vision part of a model of images
    does not change: every rank runs it on all images.

    Args:
        model: with its weights loaded, before DDP, FSDP or torch.compile wrap it. Or PEFT's PeftModel: the model inside
            is prepared, and the PeftModel is called, saved and merged as ever. Adapters may be added before or after.
        cp: the context of its batches. A batch may have another one, of fewer ranks: `shard_batch(batch, cp=small)`.

    Raises:
        NotImplementedError: a module mixes tokens and cannot be sharded; the error has its name in the model. A model
        that reads images in a way that is not known here. Adapters that add tokens or attention of their own (prompt
        learning, adaption prompts), or that look for tokens or mix them; they raise later too.
        ValueError: weights are not loaded yet. TypeError: not a model of transformers.
    """
    check_context(cp, ContextParallel)
    if callable(getattr(model, "get_base_model", None)):
        refuse_adapters(model)
        prepare(cast(Any, model).get_base_model(), cp)
        return model
    switch: Any = getattr(model, "set_attn_implementation", None)
    if switch is None:
        raise TypeError(f"model is a {type(model).__name__}; prepare takes a model of transformers")
    covered, whole = linear_mixers(model), vision_parts(model)
    refuse_by_name(model, covered, whole, (INDEXED,) if choosers(model) else ())
    register()
    with at_rest(model):
        pools = pooling_of(model)
    config: Any = model.config
    before: Any = config._attn_implementation
    mine: Any = NAME
    if whole:  # the vision part keeps its attention
        before = {"": before, "text_config": config.get_text_config()._attn_implementation}
        mine = dict.fromkeys(before, NAME)
        mark_whole(model, whole)
    take_off(model)
    alibi = has_alibi(model)
    if alibi:
        with_alibi(model, attention_forward)
    switch(mine)
    try:
        put_over_ranks(model)
        put_selectors(model)
        with at_rest(model):
            seen = look_over(cast(Any, model).base_model if pools else model, covered, numbered=not alibi)
            head = _POOLED.format(type(model).__name__) if pools else head_of(model, seen)
            found: dict[str, Any] = {"pools": pools}
            if not pools:
                found |= {"spans": spans_of(model, seen), "transform": transform_of(model, seen)}
    except BaseException as error:
        switch(before)
        take_back(model)
        give_back(model)
        if isinstance(error, Exception) and not isinstance(error, NotImplementedError):
            raise NotImplementedError(
                f"{type(model).__name__} does not run with cp_fast's attention: {error}"
            ) from error
        raise
    for module, causal in seen.callers.items():
        module.__dict__["_cp_fast_causal"] = causal
    blocks = mark_layers(model, {*seen.callers, *seen.linear}, seen.heard)
    put_around(model, Edge(cp, head, seen.first_position, takes_cache(model), blocks, **found))
    return model


def register() -> None:
    """Register `attn_implementation="cp_fast"` with transformers, as `prepare` does. Further calls do nothing."""
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
    alibi_slopes: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    cp_batch: CpBatch | ModelCall | Probe | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, as transformers calls it: [b, h, s/cp, d] -> ([b, s/cp, h, d], None).

    `sliding_window` counts the query itself, so it is one more than a side of a window here: the left one, or both
    where attention is not causal. `s_aux` are sinks.
    `alibi_slopes` float32 [h] are of `cp_fast.attention`. `indices` int32 [b, s/cp, top_k] are the keys that an indexer
    chose, of a layer that `prepare` gave one.

    Raises:
        RuntimeError: the model was not prepared. NotImplementedError, TypeError: an argument that cannot be honoured.
    """
    name = type(module).__name__
    if is_whole(module):
        theirs = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
        how: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "softcap": softcap}
        return theirs(module, query, key, value, attention_mask, **how, **kwargs)
    sequences = sequences_of(name, cp_batch)
    if dropout:
        raise NotImplementedError(
            f"dropout is {dropout} in the attention of {name}, which has no seed that all ranks share; set it to 0 in "
            "the model's configuration (attention_dropout, attention_probs_dropout_prob or attn_pdrop)"
        )
    unheard = {keyword: value for keyword, value in kwargs.items() if keyword not in SILENT}
    chosen = attention_mask if isinstance(attention_mask, SequencesToChoose) else None
    if chosen is None:
        refuse(name, attention_mask=attention_mask, indices=indices, **unheard)
    else:
        refuse(name, softcap=softcap, s_aux=s_aux, alibi_slopes=alibi_slopes, **unheard)
    if key.shape[2] != query.shape[2]:
        raise NotImplementedError(
            f"key has {key.shape[2]} tokens and query {query.shape[2]}: a cache is not supported, "
            "nor are adapters that add keys (prefix tuning)"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = _window(module, sliding_window, causal)
    if isinstance(sequences, Probe):
        return sequences.attend(module, causal, query, key, value), None
    prepared = module.__dict__.get("_cp_fast_causal")
    if prepared is None:
        raise RuntimeError(f"{name} was not prepared: call cp_fast.integrations.transformers.prepare(model, cp) first")
    if prepared != causal:
        raise ValueError(f"{name} is called with is_causal={causal}; when it was prepared it was {prepared}")
    if isinstance(cp_batch, ModelCall):
        cast(Any, module)._cp_fast_call = cp_batch
    if chosen is not None:
        if indices is None or not causal or window != (-1, -1):
            raise NotImplementedError(f"{name} gives its attention no indices, or a window besides")
        return attend_to_chosen(chosen, query, key, value, indices, scaling), None
    arguments, rows = _sequences(sequences, causal, window)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) if rows else x.transpose(1, 2) for x in (query, key, value))
    out = attention(
        q,
        k,
        v,
        **arguments,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        softmax_type="vanilla" if s_aux is None else "learnable",
        softmax_offset=s_aux,
        alibi_slopes=alibi_slopes,
    )
    return out.unflatten(0, (len(query), -1)) if rows else out, None


def refuse_masks(
    *_: Any, attention_mask: Any = None, mask_function: Callable[..., Any], **given: Any
) -> SequencesAsMask | None:
    """Build no mask: `attention_forward` knows causal masks and windows, and full attention or windows of two sides
    that a model makes of causal ones. Raises for any other mask.
    """
    refuse("cp_fast", attention_mask=attention_mask)
    joined = given.get("use_vmap") or "or_mask" in mask_function.__qualname__
    if joined and not _has_two_sides(mask_function, given.get("q_length"), given.get("local_size")):
        raise NotImplementedError(
            f"mask_function is {mask_function.__qualname__}; cp_fast has causal masks and windows"
        )
    return sequences_as_mask()


def _has_two_sides(mask_function: Callable[..., Any], length: Any, window: int | None) -> bool:
    """Whether a mask is that of full attention, or of a window that counts the query and both of its sides.

    transformers joins functions: a causal mask or another one, and whether two tokens have one document. It takes the
    positions of a slice for those of several documents, and `cp_batch` knows better.
    """
    while mask_function.__qualname__.startswith(("and_masks", "remap_positions_for_packed", "add_offsets")):
        held = [cell.cell_contents for cell in mask_function.__closure__ or ()]
        parts = [part for one in held for part in (one if isinstance(one, tuple) else [one]) if callable(part)]
        parts = [part for part in parts if not part.__qualname__.startswith("packed_sequence_mask_function")]
        if len(parts) != 1:
            return False
        [mask_function] = parts
    if "or_mask" not in mask_function.__qualname__ or not isinstance(length, int) or length < 1:
        return False
    near = {0, 1, 2, length // 2, length - 1}
    if window is not None:
        near |= {window - 1, window, window + 1, 2 * window}
    rows = torch.tensor(sorted(row for row in near if 0 <= row < length), device="cpu")
    zero = torch.tensor(0, device="cpu")
    distance = (rows[:, None] - rows[None]).abs()
    seen = distance >= 0 if window is None else distance < window
    return torch.equal(mask_function(zero, zero, rows[:, None], rows[None]).expand_as(seen), seen)


def _window(module: torch.nn.Module, sliding_window: Any, causal: bool) -> tuple[int, int]:
    """The layer's window. Raises if its configuration requests attention that its arguments do not express."""
    config: Any = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds is not None and layer is not None else None
    if kind not in (None, "hybrid", INDEXED, *LAYERS):
        raise NotImplementedError(f"layer_types[{layer}] is {kind!r}; cp_fast has {' and '.join(LAYERS)}")
    size = None if sliding_window is _UNSAID else sliding_window
    hidden = kind is None and sliding_window is _UNSAID and getattr(config, "sliding_window", None) is not None
    if (kind == "sliding_attention" and size is None) or hidden:
        raise NotImplementedError(
            f"{type(module).__name__} has a sliding window that it does not pass to its attention"
        )
    if size is None:
        return -1, -1
    return size - 1, 0 if causal else size - 1


def _sequences(batch: CpBatch, causal: bool, window: tuple[int, int]) -> tuple[dict[str, Any], bool]:
    """The arguments of `attention` for a batch and a layer's mask, and whether it takes tensors [t/cp, h, d]."""
    if batch.both_ways is not None and causal:
        return batch.both_ways.arguments(window[0]), True
    lengths = {"cu_seqlens_q": batch.cu_seqlens, "cu_seqlens_q_padded": batch.cu_seqlens_padded}
    kinds = ("no_mask", "causal") if batch.cu_seqlens is None else ("padding", "padding_causal")
    mask = {"attn_mask_type": kinds[causal], "window_size": window}
    return {"cp": batch.cp, "qkv_format": batch.qkv_format, **mask, **lengths}, batch.qkv_format == "thd"
