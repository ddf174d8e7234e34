"""Hugging Face transformers: models with attention over sequences that are sharded over ranks.

    from cp_fast.integrations import transformers as cp_transformers

    model = cp_transformers.prepare(AutoModelForCausalLM.from_pretrained(...), context)
    out = model(**cp_transformers.shard_batch(batch, cp=context))  # out.loss: see `shard_batch`

The sequences of a batch reach every layer as the keyword `cp_batch`, which models pass on. Needs transformers 5; only
`prepare` and `register` import it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.hugging_face.attention_dropout import dropout_of_layer
from cp_fast.integrations.hugging_face.built_masks import Said, Sides, refuse_own_mask, sides_of, without_blocks
from cp_fast.integrations.hugging_face.called_layers import note_call, note_layers
from cp_fast.integrations.hugging_face.chosen_keys import (
    INDEXED,
    SequencesToChoose,
    attend_to_chosen,
    choosers,
    give_back,
    put_selectors,
)
from cp_fast.integrations.hugging_face.compressed_keys import (
    COMPRESSED,
    WindowsOfCall,
    give_windows_back,
    put_windows,
    window_layers,
)
from cp_fast.integrations.hugging_face.handed_on import handing_on
from cp_fast.integrations.hugging_face.image_calls import take_functions
from cp_fast.integrations.hugging_face.image_models import Whole, find_images, mark_whole, parts_of
from cp_fast.integrations.hugging_face.image_probe import prove_images
from cp_fast.integrations.hugging_face.key_biases import give_biases, take_biases
from cp_fast.integrations.hugging_face.linear_mixers import linear_mixers, put_over_ranks, take_back
from cp_fast.integrations.hugging_face.model_batches import shard_batch
from cp_fast.integrations.hugging_face.model_call import SILENT, ModelCall, sequences_of
from cp_fast.integrations.hugging_face.model_task import Task
from cp_fast.integrations.hugging_face.module_states import put_state, state_of, states_of
from cp_fast.integrations.hugging_face.pooled_head import RowPooling, pooling_of, put_pooling
from cp_fast.integrations.hugging_face.position_tables import give_tables
from cp_fast.integrations.hugging_face.prepared_model import PreparedModel, check_calls, forget_model
from cp_fast.integrations.hugging_face.query_scales import give_positions, take_positions
from cp_fast.integrations.hugging_face.router_losses import routing_asked_for, routing_of
from cp_fast.integrations.hugging_face.slice_probe import Probe, at_rest, look_over
from cp_fast.integrations.hugging_face.task_head import Head, head_of, spans_of, transform_of
from cp_fast.integrations.hugging_face.text_alone import unreached_parts
from cp_fast.integrations.hugging_face.token_mixers import (
    CHUNKED,
    LAYERS,
    NAME,
    refuse_adapters,
    refuse_by_name,
    refuse_kind,
)
from cp_fast.integrations.hugging_face.written_attention import (
    SequencesAsMask,
    has_alibi,
    sequences_as_mask,
    with_attention,
    writes_attention,
)
from cp_fast.integrations.shared.drop_in import refuse
from cp_fast.integrations.token_batches import CpBatch
from cp_ref.problems.call_checks import check_context

__all__ = ["NAME", "CpBatch", "attention_forward", "prepare", "refuse_masks", "register", "shard_batch"]

Model = TypeVar("Model", bound=torch.nn.Module)

_UNSAID = object()
_POOLED = "{}'s labels are one for each sequence"


@dataclass(frozen=True)
class _Attention:
    """A layer's attention, as `prepare` has seen it.

    Attributes:
        said: the layer's own account.
        sides: what its queries see of their sequences.
        number: of the layer, by which its seed of dropout differs from others'.
    """

    said: Said
    sides: Sides
    number: int

    def sides_now(self, said: Said, name: str) -> Sides:
        """Return what the queries of a call see. said: the layer's account of it; name: of the layer, for the error."""
        if said == self.said:
            return self.sides
        if said.causal != self.said.causal:
            before = self.said.causal
            raise ValueError(f"{name} is called with is_causal={said.causal}; when it was prepared it was {before}")
        if not said.causal or said.silent:
            raise ValueError(
                f"{name} is called with a window of {said.size}; when it was prepared it was {self.said.size}: call "
                "prepare again"
            )
        return said.sides


def attention_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers of a prepared model whose attention is over ranks."""
    return (module for module in model.modules() if state_of(module, _Attention) is not None)


def prepare(model: Model, cp: ContextParallel, *, images: Literal["whole", "ranks"] = "whole") -> Model:
    """Prepare a transformers model for sequences that are sharded over ranks; returns the same model.

    Its attention becomes `cp_fast`'s, and so do gated delta rule, KDA, Mamba-2 and Mamba layers and short
    convolutions. So do the choice of keys of DeepSeek-V3.2 and GLM-5, and the compressed keys of DeepSeek-V4, in
    contexts with cp_comm_type "all_gather" or "a2a". All other modules must work on one token at a time. `prepare`
    first looks for known mixers of tokens: layer_types, other linear layers and convolutions, pooling, batch norms.
    Then it runs the model on a dozen tokens, with attention and linear layers that pass each token on alone. It
    compares the outputs of a slice with those of the whole. The same runs show how the task head uses labels. The
    vision part of a model of images does not change: every rank runs it on all images.

    Args:
        model: with its weights loaded, before DDP, FSDP or torch.compile wrap it. Or PEFT's PeftModel: the model inside
            is prepared, and the PeftModel is called, saved and merged as ever. Adapters may be added before or after.
        cp: the context of its batches. A batch may have another one, of fewer ranks: `shard_batch(batch, cp=small)`.
        images: "whole": every rank runs the vision part on all images of a batch. "ranks": the ranks share the images,
            and the frames of videos, out by what they cost, and send each other the rows of their tokens. Losses and
            gradients are the same. Dropout in the vision part then draws once for a picture, as in one process, where
            in "whole" each rank draws for its own tokens.

    Raises:
        NotImplementedError: a module mixes tokens and cannot be sharded; the error has its name in the model. A model
        that reads images in a way that is not known here, or cannot be proved. Adapters that add tokens or attention of
        their own (prompt learning, adaption prompts), or that look for tokens or mix them; they raise later too.
        ValueError: weights are not loaded yet; images="ranks" for a model of text. TypeError: not a model of
        transformers.
    """
    check_context(cp, ContextParallel)
    if images not in ("whole", "ranks"):
        raise ValueError(f"images is {images!r}; it must be 'whole' or 'ranks'")
    if callable(getattr(model, "get_base_model", None)):
        refuse_adapters(model)
        prepare(cast(Any, model).get_base_model(), cp, images=images)
        return model
    switch: Any = getattr(model, "set_attn_implementation", None)
    if switch is None:
        raise TypeError(f"model is a {type(model).__name__}; prepare takes a model of transformers")
    covered, sight = linear_mixers(model), find_images(model)
    if sight is None and images == "ranks":
        raise ValueError(f"images is 'ranks', and {type(model).__name__} takes text alone; leave it away")
    whole = unreached_parts(model) if sight is None else parts_of(model, sight)
    kinds = (*((INDEXED,) if choosers(model) else ()), *(COMPRESSED if window_layers(model) else ()))
    refuse_by_name(model, covered, whole, kinds)
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
    forget_model(model)
    take_functions(model)
    alibi = has_alibi(model)
    if writes_attention(model):
        with_attention(model, attention_forward)
    switch(mine)
    try:
        put_over_ranks(model)
        put_selectors(model)
        put_windows(model)
        give_tables(model)
        give_positions(model, attention_forward)
        give_biases(model, attention_forward)
        with at_rest(model):
            looked: Any = cast(Any, model).base_model if pools else model
            mixers = linear_mixers(looked)
            how = {"numbered": not alibi, "pooled": isinstance(pools, RowPooling)}
            seen = handing_on(model, covered, lambda: look_over(looked, mixers, **how))
            if sight is not None:
                sight = prove_images(looked, model.get_submodule(sight.where), sight, seen, images == "ranks")
            head = _POOLED.format(type(model).__name__) if pools else head_of(model, seen)
            found: dict[str, Any] = {"pools": pools}
            if not pools:
                found |= {"spans": spans_of(model, seen), "transform": transform_of(model, seen)}
            if isinstance(head, Head):
                found["routing"] = routing_of(model, seen)
            task = Task(head, **found)
            routing_asked_for(task.routing, {}, config)
    except BaseException as error:
        switch(before)
        take_functions(model)
        take_back(model)
        give_back(model)
        give_windows_back(model)
        take_positions(model)
        take_biases(model)
        if isinstance(error, Exception) and not isinstance(error, NotImplementedError):
            raise NotImplementedError(
                f"{type(model).__name__} does not run with cp_fast's attention: {error}"
            ) from error
        raise
    for number, (module, said) in enumerate(seen.callers.items()):
        put_state(module, _Attention(said, seen.sides.get(module, said.sides), number))
    note_layers(model, {*seen.callers, *seen.linear}, seen.heard)
    put_pooling(model, pools)
    check_calls(model, PreparedModel(seen.numbering, task, seen.by_row, sight))
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
    """Compute one layer's attention, as transformers calls it: [b, h, s/cp, d] -> ([b, s/cp, h, d], None).

    `sliding_window` counts the query itself, so it is one more than the left side of a window here. Where attention is
    not causal, both sides are those of the mask that the model builds (`prepare` sees it): transformers' own windows of
    two sides have `sliding_window` tokens on each. `s_aux` are sinks.
    `alibi_slopes` float32 [h] are of `cp_fast.attention`. `indices` int32 [b, s/cp, top_k] are the keys that an indexer
    chose, of a layer that `prepare` gave one. `dropout` drops pairs by a seed that each call of the model draws; they
    are not those that PyTorch's generator would choose.

    Raises:
        RuntimeError: the model was not prepared. NotImplementedError, TypeError: an argument that cannot be honoured.
    """
    name = type(module).__name__
    states = states_of(module)
    if Whole in states:
        theirs = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
        how: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "softcap": softcap}
        return theirs(module, query, key, value, attention_mask, **how, **kwargs)
    sequences = sequences_of(name, cp_batch)
    unheard = {keyword: value for keyword, value in kwargs.items() if keyword not in SILENT}
    chosen = attention_mask if isinstance(attention_mask, SequencesToChoose) else None
    windows: WindowsOfCall | None = states.get(WindowsOfCall)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    said = _said(module, causal, sliding_window)
    if chosen is None and isinstance(sequences, Probe):
        sequences.look_at_mask(module, said, attention_mask)
        attention_mask = None
    if chosen is None and attention_mask is not None:
        refuse_own_mask(name, attention_mask)
    refuse(name, indices=indices if chosen is None else None, **unheard)
    if chosen is not None or windows is not None:
        refuse(name, dropout_p=dropout, softcap=softcap, alibi_slopes=alibi_slopes)
    if key.shape[2] != query.shape[2]:
        raise NotImplementedError(
            f"key has {key.shape[2]} tokens and query {query.shape[2]}: a cache is not supported, "
            "nor are adapters that add keys (prefix tuning)"
        )
    if isinstance(sequences, Probe):
        return sequences.attend(query, key, value), None
    prepared: _Attention | None = states.get(_Attention)
    if prepared is None:
        raise RuntimeError(f"{name} was not prepared: call cp_fast.integrations.transformers.prepare(model, cp) first")
    sides = prepared.sides_now(said, name)
    note_call(module, cp_batch)
    if chosen is not None:
        if indices is None or sides != (-1, 0, 0):
            raise NotImplementedError(f"{name} gives its attention no indices, or a window besides")
        return attend_to_chosen(chosen, query, key, value, indices, scaling, s_aux), None
    if windows is not None:
        if sides != (windows.layer.sliding_window - 1, 0, 0) or s_aux is None:
            raise NotImplementedError(f"{name} gives its attention another window than its own, or no sinks")
        return windows.attend(query, key, scaling, s_aux), None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = sequences.attend(
        q,
        k,
        v,
        causal,
        sides if sides.left >= 0 else (-1, -1, sides.chunk),
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        softmax_type="vanilla" if s_aux is None else "learnable",
        softmax_offset=s_aux,
        alibi_slopes=alibi_slopes,
        **dropout_of_layer(module, prepared.number, dropout, getattr(cp_batch, "seed", None), query.device),
    )
    return out, None


def refuse_masks(
    *_: Any, attention_mask: Any = None, mask_function: Callable[..., Any], **given: Any
) -> SequencesAsMask | torch.Tensor | None:
    """Build no mask: `attention_forward` knows causal masks, windows and chunks, and full attention or windows of two
    sides that a model makes of causal ones. Raises for any other mask. A run of `prepare` gets a number in a mask's
    place.
    """
    if attention_mask is not None and not (isinstance(attention_mask, torch.Tensor) and bool(attention_mask.all())):
        refuse_own_mask("cp_fast", attention_mask)
    mask_function = without_blocks(mask_function)
    joined = given.get("use_vmap") or "or_mask" in mask_function.__qualname__
    probe, sequences = Probe.now(), sequences_as_mask()
    if probe is not None and sequences is None and (table := probe.whole_mask(mask_function, given)) is not None:
        return table
    if not joined and probe is None:
        return sequences
    sides = sides_of(mask_function, given.get("q_length"), given.get("local_size"))
    if joined and not any(one.right for one in sides):
        raise NotImplementedError(
            f"mask_function is {mask_function.__qualname__}; cp_fast has causal masks and windows"
        )
    if sequences is not None and probe is not None:
        return replace(sequences, sides=sides)
    return probe.mask(sides, given) if sequences is None and probe is not None else sequences


def _said(module: torch.nn.Module, causal: bool, sliding_window: Any) -> Said:
    """The layer's own account. Raises if its configuration requests attention that is not known here."""
    config: Any = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds is not None and layer is not None else None
    if kind not in (None, "hybrid", "hybrid_sliding", INDEXED, *COMPRESSED, *LAYERS):
        refuse_kind(f"layer_types[{layer}]", kind, type(module).__name__)
    size = None if sliding_window is _UNSAID else sliding_window
    hidden = kind is None and sliding_window is _UNSAID and getattr(config, "sliding_window", None) is not None
    silent = (kind in ("sliding_attention", "hybrid_sliding") and size is None) or hidden
    chunk = getattr(config, "attention_chunk_size", None) if kind == CHUNKED else 0
    if chunk is None:
        raise NotImplementedError(
            f"layer_types[{layer}] is {kind!r}, and its configuration has no attention_chunk_size"
        )
    return Said(causal, size, chunk, silent)
