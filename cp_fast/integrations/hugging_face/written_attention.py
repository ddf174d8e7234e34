"""Models whose attention is written out, and not called by transformers' AttentionInterface: BLOOM and MPT with ALiBi,
GPT, Falcon, GPT-Neo, GPT-NeoX Japanese, XGLM, TrOCR, MVP, GIT, Megatron-BERT, RemBERT, RoFormer, XLM and FlauBERT. Each
gets a forward that calls ours.

BLOOM and MPT add `slope * j` to the score of key j, from a tensor that they make in each call. For a causal mask that
is `-slope * |i - j|` plus `slope * i`, which the softmax of row i ignores. So their attention gets the slopes, and no
tensor of biases. `prepare` reads the slopes off the model's own tensor, and refuses another formula.

transformers hands no keywords on to this attention. So a call's sequences travel as the mask, which it does hand on,
also to a layer that is computed again.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from cp_fast.integrations.hugging_face.built_masks import Said, Sides
from cp_fast.integrations.hugging_face.module_states import hook_once, known_state, put_state
from cp_fast.integrations.hugging_face.position_tables import has_tables, takes_positions
from cp_fast.integrations.hugging_face.token_mixers import refuse_caches
from cp_fast.integrations.shared.drop_in import refuse
from cp_fast.integrations.token_batches import CpBatch

__all__ = [
    "SequencesAsMask",
    "WrittenAttention",
    "has_alibi",
    "sequences_as_mask",
    "with_attention",
    "writes_attention",
]

Attention = Callable[..., tuple[torch.Tensor, None]]
_TOKENS = 16  # The biases that are read belong to this many tokens.

_call = threading.local()


@dataclass(frozen=True, eq=False)
class SequencesAsMask:
    """The sequences of a call in the place of a mask. sides: in a run of `prepare`, those of the mask that is built."""

    sequences: Any
    sides: frozenset[Sides] | None = None

    def _itself(self, *_: Any, **__: Any) -> SequencesAsMask:
        """Models convert their masks, and make numbers that are added to scores of them."""
        return self

    to = unsqueeze = __rsub__ = __mul__ = _itself

    def get_seq_length(self) -> int:
        """The tokens that it holds in the place of a cache."""
        return 0


@dataclass(frozen=True, eq=False)
class WrittenAttention:
    """Of a layer: the attention in the place of its own. slopes: float32 [h], of ALiBi."""

    attention: Attention
    slopes: torch.Tensor | None


def sequences_as_mask() -> SequencesAsMask | None:
    """The mask of the call that runs in this thread; None for models that hand keywords on."""
    sequences = getattr(_call, "sequences", None)
    return None if sequences is None else SequencesAsMask(sequences)


def has_alibi(model: nn.Module) -> bool:
    """Whether the model is a BLOOM or an MPT of transformers."""
    return any(_kind(module) in _BIASES for module in model.modules())


def writes_attention(model: nn.Module) -> bool:
    """Whether the model has layers of transformers that are known here."""
    return any(_kind(module) in _FORWARD for module in model.modules())


def with_attention(model: nn.Module, attention: Attention) -> None:
    """Give the model's layers `attention`, with their slopes. A call without `cp_batch` runs the model's own.

    Raises:
        NotImplementedError: the model's biases are no slopes times positions; it takes no position_ids, and has none.
    """
    slopes = _slopes(model) if has_alibi(model) else None
    if slopes is None and not takes_positions(getattr(model, "base_model", model)) and not has_tables(model):
        # The sequences would reach its layers all the same, past a head that hands no keywords on.
        raise NotImplementedError(
            f"{type(model).__name__} takes no position_ids; it would number a slice's tokens itself"
        )
    if any(getattr(module, "use_alibi", False) for module in model.modules()):
        raise NotImplementedError(
            f"alibi is True in the configuration of {type(model).__name__}; cp_fast has rotary embeddings for it"
        )
    for module in model.modules():
        if hasattr(module, "_can_set_attn_implementation"):
            module.__dict__["_can_set_attn_implementation"] = _yes
            hook_once(module, _enter, _leave, always=True)
        if (forward := _FORWARD.get(_kind(module))) is not None:
            put_state(module, WrittenAttention(attention, slopes))
            module.forward = MethodType(forward, module)


def _yes() -> bool:
    return True


def _kind(module: Any) -> str:
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def _slopes(model: nn.Module) -> torch.Tensor:
    """float32 [h]: the slope of each head, of the tensor that the model itself makes."""
    inner = next(module for module in model.modules() if _kind(module) in _BIASES)
    device = next(model.parameters()).device
    biases = _BIASES[_kind(inner)](inner, device).float().reshape(-1, _TOKENS)
    slopes = biases[:, -1] - biases[:, -2]
    distances = torch.arange(_TOKENS, device=device) - (_TOKENS - 1)
    if not torch.allclose(biases - biases[:, -1:], slopes[:, None] * distances, rtol=1e-5, atol=1e-6):
        raise NotImplementedError(
            f"the position biases of {type(inner).__name__} are no slopes times positions; cp_fast has ALiBi alone"
        )
    return slopes.contiguous()


def _enter(model: Any, by_place: tuple[Any, ...], given: dict[str, Any]) -> Any:
    if getattr(_call, "sequences", None) is None:
        _call.sequences, _call.model, _call.positions = given.get("cp_batch"), model, given.get("position_ids")
    if _call.sequences is None:
        return None
    given = _with_positions(model, given)
    if "use_cache" in inspect.signature(model.forward).parameters:
        given = {"use_cache": False, **given}  # A head may not hand these on.
    if _kind(model) in _MASKLESS:
        given = {**given, "attention_mask": SequencesAsMask(_call.sequences)}
    if _kind(model) in _WITH_CACHE:
        ids = by_place[0] if by_place else given.get("input_ids")
        x = given["inputs_embeds"][..., 0] if ids is None else ids
        _refuse_counted_padding(model, ids, getattr(_call.sequences, "sequences", None))
        given = {**given, "cache": SequencesAsMask(_call.sequences), "attention_mask": torch.ones_like(x)}
    return by_place, given


def _with_positions(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments, with its positions where the model takes them: Falcon's heads hand none on."""
    if has_tables(model):
        return given
    if takes_positions(model):
        return given if given.get("position_ids") is not None else {**given, "position_ids": _call.positions}
    return {name: x for name, x in given.items() if name != "position_ids"}


def _refuse_counted_padding(model: Any, ids: torch.Tensor | None, sequences: CpBatch | None) -> None:
    """Raise for tokens whose id is that of padding, in a batch without padding. Collective."""
    if ids is None or sequences is None or sequences.has_padding:
        return
    if bool((sequences.unshard(ids) == model.pad_index).any()):
        raise NotImplementedError(
            f"input_ids have {model.pad_index}, the id of padding, among tokens: {type(model).__name__} without an "
            "attention_mask takes as many of a row's last tokens for padding. Give these tokens another id"
        )


def _leave(model: Any, *_: Any) -> None:
    if getattr(_call, "model", None) is model:  # This is the outermost model of the call.
        _call.sequences = _call.model = _call.positions = None


def _bloom(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: Any, attention_mask: Any,
    layer_past: Any = None, use_cache: bool = False, output_attentions: bool = False, **more: Any,
) -> Any:  # fmt: skip
    if not isinstance(attention_mask, SequencesAsMask):
        more |= {"layer_past": layer_past, "use_cache": use_cache, "output_attentions": output_attentions}
        return type(self).forward(self, hidden_states, residual, alibi, attention_mask, **more)
    refuse("BloomAttention", output_attentions=output_attentions)
    refuse_caches("BloomAttention", {"layer_past": layer_past})
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    dropout = self.attention_dropout.p if self.training else 0.0
    out = _attended(self, (q, k, v), attention_mask, dropout, self.inv_norm_factor)
    out = nn.functional.dropout(self.dense(out), p=self.hidden_dropout, training=self.training)
    return residual + out, None


def _mpt(self: Any, hidden_states: torch.Tensor, position_bias: Any, *given: Any, **named: Any) -> Any:
    attention_mask = named.get("attention_mask")
    if not isinstance(attention_mask, SequencesAsMask):
        return type(self).forward(self, hidden_states, position_bias, *given, **named)
    refuse_caches("MptAttention", {"cache": given[0] if given else None, **named})
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    by_head = [x.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=2)]
    dropout = self.attn_dropout_p if self.training else 0.0
    return self.out_proj(_attended(self, by_head, attention_mask, dropout, self.softmax_scale)), None


def _bert(self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, *given: Any, **named: Any) -> Any:
    if not isinstance(attention_mask, SequencesAsMask):
        return type(self).forward(self, hidden_states, attention_mask, *given, **named)
    refuse_caches(type(self).__name__, {**({"cache": given[0]} if given else {}), **named})
    refuse(type(self).__name__, **{name: named.get(name) for name in ("encoder_hidden_states", "output_attentions")})
    heads = (self.num_attention_heads, self.attention_head_size)
    by_head = [part(hidden_states).unflatten(2, heads).transpose(1, 2) for part in (self.query, self.key, self.value)]
    dropout = self.dropout.p if self.training else 0.0
    scale = self.attention_head_size**-0.5
    causal = getattr(self, "is_decoder", True)  # GIT is a decoder.
    return _attended(self, by_head, attention_mask, dropout, scale, is_causal=causal), None


def _gpt_neo(self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, *given: Any, **named: Any) -> Any:
    if not isinstance(attention_mask, SequencesAsMask):
        return type(self).forward(self, hidden_states, attention_mask, *given, **named)
    refuse_caches("GPTNeoSelfAttention", {"layer_past": given[0] if given else None, **named})
    refuse("GPTNeoSelfAttention", output_attentions=named.get("output_attentions"))
    parts = (self.q_proj, self.k_proj, self.v_proj)
    by_head = [part(hidden_states).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in parts]
    window = self.config.window_size if self.attention_type == "local" else None
    dropout = self.attn_dropout.p if self.training else 0.0
    out = _attended(self, by_head, attention_mask, dropout, 1.0, sliding_window=window)
    return self.resid_dropout(self.out_proj(out)), None


def _xglm(self: Any, hidden_states: torch.Tensor, *given: Any, attention_mask: Any = None, **named: Any) -> Any:
    if not isinstance(attention_mask, SequencesAsMask):
        return type(self).forward(self, hidden_states, *given, attention_mask=attention_mask, **named)
    name, states = type(self).__name__, given[0] if given else named.get("key_value_states")
    refuse_caches(name, named)
    refuse(name, key_value_states=states, **{one: named.get(one) for one in ("attn_prompt", "output_attentions")})
    parts = (self.q_proj, self.k_proj, self.v_proj)
    by_head = [part(hidden_states).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for part in parts]
    dropout = self.dropout if self.training else 0.0
    return self.out_proj(_attended(self, by_head, attention_mask, dropout, self.scaling)), None


def _falcon(self: Any, hidden_states: torch.Tensor, alibi: Any = None, attention_mask: Any = None, **named: Any) -> Any:
    if not isinstance(attention_mask, SequencesAsMask):
        return type(self).forward(self, hidden_states, alibi, attention_mask, **named)
    refuse_caches("FalconAttention", named)
    refuse("FalconAttention", alibi=alibi, output_attentions=named.get("output_attentions"))
    q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    q, k = _rotated(self, q, k, named["position_embeddings"])
    return self.dense(_attended(self, (q, k, v), attention_mask, 0.0, self.inv_norm_factor)), None


def _gpt(self: Any, x: torch.Tensor, attention_mask: Any = None, output_attentions: bool = False) -> Any:
    if not isinstance(attention_mask, SequencesAsMask):
        return type(self).forward(self, x, attention_mask, output_attentions)
    refuse("OpenAIGPTAttention", output_attentions=output_attentions)
    by_head = [part.unflatten(2, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=2)]
    dropout = self.attn_dropout.p if self.training else 0.0
    scale = by_head[0].shape[3] ** -0.5 if self.scale else 1.0
    return [self.resid_dropout(self.c_proj(_attended(self, by_head, attention_mask, dropout, scale)))]


def _xlm(self: Any, input: torch.Tensor, mask: torch.Tensor, kv: Any = None, cache: Any = None, **named: Any) -> Any:
    if not isinstance(cache, SequencesAsMask):
        return type(self).forward(self, input, mask, kv, cache, **named)
    refuse("MultiHeadAttention", kv=kv, output_attentions=named.get("output_attentions"))
    parts = (self.q_lin, self.k_lin, self.v_lin)
    by_head = [part(input).unflatten(2, (self.n_heads, -1)).transpose(1, 2) for part in parts]
    dropout = self.dropout if self.training else 0.0
    causal = mask.dim() == 3  # one of pairs of tokens, and not of keys
    return (self.out_lin(_attended(self, by_head, cache, dropout, self.head_dim**-0.5, is_causal=causal)),)


def _roformer(
    self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, sinusoidal_pos: Any = None, **named: Any
) -> Any:
    if not isinstance(attention_mask, SequencesAsMask):
        return type(self).forward(self, hidden_states, attention_mask, sinusoidal_pos, **named)
    refuse_caches("RoFormerSelfAttention", named)
    refused = {name: named.get(name) for name in ("encoder_hidden_states", "output_attentions")}
    refuse("RoFormerSelfAttention", **refused)
    heads = (self.num_attention_heads, self.attention_head_size)
    q, k, v = (part(hidden_states).unflatten(2, heads).transpose(1, 2) for part in (self.query, self.key, self.value))
    angles = sinusoidal_pos[0, 0][:, None] if sinusoidal_pos.dim() == 5 else sinusoidal_pos  # a row's own, or all rows'
    turned = self.apply_rotary_position_embeddings(angles, q, k, *((v,) if self.rotary_value else ()))
    by_head = (*turned, v)[:3]
    dropout = self.dropout.p if self.training else 0.0
    scale = self.attention_head_size**-0.5
    return _attended(self, by_head, attention_mask, dropout, scale, is_causal=self.is_decoder), None


def _gpt_neox_japanese(self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **named: Any) -> Any:
    if not isinstance(attention_mask, SequencesAsMask):
        return type(self).forward(self, hidden_states, attention_mask, **named)
    refuse_caches("GPTNeoXJapaneseAttention", named)
    refuse("GPTNeoXJapaneseAttention", output_attentions=named.get("output_attentions"))
    qkv = self.query_key_value(hidden_states).unflatten(2, (self.num_attention_heads, -1)).transpose(1, 2)
    q, k, v = qkv.split(self.head_size, dim=3)
    ends = [x[..., self.rotary_ndims :] for x in (q, k)]
    begins = [x[..., : self.rotary_ndims] for x in (q, k)]
    turned = _rotated(self, begins[0], begins[1], named["position_embeddings"])
    q, k = (torch.cat(pair, dim=-1) for pair in zip(turned, ends, strict=True))
    dropout = self.attention_dropout.p if self.training else 0.0
    out = _attended(self, (q, k, v), attention_mask, dropout, 1 / self.norm_factor)
    return self.dense(out), None, self.dense_bias


def _rotated(self: Any, q: torch.Tensor, k: torch.Tensor, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [b, h, s/cp, d], rotated by the function of the layer's own file."""
    return importlib.import_module(type(self).__module__).apply_rotary_pos_emb(q, k, *angles)


def _attended(
    self: Any, qkv: Any, mask: SequencesAsMask, dropout: float, scale: float, is_causal: bool = True, **more: Any
) -> torch.Tensor:
    """q, k, v [b, h, s/cp, d] -> [b, s/cp, h * d]."""
    known = known_state(self, WrittenAttention)
    if mask.sides is not None:
        Said(is_causal, None).among(mask.sides, type(self).__name__)
    given = {"dropout": dropout, "scaling": scale, "is_causal": is_causal, "sliding_window": None} | more
    slopes = None if known.slopes is None else known.slopes.to(qkv[0].device)
    out, _ = known.attention(self, *qkv, None, **given, alibi_slopes=slopes, cp_batch=mask.sequences)
    return out.flatten(2)


_PLACE = "transformers.models"
_MASKLESS = (f"{_PLACE}.openai.modeling_openai.OpenAIGPTModel",)  # Its layers make the causal mask themselves.
_WITH_CACHE = (  # They hand a cache on, and a mask that they make of lengths.
    f"{_PLACE}.xlm.modeling_xlm.XLMModel",
    f"{_PLACE}.flaubert.modeling_flaubert.FlaubertModel",
)
_FORWARD: dict[str, Callable[..., Any]] = {
    f"{_PLACE}.bloom.modeling_bloom.BloomAttention": _bloom,
    f"{_PLACE}.mpt.modeling_mpt.MptAttention": _mpt,
    f"{_PLACE}.falcon.modeling_falcon.FalconAttention": _falcon,
    f"{_PLACE}.gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": _gpt_neox_japanese,
    f"{_PLACE}.gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": _gpt_neo,
    f"{_PLACE}.megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention": _bert,
    f"{_PLACE}.openai.modeling_openai.Attention": _gpt,
    f"{_PLACE}.roformer.modeling_roformer.RoFormerSelfAttention": _roformer,
    f"{_PLACE}.rembert.modeling_rembert.RemBertSelfAttention": _bert,
    f"{_PLACE}.git.modeling_git.GitSelfAttention": _bert,
    f"{_PLACE}.xlm.modeling_xlm.MultiHeadAttention": _xlm,
    f"{_PLACE}.flaubert.modeling_flaubert.MultiHeadAttention": _xlm,
    f"{_PLACE}.xglm.modeling_xglm.XGLMAttention": _xglm,
    f"{_PLACE}.trocr.modeling_trocr.TrOCRAttention": _xglm,
    f"{_PLACE}.mvp.modeling_mvp.MvpAttention": _xglm,
}
_BIASES: dict[str, Callable[[Any, torch.device], torch.Tensor]] = {
    f"{_PLACE}.bloom.modeling_bloom.BloomModel": lambda inner, device: inner.build_alibi_tensor(
        torch.ones(1, _TOKENS, dtype=torch.int64, device=device), inner.num_heads, torch.float32
    ),
    f"{_PLACE}.mpt.modeling_mpt.MptModel": lambda inner, device: inner.build_mpt_alibi_tensor(
        inner.num_heads, _TOKENS, device=device
    ),
}
