"""The first module with another output, and its meaning."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from conformance.step.evidence.token_places import describe
from conformance.step.judge import judge
from conformance.step.report import Finding, ModuleRow

__all__ = ["ModuleEvidence", "of_modules"]


@dataclass
class ModuleEvidence:
    """The first difference in the forward pass, and its cause if that is plain; and whether each module agrees."""

    first: str = ""
    finding: Finding | None = None
    modules: list[ModuleRow] = field(default_factory=list)


@dataclass
class _Wrong:
    """Tokens whose numbers differ."""

    rank: np.ndarray
    key: np.ndarray
    all_keys: np.ndarray

    def __str__(self) -> str:
        at = int(np.argmin(self.key))
        return f"first at {describe(int(self.key[at]))}, on rank {self.rank[at]}"


def of_modules(found: Any, dtype: torch.dtype) -> ModuleEvidence:
    """Compare the modules' outputs in the order in which the one process computed them."""
    tables = [_table(each) for each in (*found.ranks, *found.noisy)]
    ranks, noisy = tables[: len(found.ranks)], tables[len(found.ranks) :]
    evidence = ModuleEvidence()
    for key, one in _table(found.one).items():
        mine, noise = [table.get(key) for table in ranks], [table.get(key) for table in noisy]
        row = ModuleRow(one["name"], one["kind"], one["forward"])
        places = found.places(one["forward"])
        if any(x is None for x in (*mine, *noise)):
            evidence.modules.append(replace(row, text="not every process called it"))
            continue
        outs = [m["out"] for m in mine]  # type: ignore[index]
        if places is None or places.together(outs, one["out"]) is None:
            evidence.modules.append(replace(row, text="its rows could not be matched with tokens"))
            continue
        wrong = _differ(places, outs, one["out"], [n["out"] for n in noise], dtype)  # type: ignore[index]
        if wrong is None:
            evidence.modules.append(replace(row, ok=True))
            continue
        text = f"{len(wrong.key)} of {len(wrong.all_keys)} tokens differ, {wrong}"
        evidence.modules.append(replace(row, ok=False, text=text))
        if not evidence.first:
            found_here = _explained(found, one, mine, noise, places, wrong, dtype)
            evidence.first, evidence.finding = found_here.first, found_here.finding
    return evidence


def _table(each: Any) -> dict[Any, Any]:
    """Records by (forward pass, name, how often before in it)."""
    found: dict[Any, Any] = {}
    for record in each["look"]["modules"]:
        count = 0
        while (record["forward"], record["name"], count) in found:
            count += 1
        found[record["forward"], record["name"], count] = record
    return found


def _differ(places: Any, mine: list[Any], one: Any, noise: list[Any], dtype: torch.dtype) -> _Wrong | None:
    beside = places.together(mine, one)
    if beside is None or not beside[0].numel():
        return None
    got, index, rank, key = beside
    lead = one.ndim - (got.ndim - 1)
    exact, *noise = (x.flatten(0, lead - 1)[index] for x in (one, *noise))
    row = judge("", got, exact, noise, dtype)
    if row.ok:
        return None
    error = (got.double() - exact.double()).abs().nan_to_num(torch.inf).reshape(len(got), -1).amax(1)
    over = (error > row.max_bound).numpy()
    over = over if over.any() else (error >= error.max()).numpy()
    return _Wrong(rank[over], key[over], key)


def _explained(
    found: Any, one: Any, mine: list[Any], noise: list[Any], places: Any, wrong: _Wrong, dtype: torch.dtype
) -> ModuleEvidence:
    agree = True
    for name, value in one["inputs"].items():
        parts, varied = [m["inputs"].get(name) for m in mine], [n["inputs"].get(name) for n in noise]
        if value is None or any(x is None for x in (*parts, *varied)):
            continue
        odd = _differ(places, parts, value, varied, dtype)
        if odd is not None and not value.is_floating_point():
            said = f"{_title(one)} is given other integers ({name}) than in one process, {odd}"
            named = any(word in f"{one['name']} {name}".lower() for word in ("pos", "wpe", "rot"))
            return ModuleEvidence(said, Finding("positions", said) if named else None)
        agree = agree and odd is None
    scope = one["name"] if agree else (one["inside"][-1] if one["inside"] else one["name"])
    where = _title(one) if agree else f"what comes before {_title(one)} in {scope or 'the model'}"
    said = f"{where}: {len(wrong.key)} of {len(wrong.all_keys)} tokens differ, {wrong}"
    calls = [each["look"]["calls"] for each in found.ranks]
    inside = any(scope in (call["inside"] if agree else call["inside"][-1:]) for c in calls for call in c)
    some_right = len(np.unique(wrong.key)) < len(wrong.all_keys)
    if inside or not some_right:
        return ModuleEvidence(said)
    ever = any(calls)
    others = ", where other modules do" if ever else ", nor does the model"
    text = f"{where} calls no attention or linear layer of cp_fast{others}"
    return ModuleEvidence(said, Finding("slice", f"{text}: each rank sees its own slice alone"))


def _title(record: Any) -> str:
    return f"{record['name'] or 'the model'} ({record['kind']})"
