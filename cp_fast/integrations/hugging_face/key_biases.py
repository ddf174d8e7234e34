"""Doge adds to the scores of a key a number that its value makes, for each head of keys.

Such a bias is one number more of each query and key, of which the others stay as they are:

    q' = [q, 1 / scale]    k' = [k, bias]    scale * q'.k' = scale * q.k + bias

Of a sequence that is longer than its window, Doge hides the keys with the smallest biases. That is refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from cp_fast.integrations.hugging_face.model_call import sequences_of
from cp_fast.integrations.hugging_face.module_states import check_forward, give_forward, take_forward
from cp_fast.integrations.hugging_face.token_mixers import refuse_caches
from cp_fast.integrations.token_batches import CpBatch

__all__ = ["give_biases", "take_biases"]

_ATTENTION = "transformers.models.doge.modeling_doge.DogeAttention"
_MORE = 8  # numbers of queries and keys, zeros but one: kernels want multiples of it


def give_biases(model: nn.Module, attend: Callable[..., tuple[torch.Tensor, Any]]) -> None:
    """Give Doge's attention layers a forward that takes slices. Calls without `cp_batch` run their own.

    Args:
        attend: as transformers' AttentionInterface has it.

    Raises:
        NotImplementedError: one has another forward than its class.
    """
    for where, layer in _biased(model):
        check_forward(f"{where} ({type(layer).__name__})", layer)
        give_forward(layer, _forward(cast(Any, type(layer)).forward, attend))


def take_biases(model: nn.Module) -> None:
    """Give the layers their class's forward again."""
    for _, layer in _biased(model):
        take_forward(layer)


def _biased(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for where, module in model.named_modules():
        if f"{type(module).__module__}.{type(module).__qualname__}" == _ATTENTION:
            yield where, module


def _refuse_hidden_keys(sequences: CpBatch, most: int) -> None:
    lengths = sequences.cu_seqlens
    longest = sequences.longest if lengths is None else int(lengths.diff().max())
    if longest > most:
        raise NotImplementedError(
            f"a sequence has {longest} tokens, and keep_window_size is {most}: Doge hides keys of such a sequence by "
            "the sizes of their biases, which cp_fast does not have over ranks. Give it shorter sequences, or make it "
            "with a configuration whose keep_window_size is larger"
        )


def _forward(theirs: Callable[..., Any], attend: Callable[..., tuple[torch.Tensor, Any]]) -> Callable[..., Any]:
    def forward(
        self: Any, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None, **named: Any
    ) -> tuple[torch.Tensor, Any]:
        if named.get("cp_batch") is None:
            return theirs(self, hidden_states, position_embeddings, attention_mask, **named)
        refuse_caches("DogeAttention", named)
        sequences = sequences_of("DogeAttention", named["cp_batch"])
        if isinstance(sequences, CpBatch):
            _refuse_hidden_keys(sequences, self.keep_window_size)
        parts = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part(hidden_states).unflatten(-1, (-1, self.head_dim)) for part in parts)
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        q, k = importlib.import_module(type(self).__module__).apply_rotary_pos_emb(q, k, *position_embeddings)
        steps = self.dt_proj(v.transpose(1, 2).flatten(2))
        biases = torch.exp(self.A * F.softplus(steps)).transpose(1, 2)  # [b, h_kv, s/cp]
        ones = torch.full_like(q[..., :1], 1 / self.scaling)
        q, k = (F.pad(torch.cat(pair, -1), (0, _MORE - 1)) for pair in ((q, ones), (k, biases[..., None].to(k.dtype))))
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **named)
        return self.o_proj(out.flatten(2)), weights

    return forward
