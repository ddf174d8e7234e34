"""How much of their error budgets the results used: error / bound, over all problems of the tier that measures it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

from conformance.record import Played, RunRecord

__all__ = ["BINS", "MOST", "Ratios", "ratios"]

MOST, BINS = 1.5, 30  # the histogram ends at 1.5 bounds; what is beyond is in its last bin
_ORDER = ("out", "lse", "dq", "dk", "dv", "d_offset", "max_logit")


@dataclass(frozen=True)
class Ratios:
    """One result's ratios of one measure, sorted; `worst` is the problem of the last. Ratios that are no number come
    last.
    """

    name: str
    values: tuple[float, ...]
    worst: Played

    @property
    def result(self) -> str:
        """Such as "dq"."""
        return self.name.rpartition(" ")[0] or self.name

    @property
    def measure(self) -> str:
        """ "max" or "mean"."""
        return self.name.rpartition(" ")[2]

    @property
    def beyond(self) -> int:
        """How many exceed their bound."""
        return sum(not value <= 1.0 for value in self.values)

    def quantile(self, share: float) -> float:
        """The ratio that this share of the problems does not exceed."""
        return self.values[min(len(self.values) - 1, int(share * len(self.values)))]

    @property
    def histogram(self) -> Sequence[int]:
        """How many are in each of `BINS` equal bins (a, b] of [0, MOST]; larger ones, and NaN, in the last."""
        bins = [0] * BINS
        for value in self.values:
            bins[min(BINS - 1, max(0, ceil(value / MOST * BINS) - 1)) if isfinite(value) else BINS - 1] += 1
        return bins

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
    found: dict[str, list[tuple[float, int]]] = {}
    for n, played in enumerate(record.played):
        for name, value in played.ratios.items():
            found.setdefault(name, []).append((float(value), n))
    return tuple(_ratios(record, name, found[name]) for name in sorted(found, key=_place))


def _ratios(record: RunRecord, name: str, found: list[tuple[float, int]]) -> Ratios:
    found = sorted(found, key=lambda pair: (pair[0] != pair[0], pair[0], -pair[1]))
    return Ratios(name, tuple(value for value, _ in found), record.played[found[-1][1]])


def _place(name: str) -> tuple[int, str]:
    result = name.rpartition(" ")[0]
    return (_ORDER.index(result) if result in _ORDER else len(_ORDER)), name
