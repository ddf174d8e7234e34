"""Compare the masks that a model builds of text and images, pair by pair, with the rules that are known here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import nn

from cp_fast.integrations.hugging_face.built_masks import Said
from cp_fast.integrations.hugging_face.image_batches import blocks_of
from cp_fast.integrations.hugging_face.image_models import BothWaysRule
from cp_fast.integrations.hugging_face.slice_probe import Probe

__all__ = ["WINDOW", "MaskProbe"]

WINDOW = 3  # in place of a layer's own, which is wider than all tokens of a trial
_RULES = (None, *(BothWaysRule(*one) for one in product((1, 0), (False, True), (True, False))))


class MaskProbe(Probe):
    """A probe that evaluates the masks that a model builds, pair by pair."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[torch.Tensor] = []
        self.of_layers: list[tuple[Said, int]] = []  # of each call of attention, and the number of its table; -1: none

    def whole_mask(self, mask_function: Callable[..., Any], given: Mapping[str, Any]) -> torch.Tensor:
        sizes = [int(given[name]) for name in ("batch_size", "q_length", "kv_length")]
        device = given.get("device")
        row, query, key = (torch.arange(n, device=device) for n in sizes)
        zero = torch.zeros((), dtype=torch.long, device=device)
        seen = mask_function(row[:, None, None], zero, query[None, :, None], key[None, None, :])
        self.tables.append(torch.as_tensor(seen).expand(sizes).cpu())
        number = float(len(self.tables))
        return torch.full((sizes[0], 1, *sizes[1:]), number, dtype=given.get("dtype", torch.float32), device=device)

    def look_at_mask(self, module: nn.Module, said: Said, mask: Any) -> None:
        self.of_layers.append((said, -1 if mask is None else round(float(mask.flatten()[0])) - 1))

    def rule_of(self, types: torch.Tensor | None, known: BothWaysRule | None) -> BothWaysRule | None:
        """Return the rule that all masks follow; None: they are those of text.

        Args:
            types: the entry of the batch that says which tokens are images; None where there is none.
            known: the rule of modalities that were looked at before, which is tried first.

        Raises:
            NotImplementedError: none is known.
        """
        for rule in (known, *_RULES) if types is not None else (None,):
            layers = [(said, self.tables[table]) for said, table in self.of_layers if table >= 0]
            if all(_agrees(rule, types, said, table) for said, table in layers):
                return rule
        raise NotImplementedError("tokens of images see each other by a mask that cp_fast does not know")


def _agrees(rule: BothWaysRule | None, types: torch.Tensor | None, said: Said, table: torch.Tensor) -> bool:
    """Whether a layer's mask follows a rule. Layers without causal masks see images as they see text."""
    if said.causal:
        return torch.equal(_visible(rule, types, said, table), table)
    sizes = (table.shape[1],) if said.size is None else (WINDOW, WINDOW - 1)  # transformers has both
    at = torch.arange(table.shape[1], device="cpu")
    distance = (at[:, None] - at).abs()
    return any(torch.equal((distance <= size).expand_as(table), table) for size in sizes)


def _visible(rule: BothWaysRule | None, types: torch.Tensor | None, said: Said, table: torch.Tensor) -> torch.Tensor:
    """bool [b, s, s]: which keys a causal layer's queries see by a rule."""
    narrow = said.size is not None or said.silent
    left = min(said.size or WINDOW, WINDOW) - 1 if narrow else table.shape[1]
    at = torch.arange(table.shape[1], device="cpu")
    distance = at[:, None] - at
    seen = ((distance >= 0) & (distance <= left)).expand(table.shape)
    if said.chunk:
        seen = seen & (at[:, None] // said.chunk == at // said.chunk)
    if rule is None or types is None:
        return seen
    block = torch.full(types.shape, -1, device="cpu")
    for number, (row, runs) in enumerate(blocks_of(rule, types, None, None)):
        for first, stop in runs:
            block[row, first:stop] = number
    together = (block[:, :, None] == block[:, None]) & (block >= 0)[:, None]
    return seen | (together & (distance <= left) if rule.windowed else together)
