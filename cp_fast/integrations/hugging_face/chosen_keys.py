"""Models whose attention reads the keys that an indexer chooses: DeepSeek-V3.2, GLM-5 and others.

Their attention layer hands its mask on to an indexer, which scores all pairs of a sequence. The indexer's choice goes
to transformers' AttentionInterface as `indices`. Here the sequences of a call travel in the mask's place. The indexer's
projections do not change, and its queries, keys and weights go to `select_keys`.

Keys and values stay latent, one head for all query heads, and the queries are brought to them:

    q_nope . (W_k c) = (W_k^T q_nope) . c        sum of weights * (W_v c) = W_v (sum of weights * c)

So a token's key is kv_lora_rank + qk_rope_head_dim numbers, in messages too. Where W_k and W_v are no plain weights
(adapters, quantized ones), each head has its own keys, as in one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from cp_fast.api.plan import Plan
from cp_fast.integrations.hugging_face.built_masks import Said, refuse_own_mask
from cp_fast.integrations.hugging_face.model_call import sequences_of
from cp_fast.integrations.hugging_face.module_states import (
    check_forward,
    give_forward,
    known_state,
    put_state,
    take_forward,
)
from cp_fast.integrations.hugging_face.slice_probe import Probe
from cp_fast.integrations.hugging_face.token_mixers import refuse_caches
from cp_fast.integrations.token_batches import CpBatch
from cp_fast.layers.sparse_attention import select_keys, sparse_attention
from cp_ref.batches.tensors import autocast

__all__ = ["INDEXED", "SequencesToChoose", "attend_to_chosen", "choosers", "give_back", "put_selectors"]

INDEXED = "indexed_attention"  # among a configuration's layer_types
_ATTENTION = (
    *("DeepseekV32Attention", "GlmMoeDsaAttention", "AXK2Attention", "HYV4Attention", "HYV4VLAttention"),
    *("Dots3NoteTextAttention", "MistralLarge4TextAttention"),
)
_ROTATED_LAST = ("HYV4Indexer", "HYV4VLIndexer")  # The last numbers of its queries and keys are rotated, not the first.
_ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")  # of an indexer's queries and keys
_TOP = 2  # keys that the trial of an indexer chooses


@dataclass(frozen=True, eq=False)
class SequencesToChoose:
    """The sequences of a call in the place of the mask of a layer that chooses keys.

    Args:
        layer: the attention layer.
        latent: whether its keys stay latent.
    """

    sequences: CpBatch | Probe
    layer: Any
    latent: bool

    def __getitem__(self, _: Any) -> SequencesToChoose:
        """Itself: the indexer is given a part of the mask."""
        return self

    def plan(self, x: torch.Tensor) -> Plan:
        """The plan of the layer. x: a slice [b, s/cp, ...]."""
        assert isinstance(self.sequences, CpBatch)
        layer = self.layer
        d_qk, d_v = layer.qk_head_dim, layer.v_head_dim
        if self.latent:
            d_qk, d_v = layer.kv_lora_rank + layer.qk_rope_head_dim, layer.kv_lora_rank
        heads_kv, kind = 1 if self.latent else layer.num_heads, "learnable" if hasattr(layer, "sinks") else "vanilla"
        return self.sequences.sparse_plan(x, layer.num_heads, heads_kv, d_qk, d_v, softmax_type=kind)


@dataclass(eq=False)
class _Keys:
    """Of an attention layer: whether its keys stay latent in the call that runs."""

    latent: bool = False


def choosers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers of a model that read chosen keys, by name; some take another layer's choice."""
    named = ((where, m) for where, m in model.named_modules() if type(m).__name__ in _ATTENTION)
    return {where: m for where, m in named if getattr(m, "indexer", None) is not None or hasattr(m, "skip_topk")}


def put_selectors(model: nn.Module) -> None:
    """Give these layers and their indexers a forward that takes slices. Calls without `cp_batch` run their own.

    Raises:
        NotImplementedError: one has another forward than its class, or an indexer that is not known here.
    """
    for where, module in choosers(model).items():
        indexer = getattr(module, "indexer", None)  # None: the layer takes the choice of one before it
        for part in (module, indexer):
            if part is not None:
                check_forward(f"{where} ({type(module).__name__})", part)
        kind = cast(Any, type(module))
        give_forward(module, _attention(kind.forward))
        put_state(module, _Keys())
        module.__dict__["expand_kv"] = MethodType(_expanded(kind.expand_kv), module)
        if indexer is not None:
            name = f"{where}.indexer ({type(indexer).__name__})"
            give_forward(indexer, _indexer(name, cast(Any, type(indexer)).forward))


def give_back(model: nn.Module) -> None:
    """Give the layers and their indexers their classes' forward again."""
    for module in choosers(model).values():
        for part in (module, getattr(module, "indexer", None)):
            if part is not None and take_forward(part):
                part.__dict__.pop("expand_kv", None)


def attend_to_chosen(
    chosen: SequencesToChoose,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    scaling: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One layer's attention: query [b, h, s/cp, d], key and value of all heads or latent, indices [b, s/cp, top_k],
    sinks [h] -> [b, s/cp, h, d_v].
    """
    layer, batch = chosen.layer, chosen.sequences
    assert isinstance(batch, CpBatch)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    into_values: torch.Tensor | None = None
    if chosen.latent:
        of_heads = layer.kv_b_proj.weight.unflatten(0, (layer.num_heads, -1))
        into_keys, into_values = of_heads.split([layer.qk_nope_head_dim, layer.v_head_dim], 1)
        plain, rotated = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
        q = torch.cat([torch.einsum("bshd,hdc->bshc", plain, into_keys.to(plain.dtype)), rotated], -1)
        k = autocast(k)
    plan = chosen.plan(q)
    q, k, v, indices = (x.flatten(0, 1) if batch.qkv_format == "thd" else x for x in (q, k, v, indices))
    if chosen.latent:
        v = k[..., : layer.kv_lora_rank]  # cut last: only then their gradients travel as one
    out = sparse_attention(q, k, v, indices, cp=batch.cp, plan=plan, softmax_scale=scaling, softmax_offset=sinks)
    out = out.unflatten(0, (len(query), -1)) if batch.qkv_format == "thd" else out
    return out if into_values is None else torch.einsum("bshc,hdc->bshd", out, into_values.to(out.dtype))


def _is_latent(layer: Any) -> bool:
    """Whether a plain weight expands the layer's keys, so that they can stay latent."""
    up = layer.kv_b_proj
    plain = type(up) is nn.Linear and up.bias is None and type(up.weight) is nn.Parameter and up.weight.ndim == 2
    return plain and not up._forward_hooks and not up._forward_pre_hooks


# ---- the layers' own functions


def _attention(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The attention layer's forward, in which the call's sequences are the mask."""

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        if named.get("cp_batch") is None:
            return theirs(self, *given, **named)
        name = type(self).__name__
        if given:
            raise NotImplementedError(f"{name} is given {len(given)} arguments by place; cp_fast knows them by name")
        refuse_caches(name, named)
        sequences, mask = sequences_of(name, named["cp_batch"]), named.get("attention_mask")
        if isinstance(sequences, Probe):
            sequences.look_at_mask(self, Said(True, None), mask)
        elif mask is not None:
            refuse_own_mask(name, mask)
        latent = isinstance(sequences, CpBatch) and _is_latent(self)
        keys = known_state(self, _Keys)
        keys.latent = latent
        try:
            return theirs(self, **{**named, "attention_mask": SequencesToChoose(sequences, self, latent)})
        finally:
            keys.latent = False

    return forward


def _expanded(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`expand_kv`: keys and values of all heads, or the latent ones."""

    def expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not known_state(self, _Keys).latent:
            return theirs(self, kv_nope, k_rot)
        key = torch.cat([kv_nope, k_rot], -1)
        return key, key[..., : kv_nope.shape[-1]]

    return expand_kv


def _indexer(where: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The indexer's forward, which gives its queries, keys and weights to `select_keys`."""
    rotations = [name for name in _ROTATIONS if name in inspect.unwrap(theirs).__code__.co_names]
    if len(rotations) != 1:
        raise NotImplementedError(f"{where} rotates its keys in a way that cp_fast does not know")
    rotate = inspect.unwrap(theirs).__globals__[rotations[0]]
    names = [*inspect.signature(theirs).parameters][1:]

    @torch.no_grad()
    def forward(self: Any, *by_place: Any, **named: Any) -> torch.Tensor:
        given = dict(zip(names, by_place, strict=False)) | named
        chosen = given["attention_mask"]
        if not isinstance(chosen, SequencesToChoose):
            return theirs(self, **given)
        batch, hidden_states = chosen.sequences, given["hidden_states"]
        q, k, weights = _projected(self, rotate, given)
        if isinstance(batch, Probe):
            _try(where, self, lambda mask: theirs(self, **given | {"attention_mask": mask}), q, k, weights)
            return torch.zeros(*hidden_states.shape[:2], 1, dtype=torch.int32, device=hidden_states.device)
        plan = chosen.plan(hidden_states)
        q, k, weights = (x.flatten(0, 1) if batch.qkv_format == "thd" else x for x in (q, k, weights))
        top_k = min(self.index_topk, max(batch.longest, 1))
        found = select_keys(q, k, weights, cp=batch.cp, plan=plan, top_k=top_k, scale=self.softmax_scale)
        return found.unflatten(0, (len(hidden_states), -1)) if batch.qkv_format == "thd" else found

    return forward


def _projected(
    indexer: Any, rotate: Callable[..., Any], given: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The indexer's queries [b, s, h_i, d_i], keys [b, s, d_i] and weights float32 [b, s, h_i]. In half precision they
    are those that transformers' indexer converts to float32. given: the arguments of its call.
    """
    hidden_states = given["hidden_states"]
    resid = given["q_resid"] if "q_resid" in given else indexer.q_input_norm(hidden_states)
    q = indexer.wq_b(resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    if hasattr(indexer, "softmax_scaling"):
        q = indexer.softmax_scaling(q, given["position_ids"], head_dim_first=False)
    k = indexer.k_norm(indexer.wk(hidden_states).to(indexer.k_norm.weight.dtype)).to(hidden_states.dtype)[:, :, None]
    sizes = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    turned = int(type(indexer).__name__ in _ROTATED_LAST)
    sizes = sizes[::-1] if turned else sizes
    parts_q, parts_k = ([*x.split(sizes, -1)] for x in (q, k))
    if getattr(indexer, "use_rope", True):
        angles = given["position_embeddings"]
        parts_q[turned], parts_k[turned] = rotate(parts_q[turned], parts_k[turned], *angles, unsqueeze_dim=2)
    q, k = torch.cat(parts_q, -1), torch.cat(parts_k, -1)[:, :, 0]
    if q.dtype != k.dtype or q.dtype == torch.float64:
        q, k = q.float(), k.float()
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    return q, k, weights * indexer.n_heads**-0.5


def _try(
    where: str,
    indexer: Any,
    theirs: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Compare the keys that the class's own forward chooses among a few tokens with those of the scores here.

    Raises:
        NotImplementedError: it scores in another way.
    """
    if not bool(q.isfinite().all()):  # a token is spoilt on purpose
        return
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()[None]
    dots = torch.einsum("bshd,btd->bsht", q.float(), k.float()) * indexer.softmax_scale
    scores = torch.einsum("bsht,bsh->bst", dots.relu(), weights).masked_fill(~mask, float("-inf"))
    top_k = indexer.index_topk
    indexer.index_topk = _TOP
    try:
        chosen = theirs(mask)
    finally:
        indexer.index_topk = top_k
    best, found = (
        scores.topk(min(_TOP, scores.shape[-1])).values,
        scores.gather(-1, chosen.long()).sort(descending=True).values,
    )
    if best.shape != found.shape or not torch.allclose(best, found, rtol=1e-3, atol=1e-3 * float(dots.abs().max())):
        raise NotImplementedError(f"{where} scores its keys in a way that cp_fast does not know")
