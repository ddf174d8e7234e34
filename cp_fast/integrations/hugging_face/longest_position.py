"""Rotary embeddings whose frequencies depend on the longest position of a batch: rope_type "dynamic" and "longrope".

transformers reads that position off the position_ids of the call, and a rank has those of a slice. So such an embedding
computes one position more over ranks, the longest of the whole batch, which is cut off again.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

__all__ = ["give_longest", "say_longest"]

_OF_ANY_LENGTH = {"default", "linear", "llama3", "proportional", "yarn"}  # rope_type


def give_longest(model: nn.Module) -> None:
    """Have the model's rotary embeddings take the position that `say_longest` says."""
    found: list[Any] = [module for module in model.modules() if _kinds(module) - _OF_ANY_LENGTH]
    for rotary in found:
        if not hasattr(rotary, "_cp_fast_longest"):
            rotary.register_forward_pre_hook(_append, with_kwargs=True)
            rotary.register_forward_hook(_cut_off)
        rotary._cp_fast_longest = None
    model.__dict__["_cp_fast_rotaries"] = found


def say_longest(model: nn.Module, longest: int | None, device: torch.device | None = None) -> None:
    """Say the longest position of the batch of the next call; None: the call has the whole batch."""
    for rotary in model.__dict__.get("_cp_fast_rotaries", ()):
        rotary._cp_fast_longest = None if longest is None else torch.tensor([longest], device=device)


def _kinds(module: nn.Module) -> set[str]:
    """The rope_type of a rotary embedding, of each kind of layer; none of other modules."""
    kinds: Any = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        kinds = list(kinds.values())
    return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}


def _append(rotary: Any, by_place: tuple[Any, ...], given: dict[str, Any]) -> Any:
    if rotary._cp_fast_longest is None:
        return None
    bound = inspect.signature(rotary.forward).bind(*by_place, **given)
    positions = bound.arguments["position_ids"]  # [b, s/cp], or [axes, b, s/cp]
    last = rotary._cp_fast_longest.to(positions.dtype).expand(*positions.shape[:-1], 1)
    bound.arguments["position_ids"] = torch.cat([positions, last], dim=-1)
    return bound.args, bound.kwargs


def _cut_off(rotary: Any, _: Any, out: Any) -> Any:
    """cos and sin, or one tensor of both: [..., s/cp + 1, d] -> [..., s/cp, d]."""
    if rotary._cp_fast_longest is None:
        return None
    return tuple(x[..., :-1, :] for x in out) if isinstance(out, tuple) else out[..., :-1, :]
