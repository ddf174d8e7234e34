"""From a record to the page's data, and from the data to the page."""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from conformance.coverage import Coverage, coverage
from conformance.features import CHOICES
from conformance.record import FAILING, LEVELS, VERDICTS, Played, RunRecord
from conformance.report.failures import Failure, Refusal, failures, refusals
from conformance.report.matrix import COLUMNS, GROUPS, Panel, matrix
from conformance.report.pictures import LEVELS as SHADES
from conformance.report.pictures import coverage_picture, histogram, mask_picture, masks_differ
from conformance.report.ratios import Ratios, ratios
from conformance.report.states import STATES, counted

__all__ = ["Summary", "html", "summary"]

_IN_FULL, _IN_BRIEF, _REASONS = 24, 300, 150  # of the failing problems, and of the reasons, on the page


@dataclass(frozen=True)
class Summary:
    """Everything that the page shows, computed once."""

    record: RunRecord
    panels: tuple[Panel, ...]
    failures: tuple[Failure, ...]
    refusals: tuple[Refusal, ...]
    ratios: tuple[Ratios, ...]
    coverage: Coverage

    @property
    def counts(self) -> Counter[str]:
        """Over all levels and tiers."""
        return Counter(p.verdict for p in self.drawn)

    @property
    def drawn(self) -> tuple[Played, ...]:
        """The problems that count: all played problems without those found by shrinking."""
        return tuple(p for p in self.record.played if not p.shrunk) or self.record.played

    @property
    def failed(self) -> int:
        """How many plays failed, known failures left out."""
        return sum(self.counts[v] for v in FAILING)

    @property
    def by_level(self) -> dict[str, Counter[str]]:
        """The verdicts of each level."""
        return {level: Counter(p.verdict for p in self.drawn if p.level == level) for level in LEVELS}

    @property
    def by_tier(self) -> dict[str, tuple[Counter[str], float]]:
        """The verdicts of each tier, and its seconds; in the order of the run."""
        found: dict[str, tuple[Counter[str], float]] = {}
        for p in self.drawn:
            counts, seconds = found.get(p.tier, (Counter(), 0.0))
            counts[p.verdict] += 1
            found[p.tier] = counts, seconds + p.seconds
        return found

    def to_json(self) -> dict[str, Any]:
        """For programs: the same numbers as on the page."""
        return {
            "counts": {v: self.counts[v] for v in VERDICTS},
            "levels": {level: dict(counts) for level, counts in self.by_level.items()},
            "tiers": {tier: dict(counts) | {"seconds": s} for tier, (counts, s) in self.by_tier.items()},
            "failures": [
                {"text": f.text, "tiers": [p.tier for p in f.played], "commands": f.commands} for f in self.failures
            ],
            "refusals": [vars(r) for r in self.refusals],
            "ratios": [r.to_json() for r in self.ratios],
            "coverage": self.coverage.to_json(),
            "matrix": [panel.to_json() for panel in self.panels if panel.cells],
        }


def summary(record: RunRecord) -> Summary:
    """Count, sort and group."""
    failing = failures(record)
    return Summary(
        record=record,
        panels=matrix(record, {f.text: f.number for f in failing}),
        failures=failing,
        refusals=refusals(record),
        ratios=ratios(record),
        coverage=coverage(record.played),
    )


def html(found: Summary) -> str:
    """The page: one text with its style and script inside, which asks nobody for anything."""
    environment = Environment(
        loader=PackageLoader("conformance.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"counted": counted, "number": "{:,}".format, "ratio": _ratio}
    loader = environment.loader
    assert loader is not None
    style, script = (loader.get_source(environment, name)[0] for name in ("style.css", "script.js"))
    shown = [panel for panel in found.panels[1:] if panel.cells]
    return environment.get_template("report.html").render(
        found=found,
        meta={"impl": "", "command": "", "notes": ()} | found.record.meta,
        groups={
            name: panels for name, axes in GROUPS.items() if (panels := [p for p in shown if p.choice.axis in axes])
        },
        absent=[str(panel.choice) for panel in found.panels[1:] if not panel.cells],
        columns=COLUMNS,
        states=STATES,
        in_full=found.failures[:_IN_FULL],
        in_brief=found.failures[_IN_FULL : _IN_FULL + _IN_BRIEF],
        beyond=max(0, len(found.failures) - _IN_FULL - _IN_BRIEF),
        reasons=found.refusals[:_REASONS],
        more_reasons=max(0, len(found.refusals) - _REASONS),
        shades=SHADES,
        style=style,
        script=script,
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
        pair_counts=_pair_counts(found.coverage),
        pictures={
            "mask": mask_picture,
            "differ": masks_differ,
            "histogram": histogram,
            "pairs": coverage_picture(found.coverage),
        },
    )


def _ratio(value: float) -> str:
    """Three digits; NaN and infinity in words."""
    if value != value:
        return "NaN"
    return "\u221e" if value == float("inf") else f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"


def _pair_counts(coverage: Coverage) -> str:
    """The triangle of counts, for the line under the picture: a count, or a letter for refused, never, impossible."""
    letters = {"refused": "r", "never": "n", "impossible": "i"}
    rows = []
    for i, a in enumerate(CHOICES):
        states = [(b, coverage.state(a, b) if a.axis != b.axis else "impossible") for b in CHOICES[:i]]
        rows.append([coverage.count(a, b) if s == "played" else letters[s] for b, s in states])
    return json.dumps({"names": [str(c) for c in CHOICES], "counts": rows}, separators=(",", ":"))
