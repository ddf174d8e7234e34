"""Positions that a slice of tokens does not have: the longest one of a batch, and such as are far beyond the tokens."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cp_fast.integrations.hugging_face.image_models import Whole
from cp_fast.integrations.hugging_face.module_states import hook_once, known_state, put_state, state_of

__all__ = ["CountFrom", "far_position", "give_longest", "say_longest"]

# ---- the longest position of a batch
#
# Rotary embeddings whose frequencies depend on the longest position of a batch: rope_type "dynamic" and "longrope".
#
# transformers reads that position off the position_ids of the call, and a rank has those of a slice. So such an
# embedding computes one position more over ranks, the longest of the whole batch, which is cut off again.


_OF_ANY_LENGTH = {"default", "linear", "llama3", "proportional", "yarn"}  # rope_type


@dataclass(eq=False)
class _Longest:
    """Of a rotary embedding: the longest position of the call that runs, int64 [1]; None: the call has all of them."""

    position: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Rotaries:
    """Of a model: its rotary embeddings that depend on the longest position."""

    modules: list[nn.Module]


def give_longest(model: nn.Module) -> None:
    """Have the model's rotary embeddings take the position that `say_longest` says."""
    found: list[Any] = [m for m in model.modules() if _kinds(m) - _OF_ANY_LENGTH and state_of(m, Whole) is None]
    for rotary in found:
        hook_once(rotary, _append, _cut_off, named=False)
        put_state(rotary, _Longest())
    put_state(model, _Rotaries(found))


def say_longest(model: nn.Module, longest: int | None, device: torch.device | None = None) -> None:
    """Say the longest position of the batch of the next call; None: the call has the whole batch."""
    known = state_of(model, _Rotaries)
    for rotary in () if known is None else known.modules:
        known_state(rotary, _Longest).position = None if longest is None else torch.tensor([longest], device=device)


def _kinds(module: nn.Module) -> set[str]:
    """The rope_type of a rotary embedding, of each kind of layer; none of other modules."""
    kinds: Any = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        kinds = list(kinds.values())
    return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}


def _append(rotary: Any, by_place: tuple[Any, ...], given: dict[str, Any]) -> Any:
    longest = known_state(rotary, _Longest).position
    if longest is None:
        return None
    bound = inspect.signature(rotary.forward).bind(*by_place, **given)
    positions = bound.arguments["position_ids"]  # [b, s/cp], or [axes, b, s/cp]
    last = longest.to(positions.dtype).expand(*positions.shape[:-1], 1)
    bound.arguments["position_ids"] = torch.cat([positions, last], dim=-1)
    return bound.args, bound.kwargs


def _cut_off(rotary: Any, _: Any, out: Any) -> Any:
    """cos and sin, or one tensor of both: [..., s/cp + 1, d] -> [..., s/cp, d]."""
    if known_state(rotary, _Longest).position is None:
        return None
    return tuple(x[..., :-1, :] for x in out) if isinstance(out, tuple) else out[..., :-1, :]


# ---- far positions
#
# Some models scale queries, or take other frequencies, from some position on. A trial has few tokens, so it numbers
# them from a far position. Models make the numbers of a whole sequence by torch.arange.


_FAR = 2**20
_BEHIND = 8  # positions that a table may have behind those of the configuration: fairseq's begin at 2


class CountFrom(TorchFunctionMode):
    """While it is active, torch.arange(tokens) counts from `first`; `used` says whether anything has called it.

    >>> with CountFrom(1000, tokens=3) as counting:
    ...     torch.arange(3), torch.arange(4)
    (tensor([1000, 1001, 1002]), tensor([0, 1, 2, 3]))
    >>> counting.used
    True
    """

    def __init__(self, first: int, tokens: int) -> None:
        super().__init__()
        self.first, self.tokens, self.used = first, tokens, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.arange and args in ((self.tokens,), (0, self.tokens)):
            self.used = True
            return found + self.first if self.first else found
        return found


def far_position(model: nn.Module, tokens: int) -> int:
    """Return the first of `tokens` positions that are far from 0. The model has all of them: its tables may end. Return
    0 if it has none, or if its frequencies depend on the longest position: those are handled above.
    """
    longest = getattr(cast(Any, model).config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(longest, int) or any(_kinds(module) - _OF_ANY_LENGTH for module in model.modules()):
        return 0
    tables = sum(isinstance(module, nn.Embedding) for module in model.modules()) > 1
    tables = tables or any(x.dim() > 1 for x in model.buffers())
    sizes = {size for weight in model.parameters() for size in weight.shape}
    tables = tables or any(longest <= size <= longest + _BEHIND for size in sizes)
    return max(longest - tokens - _BEHIND, 0) if tables else _FAR
