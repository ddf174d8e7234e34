"""From a record to the page's data, and from the data to the page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from conformance.draw.case_features import Choice
from conformance.draw.feature_coverage import Coverage, coverage
from conformance.judge.run_record import FAILING, LEVELS, VERDICTS, Played, RunRecord
from conformance.report.failures import Failure, Refusal, Separating, failures, refusals, separating
from conformance.report.matrix import COLUMNS, SYMBOLS, Panel, counted, matrix, worst
from conformance.report.ratios import Ratios, histograms, ratios
from conformance.step.report import StepRecord, ranks_in_words

__all__ = ["Summary", "html", "step_html", "summary"]


@dataclass(frozen=True)
class Summary:
    """Everything that the page shows, computed once."""

    record: RunRecord
    panels: tuple[Panel, ...]
    failures: tuple[Failure, ...]
    refusals: tuple[Refusal, ...]
    ratios: tuple[Ratios, ...]
    coverage: Coverage
    separating: tuple[Separating, ...]

    @property
    def drawn(self) -> tuple[Played, ...]:
        """The problems that count."""
        return self.record.drawn

    @property
    def counts(self) -> Counter[str]:
        """Over all levels and tiers."""
        return Counter(p.verdict for p in self.drawn)

    @property
    def failed(self) -> int:
        """How many plays failed, known failures left out."""
        return sum(self.counts[v] for v in FAILING)

    def by(self, what: str) -> dict[str, tuple[Counter[str], float]]:
        """The verdicts of each "level" or each "tier", and its seconds; tiers in the order of the run."""
        found = {level: (Counter[str](), 0.0) for level in LEVELS if what == "level"}
        for p in self.drawn:
            counts, seconds = found.get(name := getattr(p, what), (Counter[str](), 0.0))
            counts[p.verdict] += 1
            found[name] = counts, seconds + p.seconds
        return found

    def to_json(self) -> dict[str, Any]:
        """For programs: the same numbers as on the page."""
        return {
            "counts": {v: self.counts[v] for v in VERDICTS},
            "separating": [str(found) for found in self.separating],
            "levels": {level: dict(counts) for level, (counts, _) in self.by("level").items()},
            "tiers": {tier: dict(counts) | {"seconds": s} for tier, (counts, s) in self.by("tier").items()},
            "failures": [
                {"text": f.text, "tiers": [p.tier for p in f.played], "commands": f.commands, "problems": f.problems}
                for f in self.failures
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
        panels=matrix(record, {text: f.number for f in failing for text in f.drawn}),
        failures=failing,
        refusals=refusals(record),
        ratios=ratios(record),
        coverage=coverage(record.played),
        separating=separating(record),
    )


def html(found: Summary) -> str:
    """The page of a run of the suite."""
    return _rendered(
        "report.html",
        found.record.meta,
        found=found,
        columns=COLUMNS,
        symbols=SYMBOLS,
        telling={Choice(each.axis, each.name) for each in found.separating if each.fails_more},
        histograms=histograms(found.ratios),
    )


def step_html(record: StepRecord) -> str:
    """The page of steps: what is wrong, then what differs, module by module, then what agrees."""
    return _rendered("step.html", record.meta, record=record, wrong=sum(not r.right for r in record.reports))


def _rendered(template: str, meta: dict[str, Any], **values: Any) -> str:
    """One text without scripts, which loads nothing. Raises ModuleNotFoundError without Jinja."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("conformance.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"counted": counted, "worst": worst, "number": "{:,}".format, "ratio": "{:.3g}".format}
    environment.filters |= {"short": "{:.1e}".format, "ranks": ranks_in_words}
    meta = {"impl": "", "command": "", "notes": ()} | meta
    return environment.get_template(template).render(meta=meta, **values)
