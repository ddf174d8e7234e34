"""Llama 4 scales the queries of its layers without rotary embeddings by their positions, which it counts in a slice.

Its decoder layer is given position_ids, and does not hand them on to its attention. A hook does so, under a name that
the layer does not take. The attention's forward is written out here, with these positions in place of a count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from cp_fast.integrations.hugging_face.module_states import check_forward, give_forward, hook_once, take_forward
from cp_fast.integrations.hugging_face.token_mixers import refuse_caches

__all__ = ["give_positions", "take_positions"]

_ATTENTION = "transformers.models.llama4.modeling_llama4.Llama4TextAttention"
_POSITIONS = "cp_position_ids"


def give_positions(model: nn.Module, attend: Callable[..., tuple[torch.Tensor, Any]]) -> None:
    """Give Llama 4's attention layers with such a scale the positions of slices. Calls without `cp_batch` run their
    own forward.

    Args:
        attend: as transformers' AttentionInterface has it.

    Raises:
        NotImplementedError: one has another forward than its class.
    """
    for where, holder, attention in _scaled(model):
        check_forward(f"{where} ({type(attention).__name__})", attention)
        give_forward(attention, _forward(cast(Any, type(attention)).forward, attend))
        hook_once(holder, _hand_on)


def take_positions(model: nn.Module) -> None:
    """Give the layers their class's forward again."""
    for _, _, attention in _scaled(model):
        take_forward(attention)


def _scaled(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """The attention layers whose queries are scaled, with their names, and the decoder layers that hold them."""
    for where, module in model.named_modules():
        for name, inner in module.named_children():
            found: Any = inner
            kind = f"{type(found).__module__}.{type(found).__qualname__}"
            if kind == _ATTENTION and found.attn_temperature_tuning and not found.use_rope:
                yield f"{where}.{name}", module, found


def _hand_on(_: nn.Module, by_place: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return None if named.get("cp_batch") is None else (by_place, {**named, _POSITIONS: named.get("position_ids")})


def _forward(theirs: Callable[..., Any], attend: Callable[..., tuple[torch.Tensor, Any]]) -> Callable[..., Any]:
    def forward(
        self: Any, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None, **named: Any
    ) -> tuple[torch.Tensor, Any]:
        positions = named.pop(_POSITIONS, None)
        if named.get("cp_batch") is None:
            return theirs(self, hidden_states, position_embeddings, attention_mask, **named)
        refuse_caches("Llama4TextAttention", named)
        if positions is None:
            raise NotImplementedError("Llama4TextAttention is given no position_ids by its layer, and would count them")
        parts = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
        scales = torch.log1p(steps) * self.attn_scale + 1.0  # [b, s/cp]
        q = (q * scales[:, None, :, None]).to(q.dtype)
        dropout = self.attention_dropout if self.training else 0.0
        how: dict[str, Any] = {"dropout": dropout, "scaling": self.scaling}
        out, weights = attend(self, q, k, v, attention_mask, **how, **named)
        return self.o_proj(out.flatten(2)), weights

    return forward
