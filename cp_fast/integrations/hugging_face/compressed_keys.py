"""Models whose attention reads compressed keys: DeepSeek-V4.

Its attention layer calls a compressor, which makes keys of windows of tokens, and joins them to the tokens' keys behind
a mask of its own. Here the compressor gives the layer nothing to join. Its keys are kept for the layer's attention,
which is `compressed_attention`. Layers without a compressor have `sparse_attention` over their window, since kernels of
dense attention end below their head dim on GPUs.

The projections, norms and rotations do not change. `prepare` compares the keys that each compressor makes, and those
that its indexer chooses, with transformers' own on a few tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from cp_fast.api.plan import Plan
from cp_fast.integrations.hugging_face.model_call import sequences_of
from cp_fast.integrations.hugging_face.module_states import (
    check_forward,
    drop_state,
    give_forward,
    put_state,
    state_of,
    take_forward,
)
from cp_fast.integrations.hugging_face.slice_probe import Probe
from cp_fast.integrations.hugging_face.token_mixers import refuse_caches
from cp_fast.integrations.token_batches import CpBatch
from cp_fast.layers.compress_keys import compress_keys, entries_alone
from cp_fast.layers.sparse_attention import compressed_attention, select_keys, sparse_attention

__all__ = ["COMPRESSED", "WindowsOfCall", "give_windows_back", "put_windows", "window_layers"]

COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")  # among a configuration's layer_types
_ATTENTION = "DeepseekV4Attention"
_ROTATION = "apply_rotary_pos_emb"


@dataclass
class WindowsOfCall:
    """The state of a layer, its compressor and its indexer during one call.

    Attributes:
        layer: the attention layer.
        rate, entries, indices: what the compressor made: entries [n, d], and the indices of an indexer.
    """

    sequences: CpBatch | Probe
    layer: Any
    rate: int = 0
    entries: torch.Tensor | None = None
    indices: torch.Tensor | None = None

    def plan(self, x: torch.Tensor) -> Plan:
        """The plan of the layer. x: a slice [b, s/cp, ...]."""
        assert isinstance(self.sequences, CpBatch)
        layer, d = self.layer, self.layer.head_dim
        how = {"window_size": (layer.sliding_window - 1, 0), "softmax_type": "learnable"}
        return self.sequences.sparse_plan(x, layer.num_heads, 1, d, d, **how)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s/cp, ...] in the format of the batch."""
        return x.flatten(0, 1) if cast(CpBatch, self.sequences).qkv_format == "thd" else x

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, scaling: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """The layer's attention: query [b, h, s/cp, d], key [b, 1, s/cp, d], which is the value too ->
        [b, s/cp, h, d].
        """
        batch, q, k = cast(CpBatch, self.sequences), query.transpose(1, 2), key.transpose(1, 2)
        how: dict[str, Any] = {"cp": batch.cp, "plan": self.plan(q), "softmax_scale": scaling, "softmax_offset": sinks}
        q, k = self.rows(q), self.rows(k)
        if self.entries is None:
            out = sparse_attention(q, k, k, None, **how)
        else:
            e = self.entries[:, None]
            out = compressed_attention(q, k, k, e, e, self.indices, rate=self.rate, **how)
        return out.unflatten(0, (len(query), -1)) if batch.qkv_format == "thd" else out


def window_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers of a model that may read compressed keys, by name."""
    return {where: module for where, module in model.named_modules() if type(module).__name__ == _ATTENTION}


def put_windows(model: nn.Module) -> None:
    """Give these layers, their compressors and indexers a forward that takes slices. Calls without `cp_batch` run their
    own.

    Raises:
        NotImplementedError: one has another forward than its class, or one that is not known here.
    """
    for where, module in window_layers(model).items():
        compressor = getattr(module, "compressor", None)
        parts = {where: module, f"{where}.compressor": compressor}
        parts[f"{where}.compressor.indexer"] = getattr(compressor, "indexer", None)
        made = _attention, _compressor, _indexer
        for make, (name, part) in zip(made, parts.items(), strict=True):
            if part is not None:
                check_forward(f"{name} ({type(part).__name__})", part)
                give_forward(part, make(f"{name} ({type(part).__name__})", cast(Any, type(part)).forward))


def give_windows_back(model: nn.Module) -> None:
    """Give the layers their classes' forward again."""
    for module in window_layers(model).values():
        compressor = getattr(module, "compressor", None)
        for part in (module, compressor, getattr(compressor, "indexer", None)):
            if part is not None:
                take_forward(part)


# ---- the layers' own functions


def _attention(_: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The attention layer's forward, whose compressor knows the call's sequences."""

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        if named.get("cp_batch") is None:
            return theirs(self, *given, **named)
        name = type(self).__name__
        refuse_caches(name, named)
        call = WindowsOfCall(sequences_of(name, named["cp_batch"]), self)
        compressor = getattr(self, "compressor", None)
        parts = [part for part in (self, compressor, getattr(compressor, "indexer", None)) if part is not None]
        for part in parts:
            put_state(part, call)
        try:
            return theirs(self, *given, **named)
        finally:
            for part in parts:
                drop_state(part, WindowsOfCall)

    return forward


def _compressor(where: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The compressor's forward, which keeps its entries for the layer's attention."""
    rotate = _rotation(where, theirs)

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        *given: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        call, inputs = state_of(self, WindowsOfCall), (hidden_states, q_residual)
        if call is None:
            return theirs(self, *inputs, position_ids, *given, **named)
        if isinstance(call.sequences, Probe):
            _try(where, self, theirs, rotate, *inputs)
            found = hidden_states
        else:
            plan = call.plan(hidden_states)
            call.rate = self.compress_rate
            found = call.entries = _over_ranks(self, rotate, call, plan, hidden_states)
            if getattr(self, "indexer", None) is not None:
                call.indices = self.indexer(*inputs, position_ids, *given, **named)
        return found.new_zeros(len(hidden_states), 1, 0, self.head_dim), None

    return forward


def _indexer(where: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The indexer's forward, which gives its queries, entries and weights to `select_keys`."""
    rotate = _rotation(where, theirs)

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        *given: Any,
        **named: Any,
    ) -> torch.Tensor:
        call = state_of(self, WindowsOfCall)
        if call is None or isinstance(call.sequences, Probe):
            return theirs(self, hidden_states, q_residual, position_ids, *given, **named)
        with torch.no_grad():
            plan, batch = call.plan(hidden_states), call.sequences
            entries = _over_ranks(self, rotate, call, plan, hidden_states)
            q, weights = _index_queries(self, rotate, hidden_states, q_residual, position_ids)
            if q.dtype != entries.dtype or q.dtype == torch.float64:  # transformers' indexer converts to float32 too
                q, entries = q.float(), entries.float()
            how: dict[str, Any] = {"rate": self.compress_rate, "scale": self.scorer.softmax_scale}
            top_k = min(self.index_topk, max(batch.longest // self.compress_rate, 1))
            tensors = call.rows(q), entries, call.rows(weights)
            return select_keys(*tensors, cp=batch.cp, plan=plan, top_k=top_k, **how)

    return forward


def _rotation(where: str, theirs: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    plain = inspect.unwrap(theirs)
    if _ROTATION not in plain.__code__.co_names:
        raise NotImplementedError(f"{where} rotates its keys in a way that cp_fast does not know")
    return plain.__globals__[_ROTATION]


def _over_ranks(
    part: Any, rotate: Callable[..., Any], call: WindowsOfCall, plan: Plan, hidden_states: torch.Tensor
) -> torch.Tensor:
    """This rank's entries [n, d] of a compressor or an indexer."""
    values, gates, bias, overlap = _projected(part, hidden_states)
    how: dict[str, Any] = {"rate": part.compress_rate, "overlap": overlap}
    batch = cast(CpBatch, call.sequences)
    entries = compress_keys(call.rows(values), call.rows(gates), bias, cp=batch.cp, plan=plan, **how)
    return _finished(part, rotate, entries, plan.entries(part.compress_rate).first)


def _projected(part: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Values and gates [b, s, c], the bias [rate, c], and whether windows overlap."""
    values, gates = part.kv_proj(hidden_states), part.gate_proj(hidden_states)
    bias = part.position_bias.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
    return values, gates, bias, values.shape[-1] == 2 * part.head_dim


def _finished(part: Any, rotate: Callable[..., Any], entries: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Entries [n, d] behind their norm, and rotated by the positions of their windows' first tokens."""
    entries = part.kv_norm(entries)[None]
    cos, sin = part.rotary_emb(entries, position_ids=first[None], layer_type=part.rope_layer_type)
    return rotate(entries[:, None], cos, sin)[0, 0]


def _index_queries(
    indexer: Any,
    rotate: Callable[..., Any],
    hidden_states: torch.Tensor,
    q_residual: torch.Tensor,
    position_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The indexer's queries [b, s, h_i, d_i], and weights float32 [b, s, h_i]."""
    cos, sin = indexer.rotary_emb(hidden_states, position_ids=position_ids, layer_type=indexer.rope_layer_type)
    q = indexer.q_b_proj(q_residual).unflatten(-1, (-1, indexer.head_dim))
    q = rotate(q.transpose(1, 2), cos, sin).transpose(1, 2)
    weights = indexer.scorer.weights_proj(hidden_states).float() * indexer.scorer.weights_scaling
    return q, weights


# ---- the trial


def _try(
    where: str,
    compressor: Any,
    theirs: Callable[..., Any],
    rotate: Callable[..., Any],
    hidden_states: torch.Tensor,
    q_residual: torch.Tensor,
) -> None:
    """Compare the entries of the class's own forward with those made here, and what its indexer chooses, on the tokens
    of two windows and one more.

    Raises:
        NotImplementedError: it makes or chooses them in another way.
    """
    if not bool(hidden_states.isfinite().all()):  # a token is spoilt on purpose
        return
    rate = compressor.compress_rate
    count = 2 * rate + 1
    grow = torch.linspace(0.5, 1.5, count, device=hidden_states.device, dtype=hidden_states.dtype)[None, :, None]
    x, residual = (y[:1].repeat(1, -(-count // y.shape[1]), 1)[:, :count] * grow for y in (hidden_states, q_residual))
    positions = torch.arange(count, device=x.device)[None]
    indexer = getattr(compressor, "indexer", None)
    top_k = getattr(indexer, "index_topk", 0)
    if indexer is not None:
        indexer.index_topk = 1
    try:
        keys, shown = theirs(compressor, x, residual, positions, None, 0)
    finally:
        if indexer is not None:
            indexer.index_topk = top_k
    mine = _alone(compressor, rotate, x)
    wanted = torch.arange(2, device=x.device)[None] < (positions[0, :, None] + 1) // rate
    if indexer is not None:
        q, weights = _index_queries(indexer, rotate, x, residual, positions)
        dots = torch.einsum("shd,nd->shn", q[0].float(), _alone(indexer, rotate, x).float())
        scores = (dots.relu() * indexer.scorer.softmax_scale * weights[0][..., None]).sum(1)
        close = (scores[:, 0] - scores[:, 1]).abs() <= 1e-3 * scores.abs().amax()
        best = scores.masked_fill(~wanted, float("-inf")).argmax(-1)
        wanted = wanted & ((torch.arange(2, device=x.device)[None] == best[:, None]) | close[:, None])
    else:
        close = torch.zeros(count, dtype=torch.bool, device=x.device)
    same = shown is not None and torch.equal((shown[0, 0] == 0)[~close], wanted[~close])
    size = float(mine.abs().max())
    if not same or keys.shape[2] != 2 or not torch.allclose(keys[0, 0], mine, rtol=2e-2, atol=2e-2 * size):
        raise NotImplementedError(f"{where} makes or shows its keys in a way that cp_fast does not know")


def _alone(part: Any, rotate: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    """The entries [n, d] of one document [1, s, c] in one process."""
    values, gates, bias, overlap = _projected(part, x)
    entries = entries_alone(values[0], gates[0], bias, part.compress_rate, overlap=overlap)
    return _finished(part, rotate, entries, torch.arange(len(entries), device=x.device) * part.compress_rate)
