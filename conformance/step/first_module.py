"""The first module with another output, and its meaning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from conformance.step.judge import factor_of, judge
from conformance.step.report import Evidence, Finding, ModuleRow
from conformance.step.step_record import table_of
from conformance.step.tokens import BASE, describe

__all__ = ["of_modules", "title_of"]


@dataclass
class _Wrong:
    """Tokens whose numbers differ."""

    rank: np.ndarray
    key: np.ndarray
    all_ranks: np.ndarray
    all_keys: np.ndarray
    factors: dict[int, float]  # by rank, if all its tokens are those of one process times a factor

    def lacks_others(self) -> bool:
        """Whether it is just the tokens that have earlier ones of their document on other ranks."""
        held = set(zip(self.all_ranks.tolist(), self.all_keys.tolist(), strict=True))
        lacking = set()
        for rank, key in sorted(held):
            if key % BASE and ((rank, key - 1) not in held or (rank, key - 1) in lacking):
                lacking.add((rank, key))
        return lacking == set(zip(self.rank.tolist(), self.key.tolist(), strict=True))

    def __str__(self) -> str:
        at = int(np.argmin(self.key))
        return f"first at {describe(int(self.key[at]))}, on rank {self.rank[at]}"


def of_modules(found: Any, dtype: torch.dtype) -> Evidence:
    """Compare the modules' outputs in the order in which the one process computed them."""
    ones = table_of(found.one)
    ranks, noisy = [table_of(each) for each in found.ranks], [table_of(each) for each in found.noisy]

    def calls(key: Any) -> _Calls | None:
        """One call of a module in all processes; None where one of them has not called it."""
        given = found.passes.get(key[0])
        if given is None:
            return None
        mine = [ranks[rank].get((given.forwards[rank], *key[1:])) for rank in given.places.ranks]
        noise = [table.get(key) for table in noisy]
        whole = not any(x is None for x in (*mine, *noise))
        return _Calls(ones[key], mine, noise, given.places, agreed) if whole else None

    evidence, agreed = Evidence(), set[tuple[str, int]]()
    for key, one in ones.items():
        row, call = ModuleRow(one["name"], one["kind"], one["forward"]), calls(key)
        if call is None:
            why = "not every process called it" if one["forward"] in found.passes else "its pass could not be matched"
            evidence.modules.append(replace(row, text=why))
            continue
        if call.places.together([m["out"] for m in call.mine], one["out"]) is None:
            evidence.modules.append(replace(row, text="its rows could not be matched with tokens"))
            continue
        wrong = call.differ("out", dtype)
        if wrong is None:
            evidence.modules.append(replace(row, ok=True))
            agreed.add((one["name"], one["count"]))
            continue
        text = f"{len(wrong.key)} of {len(wrong.all_keys)} tokens differ, {wrong}"
        evidence.modules.append(replace(row, ok=False, text=text))
        if not evidence.first:
            outer = [calls((one["forward"], *each)) for each in one["inside"] if (one["forward"], *each) in ones]
            found_here = _explained(found, call, [each for each in outer if each is not None], wrong, dtype)
            evidence.first, evidence.findings = found_here.first, found_here.findings
    return evidence


@dataclass
class _Calls:
    """One call of a module: in the one process, on the ranks of `places`, and with moved weights; and which calls are
    known to agree, by name and how often before.
    """

    one: Any
    mine: list[Any]
    noise: list[Any]
    places: Any
    agreed: set[tuple[str, int]]

    def differ(self, what: str, dtype: torch.dtype, name: str = "") -> _Wrong | None:
        """The tokens whose output ("out"), or input of a name ("inputs"), differs."""
        one, *others = (each[what][name] if name else each[what] for each in (self.one, *self.mine, *self.noise))
        mine, noise = others[: len(self.mine)], others[len(self.mine) :]
        return None if any(x is None for x in (one, *others)) else _differ(self.places, mine, one, noise, dtype)

    def odd_input(self, dtype: torch.dtype, floating: bool) -> tuple[str, _Wrong] | None:
        """The first input that differs, of numbers or of integers."""
        for name, value in self.one["inputs"].items():
            known = all(name in each["inputs"] for each in (*self.mine, *self.noise))
            if known and value is not None and value.is_floating_point() == floating:
                odd = self.differ("inputs", dtype, name)
                if odd is not None:
                    return name, odd
        return None


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
    return _Wrong(rank[over], key[over], rank, key, _factors(got, exact, noise, rank, over, dtype))


def _factors(got: Any, exact: Any, noise: Any, rank: np.ndarray, over: np.ndarray, dtype: Any) -> dict[int, float]:
    """The factor of each rank with wrong tokens; {} where its tokens are not one factor times those of one process."""
    factors: dict[int, float] = {}
    for number in np.unique(rank[over]).tolist():
        there = torch.from_numpy(rank == number)
        factor = factor_of(got[there], exact[there])
        fits = judge("", got[there].double() / (factor or 1.0), exact[there], [x[there] for x in noise], dtype).ok
        if not fits or not over[rank == number].mean() > 0.5:
            return {}
        factors[number] = factor
    return factors if got.is_floating_point() else {}


def _explained(found: Any, call: _Calls, outer: list[_Calls], wrong: _Wrong, dtype: torch.dtype) -> Evidence:
    """Why a module's output differs: its integers, what comes before it or before a module around it, or itself."""
    integers = call.odd_input(dtype, floating=False)
    if integers is not None:
        name, odd = integers
        said = f"{title_of(call.one)} is given other integers ({name}) than in one process, {odd}"
        named = any(word in f"{call.one['name']} {name}".lower() for word in ("pos", "wpe", "rot"))
        return Evidence([Finding("positions", said)] if named else [], said)
    given = None
    for each in (*outer, call):
        given = each.odd_input(dtype, floating=True)
        if given is not None:
            call, wrong = each, given[1]
            break
    one, where = call.one, title_of(call.one)
    if given is not None:
        around = one["inside"][-1][0] if one["inside"] else ""
        where = f"what comes before {where}" + (f" in {around or 'the model'}" if one["name"] else "")
    said = f"{where}: {len(wrong.key)} of {len(wrong.all_keys)} tokens differ, {wrong}"
    leak = _leak(found, call, given is not None, wrong)
    if leak:
        return Evidence([Finding("leak", f"{where} {leak}")], said)
    if wrong.factors:
        times = ", ".join(f"{factor:.4g} times that of one process on rank {r}" for r, factor in wrong.factors.items())
        return Evidence([Finding("scaled", f"{where} is {times}")], said)
    if not _alone(found, call, given is not None, wrong):
        return Evidence(first=said)
    ever = any(each["look"]["calls"] for each in found.ranks)
    others = ", where other modules do" if ever else ", nor does the model"
    text = f"{where} calls no attention or linear layer of cp_fast{others}"
    return Evidence([Finding("slice", f"{text}: each rank sees its own slice alone")], said)


def _leak(found: Any, call: _Calls, before: bool, wrong: _Wrong) -> str:
    """Whether the ranks keep packed documents apart in a layer where the one process lets them see each other:
    it calls no such layer of cp_fast there, and only documents behind others differ. "" if not.
    """
    if not call.places.packed or wrong.key.min() < BASE:
        return ""
    ranks = [(found.ranks[rank]["look"], record) for rank, record in zip(call.places.ranks, call.mine, strict=True)]
    agreed = call.agreed if before else None
    states = [_states(look, record, agreed) for look, record in ranks]
    if not all(states) or _states(found.one["look"], call.one, agreed):
        return ""
    by = " and ".join(sorted(set().union(*states)))
    apart = f"keeps packed documents apart on the ranks, by {by} of cp_fast, and not in one process"
    windows = set().union(*states) == {"compress_keys"}
    crossed = "windows of tokens are counted over documents" if windows else ""
    return f"{apart}: there {crossed or 'a document begins with what the one before it left'}"


def _states(look: Any, record: Any, agreed: set[tuple[str, int]] | None) -> set[str]:
    """The functions of cp_fast that hand a state on from token to token, of those that a module calls."""
    first, last = _span(look, record, agreed)
    return {each["what"] for each in look["calls"] if first < each["at"] < last} - {"attention"}


def _alone(found: Any, call: _Calls, before: bool, wrong: _Wrong) -> bool:
    """Whether tokens are mixed in a module, or before it, since the last that agrees, and no rank asks the others."""
    ranks = [found.ranks[rank]["look"] for rank in call.places.ranks]
    agreed = call.agreed if before else None
    spans = [(look, _span(look, record, agreed)) for look, record in zip(ranks, call.mine, strict=True)]
    if any(first < each["at"] < last for look, (first, last) in spans for each in look["calls"]):
        return False
    look, (first, last) = found.one["look"], _span(found.one["look"], call.one, agreed)
    if any(first < each["at"] < last for each in look["calls"]):
        return True
    some_right = len(np.unique(wrong.key)) < len(wrong.all_keys)
    mixed = any(first < at < last for look, (first, last) in [*spans, (look, (first, last))] for at in look["mixing"])
    return some_right and (mixed or wrong.lacks_others())


def _span(look: Any, record: Any, agreed: set[tuple[str, int]] | None) -> tuple[int, int]:
    """The moments between which a module ran; or before it, since the last of those that agree ended, or the one
    around it began.

    Args:
        agreed: the calls that agree; None for the module itself.
    """
    if agreed is None:
        return record["start"], record["end"]
    alike = [each for each in look["modules"] if each["forward"] == record["forward"]]
    known = [each for each in alike if (each["name"], each["count"]) in agreed]
    ends = [each["end"] for each in known if each["end"] < record["start"]]
    starts = [each["start"] for each in alike if each["start"] < record["start"] < each["end"]]
    return max([0, *ends, *starts]), record["start"]


def title_of(record: Any) -> str:
    """A call of a module in words."""
    return f"{record['name'] or 'the model'} ({record['kind']})"
