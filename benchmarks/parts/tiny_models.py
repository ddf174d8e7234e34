"""Tiny models of any class of transformers, with random weights: its configuration, made small.

The default configuration says what a class has: which kinds of layers, in which order; which sizes are equal. `shrunk`
keeps one layer of each kind, and gives sizes by the names of their entries. Thresholds become smaller than a batch of
`benchmarks.parts.sweep_cases`: windows, chunks, positions behind which an embedding or a scale changes. An entry of an
unknown name keeps its value, unless that was the size of something that is smaller now.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.parts.tiny_exceptions import EXCEPTIONS

__all__ = ["ORDINARY", "TooLarge", "shrunk", "tiny_model"]

WIDTH = 32
WORDS = 96  # ids of a vocabulary
SPECIAL = 64  # the first id that is the special token of something
ORDINARY = range(5, 60)  # ids of text
MOST = 40_000_000  # weights of a model that is still played
MOST_LAYERS = 4
SIDE = 4  # of an image, in patches

# ---- sizes by the names of entries; the first that fits counts

_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "encoder_layers", "layers")
_COUNTS_OF_LAYERS = r"(num_hidden_layers|num_layers|n_layers?|depth|(en|de)coder_(num_)?layers|num_blocks|layers)$"
_KEPT = (
    r"(num_channels|in_channels|patch_size|image_size|spatial_merge_size|temporal_patch_size|kernel|conv|stride|padding"
    r"|^num_labels|type_vocab_size|bits|frequency_bins|num_mel_bins|mlp_ratio|version|seed|dilation|buckets$)"
)
_WIDTHS = (
    r"(hidden_size|d_model|n_embd|^dim|embed_dim|emb_dim|embedding_size|word_embed_proj_dim|lru_width|width"
    r"|hidden_size_per_layer_input|projection_dim|emb_size|projector_(in|out)put_dim)$"
)
_INNER = (
    r"(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dff|d_inner|mlp_dim|dim_ff|inner_dim|hidden_dim|ffn_size"
    r"|feed_forward_size|n_inner|intermediate_size_mlp|merged_hidden_size)$"
)
_LENGTHS = (
    r"(max_.*position|n_positions|n_ctx|max_seq_len|max_sequence_length|model_max_length|seq_length|context_length)"
)
_WINDOWS = (
    r"((sliding_?window|attention_window|window_size|local_attention|window_len)(_size)?$|local_attention_window_len)"
)
_KV_HEADS = r"(key_value_heads|n_head_kv|num_kv_heads|kv_n_heads|num_query_groups)$"
_RULES: tuple[tuple[str, int], ...] = (
    (r"(^|_)vocab(ulary)?_size|vocab_size_|^n_vocab$", WORDS),
    (_WINDOWS, 6),
    (r"attention_chunk_size$|^floor_scale$|log_scaling_n_floor", 8),
    (r"original_max_position_embeddings$", 16),
    (_LENGTHS, 64),
    (r"^index_topk$|indexer_budget", 8),
    (r"(index_head_dim|indexer_head_dim)$", 16),  # twice what is rotated
    (r"(index_n_heads|indexer_n_heads)$", 16),  # a ReLU in each: with few of them many scores are 0, and equal
    (r"^(mamba_)?(chunk_size|mamba_chunk_size)$|^block_size$", 8),
    (r"^(mamba_d_state|ssm_state_size|state_size)$", 8),
    (r"^(mamba_n_heads|n_mamba_heads|mamba_num_heads)$", 8),
    (r"^(mamba_d_head|mamba_headdim|mamba_head_dim)$", 8),
    (r"^(mamba_n_groups|mamba_ngroups|n_groups)$", 2),
    (r"^mamba_d_ssm$", 64),
    (r"^(time_step_rank|mamba_dt_rank)$", 4),
    (r"(q_lora_rank|kv_lora_rank|_lowrank|_rank)$", 16),
    (r"(qk_nope_head_dim|qk_rope_head_dim|v_head_dim|rope_head_dim)$", 8),
    (r"^qk_head_dim$", 16),
    (r"(key|value|linear|kv|_)?_?head_dim$|^d_kv$|^kv_channels$|^dim_head$|^d_head$|attention_head_size$", 8),
    (r"^rotary_dim$|^rotary_ndims$", 8),
    (r"linear_num_value_heads$", 4),
    (r"linear_num_key_heads$", 2),
    (r"(experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|^top_k|num_selected_experts)$", 2),
    (r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts|num_local_experts|zero_expert_num)$", 4),
    (r"^(n_group|num_expert_group)$", 2),
    (r"^topk_group$", 1),
    (r"^(n_shared_experts|num_shared_experts|moe_num_shared_experts)$", 1),
    (r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$", 1),
    (r"(_period|_interval|every_n_layers|_pattern|sparse_step|_frequency|every)$", 2),
    (_KV_HEADS, 2),
    (r"(attention_heads|num_heads|n_heads?|_heads)$", 4),
    (_INNER, 48),
    (_WIDTHS, WIDTH),
)
_ABSENT = {"head_dim": 8, "num_key_value_heads": 2, "num_experts_per_tok": 2}  # of entries without a default
_TOKENS = r"(_token_ids?|_token_index|_index|_token|_patch_id|_start_id|_end_id|_newline_id)$"
_USUAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_OF_LAYERS = r"(idx|index|indexes|indices|_ids|_layers|layer_list|_at)s?$"


class TooLarge(Exception):
    """A model that is not small."""


def tiny_model(name: str, **more: Any) -> Any:
    """A small model of a class of transformers, in evaluation mode, with weights under which all parts matter.

    Args:
        more: entries of its configuration, beside those of `shrunk`.

    Raises:
        TooLarge: it has more than `MOST` weights even so. And whatever its class raises.
    """
    kind = getattr(importlib.import_module("transformers"), name)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind(shrunk(kind, **more)).parameters())
    if count > MOST:
        raise TooLarge(f"{count:,} weights in the smallest configuration")
    torch.manual_seed(0)
    model = kind(shrunk(kind, **more)).float().eval()
    _draw(model)
    return model


@torch.no_grad()
def _draw(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        if weight.is_floating_point():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.2 * drawn if weight.dim() > 1 else weight + 0.1 * drawn)


def shrunk(kind: Any, **more: Any) -> Any:
    """The configuration of a class of models, made small.

    Classifiers of sequences get the end token as their padding token, as TRL gives it to tokenizers that have none.

    Args:
        more: further entries, of nested configurations too.
    """
    name, config_class = kind.__name__, kind.config_class
    default = config_class()
    given = _small(default, _sizes(default))
    text, entries = _text(given), default.get_text_config()
    if name.endswith("ForSequenceClassification"):
        end = text.get("eos_token_id", getattr(entries, "eos_token_id", None))
        end = end[0] if isinstance(end, list) else end
        text |= dict.fromkeys(("pad_token_id", "eos_token_id"), 2 if end is None else end)
    if "mrope_section" in inspect.getsource(inspect.getmodule(kind) or kind):
        angles = text.get("rope_parameters", dict(getattr(entries, "rope_parameters", None) or {}))
        flat = not any(isinstance(x, dict) for x in angles.values())
        text |= {"rope_parameters": _rope({"mrope_section": [2, 1, 1]} | angles, text)} if flat else {}
    given = _merged(given, EXCEPTIONS.get(config_class.__name__, {}))
    if name.endswith(("ForCausalLM", "LMHeadModel", "ModelWithLMHead")) and hasattr(default, "is_decoder"):
        given["is_decoder"] = True
    if "Classification" in name:
        given["num_labels"] = 3
    return config_class(**_merged(given, more))


def _text(given: dict[str, Any]) -> dict[str, Any]:
    """The part of the entries that is the text model's."""
    for part in ("text_config", "thinker_config", "llm_config"):
        if isinstance(given.get(part), dict):
            return _text(given[part])
    return given


def _merged(given: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Nested entries, with others on top.

    >>> _merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": "as it is"})
    {'a': {'b': 1, 'c': 4}}
    """
    out = dict(given)
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(out.get(name), dict):
            out[name] = _merged(out[name], value)
        elif isinstance(value, str) and value == "as it is":
            out.pop(name, None)
        else:
            out[name] = value
    return out


# ---- one configuration


def _small(config: Any, sizes: dict[int, int]) -> dict[str, Any]:
    """The entries of a configuration that are to be smaller, with those of the configurations in it.

    Args:
        sizes: what large widths have become; an entry of an unknown name may be one of them.
    """
    layers, entries = _layers(config), _entries(config)
    kept, special = _kept_layers(entries, layers), iter(range(SPECIAL, WORDS))
    given: dict[str, Any] = {}
    for name, value in entries.items():
        if hasattr(value, "sub_configs_defaults"):
            given[name] = _small(value, sizes) | {"model_type": value.model_type}
        elif isinstance(value, int) and not isinstance(value, bool):
            small = _size(name, value, len(kept), special, entries)
            if small is None and not re.search(_KEPT, name):
                small = sizes.get(value)
            given |= {} if small is None else {name: small}
        elif isinstance(value, list | tuple) and value:
            listed = _listed(name, list(value), layers, kept, special)
            given |= {} if listed is None else {name: listed}
        elif value is None and name in _ABSENT:
            given[name] = _ABSENT[name]
    if isinstance(side := entries.get("image_size"), int | list | tuple) and (patch := entries.get("patch_size")):
        one = SIDE * (patch[0] if isinstance(patch, list | tuple) else patch)
        given["image_size"] = one if isinstance(side, int) else [one] * len(side)
        given["patch_size"] = patch  # or a nested configuration has that of its class
    if "window_size" in given and isinstance(patch := entries.get("patch_size"), int):  # in pixels
        given["window_size"] = SIDE * patch
    if getattr(config, "_heterogeneity_spec", None) is not None:
        given["per_layer_config"] = _by_layer(config, kept, entries)
    ropes = {n: x for n, x in entries.items() if isinstance(x, dict) and "rope" in n}
    return given | {n: small for n, x in ropes.items() if (small := _rope(x, given)) != x}


def _sizes(config: Any) -> dict[int, int]:
    """What the large widths of a configuration, and of those in it, become."""
    found: dict[int, int] = {}
    for name, value in _entries(config).items():
        if hasattr(value, "sub_configs_defaults"):
            found |= _sizes(value)
        elif isinstance(value, int) and value >= 64 and re.search(_WIDTHS, name):
            found[value] = WIDTH
    return found


def _entries(config: Any) -> dict[str, Any]:
    """What a configuration has, by the names that its constructor takes."""
    names = {field.name for field in dataclasses.fields(config)} - {"id2label", "label2id", "dtype"}
    held, own = vars(config), config.attribute_map
    return {name: held[own.get(name, name)] for name in sorted(names) if own.get(name, name) in held}


def _layers(config: Any) -> int:
    counts = (getattr(config, name, None) for name in _LAYERS)
    return next((count for count in counts if isinstance(count, int)), 0)


def _kept_layers(entries: dict[str, Any], layers: int) -> list[int]:
    """One layer of each kind, by all lists that have an entry a layer, or name layers."""
    if layers < 2:
        return [*range(layers)]
    first: dict[tuple[Any, ...], int] = {}
    lists = [list(x) for x in entries.values() if isinstance(x, list | tuple) and len(x) == layers]
    each = [x for x in lists if isinstance(x[0], str) or len({repr(one) for one in x}) < layers]
    named = [set(x) for n, x in entries.items() if _names_layers(n, x, layers)]
    for layer in range(layers):
        what = (*(repr(one[layer]) for one in each), *(layer in one for one in named))
        first.setdefault(what, layer)
    kept = sorted(first.values())[:MOST_LAYERS]
    return kept if len(kept) > 1 else [0, layers - 1]


def _names_layers(name: str, value: Any, layers: int) -> bool:
    if not isinstance(value, list | tuple) or not value or not re.search(_OF_LAYERS, name) or "token" in name:
        return False
    return all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < layers for x in value)


def _listed(name: str, value: list[Any], layers: int, kept: list[int], special: Iterator[int]) -> list[Any] | None:
    if _names_layers(name, value, layers) and (len(value) != layers or len(set(value)) == len(value)):
        return [new for new, old in enumerate(kept) if old in value] or [0]
    if layers > 1 and len(value) == layers:
        return [value[old] for old in kept]
    if not re.search(_TOKENS, name) or not all(isinstance(x, int) for x in value) or max(value) < SPECIAL:
        return None
    rest = [next(special) for _ in value[1:]]
    return [2 if name == "eos_token_id" else next(special), *rest]


def _size(name: str, value: int, layers: int, special: Iterator[int], entries: dict[str, Any]) -> int | None:
    if re.search(_TOKENS, name):
        if name in _USUAL:
            return value if 0 <= value < ORDINARY.start else _USUAL[name]
        return next(special, WORDS - 1) if value >= ORDINARY.start else None
    if value <= 1 or re.search(_KEPT, name):
        return None
    if re.search(_COUNTS_OF_LAYERS, name):
        return min(value, layers or 2)
    small = next((size for pattern, size in _RULES if re.search(pattern, name)), None)
    if re.search(_KV_HEADS, name):
        heads = next((entries[n] for n in ("num_attention_heads", "n_head", "n_heads") if n in entries), 0)
        small = 4 if heads == value else 2
    return None if small is None else min(small, value)


def _by_layer(config: Any, kept: list[int], entries: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries that only some layers have."""
    found: dict[str, dict[str, Any]] = {}
    for layer, own in config.to_dict()["per_layer_config"].items():
        if int(layer) in kept:
            small = {n: _size(n, x, len(kept), iter(()), entries | own) for n, x in own.items() if isinstance(x, int)}
            found[str(kept.index(int(layer)))] = own | {n: x for n, x in small.items() if x is not None}
    return found


def _rope(value: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Rotary embeddings: sections that add up to half of a small head, and thresholds that a batch reaches."""
    out: dict[str, Any] = {}
    for name, x in value.items():
        out[name] = x
        if isinstance(x, dict):
            out[name] = _rope(x, given)
        elif name == "mrope_section":
            half = int(given.get("head_dim", 8) * value.get("partial_rotary_factor", 1.0)) // 2
            rest = [max(half * part // sum(x), int(half >= len(x))) for part in x[1:]]
            out[name] = [half - sum(rest), *rest]
        elif name == "original_max_position_embeddings":
            out[name] = 16
    return out
