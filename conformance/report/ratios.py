"""How much of their error budgets the results used: error / bound, over all problems of the tier that measures it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from math import isfinite, isnan
from typing import Any

from conformance.judge.run_record import Played, RunRecord

__all__ = ["Ratios", "histograms", "ratios"]

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
