"""Entries of configurations, kinds of modules and adapters that are known by name to mix tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = [
    "CHUNKED",
    "LAYERS",
    "NAME",
    "ROUTER_SWITCH",
    "refuse_adapters",
    "refuse_by_name",
    "refuse_caches",
    "refuse_kind",
    "refuse_switches",
    "token_axis",
]

NAME = "cp_fast"  # The attention implementation has this name.
ROUTER_SWITCH = "output_router_logits"  # It switches the loss of `router_losses` on.
# One argument: transformers 5.24 calls it cache.
_CACHES = ("cache", "past_key_values", "cache_params", "layer_past")
CHUNKED = "chunked_attention"
LAYERS = ("full_attention", "sliding_attention", CHUNKED)  # cp_fast has these of a configuration's layer_types.
_WITH_MIXERS = (
    "linear_attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
    "moe",
    "mlp",
)  # It has these with the model's linear layers.
_MIXING = (
    nn.modules.conv._ConvNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.batchnorm._NormBase,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.ConstantPad1d,
    nn.ZeroPad2d,
    nn.Unfold,
    nn.Fold,
    nn.Upsample,
)
_ELSEWHERE = {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"}
_ELSEWHERE |= {"linear_attention", "conv", "hybrid"}  # It has these in some models.
_BY_ROW = (nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)  # They drop whole rows of [b, s, d].
_DROPPED = ("p", "drop_prob", "drop_path_rate")  # These say how likely.
_OF_EXPERTS = ("expert_capacity", "capacity_factor", "expert_capacity_factor")  # Other tokens decide which are dropped.
_ADAPTERS = {  # PEFT has these kinds, in addition to prompt learning.
    **dict.fromkeys(("ADAPTION_PROMPT", "XLORA", "CARTRIDGE", "SHADOW"), "adds tokens or attention to"),
    "LILY": "averages its routers over",
    "POLY": "draws the skills of each row at random, once for",
}
_SWITCHES = {  # of a configuration and of calls
    "output_attentions": "attention over ranks makes no matrix of weights. Set it to False",
}
_INVOKED = "alora_invocation_tokens"
_OF_LAYERS = ("layerdrop", "decoder_layerdrop", "encoder_layerdrop")  # how likely a layer is skipped in training


def refuse_by_name(
    model: nn.Module, covered: Mapping[str, nn.Module], whole: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Raise for what a model's configuration and modules say that they do, before anything runs.

    Args:
        covered: linear layers and convolutions that cp_fast has over ranks, by name; whose weights are convolutions.
        whole: the names of modules that every rank runs on everything, as one process does.
        more: what cp_fast has of this model's layer_types besides.

    Raises:
        NotImplementedError: naming the entry or the module. ValueError: the weights are not there to be looked at.
    """
    name = type(model).__name__
    top: Any = model.config
    if getattr(top, "is_encoder_decoder", False):
        raise NotImplementedError(f"{name} has an encoder and a decoder; cp_fast spreads the tokens of one sequence")
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise NotImplementedError(f"{name} reads {model.main_input_name}; cp_fast spreads input_ids")
    refuse_switches({}, top)
    for config in {id(c): c for c in (top, top.get_text_config())}.values():
        _refuse_entries(config, (*LAYERS, *more, *(_WITH_MIXERS if covered else ())), name)
    for where, module in model.named_modules():
        mixes = isinstance(module, _MIXING) and not _of_one_token(module) and where.rpartition(".")[0] not in covered
        if mixes and not any(f"{where}.".startswith(f"{part}.") for part in whole):
            above = [model.get_submodule(where.rsplit(".", n)[0]) for n in (1, 2) if where.count(".") >= n]
            copied = any(hasattr(one, "modules_to_save") and hasattr(one, "original_module") for one in above)
            cure = ". PEFT's modules_to_save copies it: call prepare before, and add such adapters after it"
            raise NotImplementedError(
                f"{where} ({_kind(model, where)}) mixes tokens; cp_fast has only attention over ranks{cure * copied}"
            )
        by_row = isinstance(module, _BY_ROW) or re.search("DropPath|StochasticDepth", type(module).__name__)
        likely = next((x for x in (getattr(module, entry, None) for entry in _DROPPED) if x), 0) if by_row else 0
        if likely and not any(f"{where}.".startswith(f"{part}.") for part in whole):
            raise NotImplementedError(
                f"{where} ({_kind(model, where)}) drops whole rows in training, with probability {likely}; each rank "
                "would drop rows of its own choice, so it must be 0"
            )
    # Sharded weights are [0] while they are elsewhere; a linear layer may have none, [n, 0], and so may its bias.
    none = {where for where, m in model.named_modules() if any(w.dim() > 1 and not w.numel() for w in _own(m))}
    absent = [
        n for n, w in model.named_parameters() if w.is_meta or (w.shape == (0,) and n.rpartition(".")[0] not in none)
    ]
    if absent:
        raise ValueError(
            f"{absent[0]} has no values yet; prepare runs the model once, so call it when weights are loaded"
        )


def refuse_adapters(model: Any) -> None:
    """Raise NotImplementedError for an adapter of a PeftModel, or of the model inside, that does not work on one token
    at a time; it may have come after `prepare`.
    """
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    for name, config in configs.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        does = _ADAPTERS.get(kind) or ("adds tokens to" if getattr(config, "is_prompt_learning", False) else None)
        what = "alora_invocation_tokens, which it looks for in" if getattr(config, _INVOKED, None) else None
        if does or what:
            raise NotImplementedError(
                f"adapter {name!r} of the {type(model).__name__} has {what or f'{kind}, which {does}'} the whole "
                "sequence; cp_fast takes adapters of linear layers, such as LoraConfig"
            )


def refuse_caches(name: str, named: Mapping[str, Any]) -> None:
    """Raise NotImplementedError where a layer's call has a cache; name: of the layer."""
    for cache in _CACHES:
        if named.get(cache) is not None:
            raise NotImplementedError(
                f"{cache} is given to {name}; a cache is not supported, so call with use_cache=False, and without "
                "adapters that add keys (prefix tuning)"
            )


def refuse_kind(entry: str, kind: str, name: str) -> None:
    """Raise NotImplementedError for a kind of layers. entry: of the configuration; name: of the model or the layer."""
    has = f"{', '.join(LAYERS[:-1])} and {LAYERS[-1]}"
    if kind in _ELSEWHERE:
        has = f"such layers in other models, not those of {name} (docs/how_to/hybrid.md)"
    raise NotImplementedError(f"{entry} is {kind!r}; cp_fast has {has}")


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [*module.parameters(recurse=False)]


def refuse_switches(given: Mapping[str, Any], config: Any) -> None:
    """Raise NotImplementedError for what a call may ask for, or the model's configuration for all calls, and what is
    wrong for a slice. The configuration may have changed since `prepare`.
    """
    for switch, why in _SWITCHES.items():
        places = {"the call": given.get(switch)}
        if places["the call"] is None:
            places = {
                "model.config": getattr(config, switch, None),
                "the text model's config": getattr(config.get_text_config(), switch, None),
            }
        for place, value in places.items():
            if value:
                raise NotImplementedError(f"{switch} is {value} in {place}, which cp_fast does not support: {why}")


def _refuse_entries(config: Any, layers: tuple[str, ...], name: str) -> None:
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in layers:
            refuse_kind(f"layer_types[{layer}]", kind, name)
    for entry in _OF_EXPERTS:
        if getattr(config, entry, None):
            raise NotImplementedError(
                f"{entry} is {getattr(config, entry)}; which tokens an expert drops depends on the other ranks' tokens"
            )
    for entry in _OF_LAYERS:
        if getattr(config, entry, None):
            raise NotImplementedError(
                f"{entry} is {getattr(config, entry)}; in training each rank would skip layers of its own choice, so "
                "it must be 0"
            )


def _of_one_token(module: nn.Module) -> bool:
    sizes = getattr(module, "kernel_size", None)
    return isinstance(sizes, tuple) and all(size == 1 for size in sizes) and isinstance(module, nn.Conv1d)


def _kind(model: nn.Module, where: str) -> str:
    """The module's class, and that of the module which holds it."""
    outer = where.rpartition(".")[0]
    inner = type(model.get_submodule(where)).__name__
    return f"{inner} of {type(model.get_submodule(outer)).__name__}" if outer else inner


def token_axis(x: torch.Tensor, tokens: int) -> int | None:
    """Return the first axis of this size, or None."""
    return next((axis for axis, size in enumerate(x.shape) if size == tokens), None)
