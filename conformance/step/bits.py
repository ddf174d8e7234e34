"""Which outputs of modules, losses and gradients have the bits of one process, and where bits part first."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from conformance.checks.budgets import same_bytes
from conformance.step.first_module import title_of
from conformance.step.report import Bits
from conformance.step.step_record import table_of
from conformance.step.tokens import describe

__all__ = ["of_bits"]


def of_bits(found: Any) -> Bits:
    """Compare a step that was looked at (`conformance.step.runs.Measured`), in the order of the one process."""
    ones, ranks = table_of(found.one), [table_of(each) for each in found.ranks]
    parts = {key: _parts(found, key, one, ranks) for key, one in ones.items() if key[0] in found.passes}
    known = {key: each for key, each in parts.items() if each is not None and "out" in each}
    left: list[str] = []
    named = set[Any]()  # the calls around those that are left: they differ because of these
    for key, apart in known.items():
        given = next((name for name, where in apart.items() if name != "out" and where), "")
        if not (given or apart["out"]):
            continue
        one = ones[key]
        around = [(one["forward"], *each) for each in one["inside"]]
        outer = around[-1] if around else None  # None: what calls the modules that are in no other
        if not given and key not in named:
            left.append(f"{title_of(one)}, first at {apart['out']}")
        elif given and outer not in named and not _given_others(known.get(outer)):
            where = "" if outer is None else f" in {ones[outer]['name'] or 'the model'}"
            left.append(f"what comes before {title_of(one)}{where}, first at {apart[given]}")
        named.update((*around, key, outer))
    same = sum(not each["out"] for each in known.values())
    grads = [name for name, grad in found.one["grads"].items() if grad is not None]
    everywhere = [found.of_rank("grads", rank) for rank in range(len(found.ranks))]
    alike = [all(_equal(rank.get(name), found.one["grads"][name]) for rank in everywhere) for name in grads]
    return Bits(len(known), same, tuple(left), _of_losses(found), len(grads), sum(alike))


def _parts(found: Any, key: Any, one: Any, ranks: list[Any]) -> dict[str, str] | None:
    """Of a call's inputs and its output, by name: where other bits begin; "" where all are the same."""
    given = found.passes[key[0]]
    mine = [ranks[rank].get((given.forwards[rank], *key[1:])) for rank in given.places.ranks]
    if any(each is None for each in mine):
        return None
    apart: dict[str, str] = {}
    for name, bits in one["bits"].items():
        where = _first_difference(given.places, [each["bits"].get(name) for each in mine], bits)
        if where is not None:
            apart[name] = where
    return apart


def _first_difference(places: Any, mine: list[Any], one: Any) -> str | None:
    """Say where other bits begin. "": all bits are the same. None: nothing tells the tokens."""
    beside = places.together(mine, one)
    if beside is None or not beside[0].numel():
        return None
    got, index, rank, key = beside
    exact = one.flatten(0, one.ndim - got.ndim)[index]
    odd = (got != exact).reshape(len(got), -1).any(1).numpy()
    if not odd.any():
        return ""
    at = int(np.flatnonzero(odd)[np.argmin(key[odd])])
    return f"{describe(int(key[at]))}, on rank {rank[at]}: {int(odd.sum())} of {len(odd)} tokens"


def _given_others(apart: dict[str, str] | None) -> bool:
    return apart is not None and any(where for name, where in apart.items() if name != "out")


def _of_losses(found: Any) -> str:
    """Say whether the losses of tokens have the same bits. The step has returned these losses."""
    for number, one in enumerate(found.one["tokens"] or []):
        given = found.place([(first, number) for first in range(0, len(found.ranks), found.cp_size)], number)
        where = None
        if given is not None and all(number < len(rank["tokens"] or []) for rank in found.ranks):
            kind = {8: torch.int64, 4: torch.int32}.get(one.element_size(), torch.int16)
            mine = [rank["tokens"][number].view(kind) for rank in found.ranks]
            where = _first_difference(given.places, mine, one.view(kind))
        if where is None:
            return "they could not be matched"
        if where:
            return f"other bits, first at {where}"
    return "the same bits" if found.one["tokens"] else ""


def _equal(x: Any, y: Any) -> bool:
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and same_bytes(x, y)
