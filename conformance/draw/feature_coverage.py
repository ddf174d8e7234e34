"""Which features the problems of a run exercised, one by one and in pairs.

Bugs of context parallelism live in the seams between features, so a run is measured by the pairs that occurred in one
problem. A pair that can occur and never did is a hole in the run. Features are those of
`conformance.draw.case_features`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.draw.case_features import CHOICES, Choice, choices_of, why_impossible
from conformance.judge.run_record import Played, Verdict

__all__ = ["STATES", "Coverage", "coverage", "played_cases"]

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
