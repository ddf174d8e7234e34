"""Which features the problems of a run exercised, one by one and in pairs.

Bugs of context parallelism live in the seams between features, so a run is measured by the pairs that occurred in one
problem. A pair that can occur and never did is a hole in the run. Features are those of
`conformance.problems.features`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from io import StringIO
from math import isfinite, isnan
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.problems.features import CHOICES, Choice, choices_of, why_impossible
from conformance.record import FAILING, Played, RunRecord, Verdict
from cp_ref.schedules.words import CP_COMM_TYPES, MASKS, QKV_FORMATS

__all__ = [
    "COLUMNS",
    "STATES",
    "SYMBOLS",
    "Cell",
    "Coverage",
    "Panel",
    "Ratios",
    "counted",
    "coverage",
    "histograms",
    "matrix",
    "played_cases",
    "ratios",
    "worst",
]

STATES: tuple[str, ...] = ("played", "refused", "never", "impossible")
_INDEX = {choice: n for n, choice in enumerate(CHOICES)}


def played_cases(played: Played) -> tuple[tuple[Case, Verdict], ...]:
    """The cases that were played, and the verdict on each; empty if there are no cases (helpers, malformed calls)."""
    if played.text.startswith("Case("):
        return ((_parsed(played.text), played.verdict),)
    return tuple((_parsed(text), verdict) for text, verdict in played.cases)


_parsed = lru_cache(maxsize=1 << 14)(Case.parse)  # coverage, matrix and list of failures all ask


@dataclass(frozen=True)
class Coverage:
    """How many problems had each pair of `CHOICES`: `played` those that ran, `refused` those that were not supported.

    Both are symmetric counts [choice, choice], the diagonal of each the number of problems with the single choice.
    """

    problems: int
    refusals: int
    played: np.ndarray
    refused: np.ndarray

    def count(self, a: Choice, b: Choice) -> int:
        """How many problems ran that had both."""
        return int(self.played[_INDEX[a], _INDEX[b]])

    def state(self, a: Choice, b: Choice) -> str:
        """The state of a pair: "played", "refused" (whenever it came), "never" or "impossible"."""
        if self.count(a, b):
            return "played"
        if self.refused[_INDEX[a], _INDEX[b]]:
            return "refused"
        return "impossible" if why_impossible(a, b) else "never"

    @cached_property
    def pairs(self) -> dict[tuple[Choice, Choice], str]:
        """The state of every pair of features of different axes."""
        found = ((a, b) for n, a in enumerate(CHOICES) for b in CHOICES[n + 1 :] if a.axis != b.axis)
        return {(a, b): self.state(a, b) for a, b in found}

    @property
    def totals(self) -> dict[str, int]:
        """How many pairs have each state."""
        counts = Counter(self.pairs.values())
        return {state: counts[state] for state in STATES}

    @property
    def never(self) -> list[tuple[Choice, Choice]]:
        """The possible pairs that no problem had."""
        return [pair for pair, state in self.pairs.items() if state == "never"]

    def missed(self, most: int) -> list[tuple[Choice, Choice, float]]:
        """The possible pairs that never came, the most surprising first: how many problems would have had both, had
        their features been drawn independently.
        """
        expected = [(a, b, self.count(a, a) * self.count(b, b) / max(1, self.problems)) for a, b in self.never]
        return sorted(expected, key=lambda pair: -pair[2])[:most]

    def to_json(self) -> dict[str, Any]:
        """Counts by name; of the pairs only those that did not run, and why."""
        return {
            "problems": self.problems,
            "refused problems": self.refusals,
            "pairs": self.totals,
            "choices": {str(c): self.count(c, c) for c in CHOICES},
            "pairs that did not run": [
                [str(a), str(b), state, *([why_impossible(a, b)] if state == "impossible" else [])]
                for (a, b), state in self.pairs.items()
                if state != "played"
            ],
        }


def coverage(played: Iterable[Played]) -> Coverage:
    """Count the features of every problem that has a case. Problems that shrinking found are left out: they were not
    drawn.

    Raises:
        ValueError: a text that begins like a case and is none.
    """
    ran, refused = [], []
    for p in played:
        for case, verdict in () if p.shrunk else played_cases(p):
            row = np.zeros(len(CHOICES), dtype=np.int64)
            row[[_INDEX[choice] for choice in choices_of(case)]] = 1
            (refused if verdict in ("unsupported", "missing") else ran).append(row)
    both = [np.array(rows, dtype=np.int64).reshape(len(rows), len(CHOICES)) for rows in (ran, refused)]
    return Coverage(len(ran), len(refused), *(rows.T @ rows for rows in both))


# ---- the matrix
#
# The matrix: schedule x format x mask, once over all problems and once for each feature.


COLUMNS: tuple[tuple[str, str], ...] = tuple((comm, fmt) for comm in CP_COMM_TYPES for fmt in QKV_FORMATS)

SYMBOLS: dict[str, str] = {  # A cell shows the first of its verdicts in this order.
    "wrong": "\u2715",
    "crashed": "!",
    "hung": "!",
    "out of memory": "!",
    "known": "\u25c6",
    "right": "\u2713",
    "unsupported": "\u2013",
    "missing": "\u25cb",
}


def worst(counts: Mapping[str, int]) -> str:
    """The verdict that a cell with these counts shows; empty without problems.

    >>> worst({"right": 8, "unsupported": 1}), worst({"right": 8, "hung": 1}), worst({})
    ('right', 'hung', '')
    """
    return next((verdict for verdict in SYMBOLS if counts.get(verdict)), "")


def counted(counts: Mapping[str, int]) -> str:
    """The counts in words.

    >>> counted({"right": 2, "wrong": 1}), counted({})
    ('1 wrong, 2 right', 'not exercised')
    """
    return ", ".join(f"{counts[v]:,} {v}" for v in SYMBOLS if counts.get(v)) or "not exercised"


@dataclass
class Cell:
    """The verdicts of the cases that have one schedule, format and mask; the first failing problem's number."""

    counts: Counter[str] = field(default_factory=Counter)
    failing: int | None = None


@dataclass
class Panel:
    """The cells of the problems that have one feature; with `choice` None those of all problems."""

    choice: Choice | None
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)  # (schedule, format, mask) -> cell

    @property
    def rows(self) -> Iterable[tuple[str, list[Cell]]]:
        """(mask, its cells in the order of `COLUMNS`), from top to bottom."""
        return ((mask, [self.cells.get((*column, mask), Cell()) for column in COLUMNS]) for mask in MASKS)

    @property
    def counts(self) -> Counter[str]:
        """Over all cells."""
        return sum((cell.counts for cell in self.cells.values()), Counter[str]())

    def to_json(self) -> dict[str, Any]:
        """Only the cells that were exercised."""
        return {
            "feature": str(self.choice or ""),
            "cells": {"/".join(key): dict(cell.counts) for key, cell in self.cells.items()},
        }


def matrix(record: RunRecord, numbers: Mapping[str, int]) -> tuple[Panel, ...]:
    """All problems first, then every feature. Problems without a case are not here.

    Args:
        numbers: text -> number of the failing problems.
    """
    everything = Panel(None)
    panels = {choice: Panel(choice) for choice in CHOICES if choice.axis not in ("schedule", "format", "mask")}
    for played in record.drawn:
        for case, verdict in played_cases(played):
            p = case.problem
            number = numbers.get(played.text) if verdict in FAILING else None
            for panel in (everything, *(panels[c] for c in choices_of(case) if c in panels)):
                cell = panel.cells.setdefault((p.cp_comm_type, p.qkv_format, p.attn_mask_type), Cell())
                cell.counts[verdict] += 1
                cell.failing = min((n for n in (cell.failing, number) if n is not None), default=None)
    return (everything, *panels.values())


# ---- error budgets
#
# How much of their error budgets the results used: error / bound, over all problems of the tier that measures it.


_ORDER = ("out", "lse", "dq", "dk", "dv", "d_offset", "max_logit")
_MOST = 1.5  # bounds; larger ratios, and NaN, are in the last bin of the histogram


@dataclass(frozen=True)
class Ratios:
    """One result's ratios of one measure, such as "dq max", sorted with NaN last; `worst` is the last one's problem."""

    name: str
    values: tuple[float, ...]
    worst: Played

    @property
    def beyond(self) -> int:
        """How many exceed their bound."""
        return sum(not value <= 1.0 for value in self.values)

    def quantile(self, share: float) -> float:
        """The ratio that this share of the problems does not exceed."""
        return self.values[min(len(self.values) - 1, int(share * len(self.values)))]

    def to_json(self) -> dict[str, Any]:
        """The numbers that the page shows."""
        return {
            "name": self.name,
            "problems": len(self.values),
            "beyond the bound": self.beyond,
            "median": self.quantile(0.5),
            "99 %": self.quantile(0.99),
            "worst": self.values[-1],
            "worst problem": self.worst.text,
        }


def ratios(record: RunRecord) -> tuple[Ratios, ...]:
    """By result, and max before mean."""
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for n, played in enumerate(record.drawn):
        for name, value in played.ratios.items():
            found[name].append((float(value), n))
    for pairs in found.values():
        pairs.sort(key=lambda pair: (isnan(pair[0]), pair[0], -pair[1]))
    worst = {name: record.drawn[pairs[-1][1]] for name, pairs in found.items()}
    return tuple(Ratios(name, tuple(v for v, _ in found[name]), worst[name]) for name in sorted(found, key=_place))


def _place(name: str) -> tuple[int, str]:
    result = name.rpartition(" ")[0]
    return (_ORDER.index(result) if result in _ORDER else len(_ORDER)), name


def histograms(found: Sequence[Ratios]) -> str:
    """All ratios from 0 to 1.5 bounds as one SVG; empty without matplotlib, or without ratios."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    if not found:
        return ""
    rows, file = -(-len(found) // 4), StringIO()
    with rc_context({"svg.hashsalt": "", "svg.fonttype": "none"}):  # the same bytes every time
        figure = Figure((12, 1.8 * rows), layout="constrained")
        for ratio, axes in zip(found, figure.subplots(rows, 4, squeeze=False).flat, strict=False):
            values = [min(v, _MOST) if isfinite(v) else _MOST for v in ratio.values]
            axes.hist(values, bins=30, range=(0, _MOST))
            axes.axvline(1.0, color="red")
            axes.set_title(ratio.name, fontsize=9, parse_math=False)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue().partition("<svg")[1] + file.getvalue().partition("<svg")[2]
