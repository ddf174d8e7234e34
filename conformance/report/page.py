"""From a record to the page's data, and from the data to the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from xml.etree import ElementTree

from conformance.problems.features import Choice
from conformance.problems.problem import NamedProblem
from conformance.record import FAILING, LEVELS, VERDICTS, Played, RunRecord, replay_command
from conformance.report.coverage import (
    COLUMNS,
    SYMBOLS,
    Coverage,
    Panel,
    Ratios,
    counted,
    coverage,
    histograms,
    matrix,
    ratios,
    worst,
)
from conformance.report.failures import Failure, Refusal, Separating, failures, refusals, separating
from conformance.runner.tiers import TIERS
from conformance.step.report import Compared, StepRecord, StepReport, ranks_in_words

__all__ = ["Summary", "html", "junit", "step_html", "summary"]


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
    """The page of steps: first the mistakes, then the differences, module by module, then all that agrees."""
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


# ---- JUnit's XML
#
# JUnit's XML of a run, which CI servers show: a suite for each tier, or for each step that was compared.


_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_DRAWN = "drawn problems"


@dataclass(frozen=True)
class _Test:
    """One test: `message` is one line, `text` all that is known."""

    name: str
    outcome: Literal["passed", "failure", "error", "skipped"]
    message: str = ""
    text: str = ""
    seconds: float = 0.0


def junit(record: RunRecord | StepRecord) -> str:
    """The XML of a run.

    Of the suite, an entry of a table is a test. Of a tier that draws, each smallest failing problem is a test, and all
    problems that passed are one. Of a step, the whole is a test, whose failure is the diagnosis, and so is each value.
    """
    suites = dict(_of_steps(record) if isinstance(record, StepRecord) else _of_tiers(record))
    root = ElementTree.Element("testsuites", _counted([test for tests in suites.values() for test in tests]))
    for suite, tests in suites.items():
        found = ElementTree.SubElement(root, "testsuite", {"name": _clean(suite), **_counted(tests)})
        for test in tests:
            named = {"classname": _clean(suite), "name": _clean(test.name), "time": f"{test.seconds:.3f}"}
            case = ElementTree.SubElement(found, "testcase", named)
            if test.outcome != "passed":
                said = ElementTree.SubElement(case, test.outcome, {"message": _clean(test.message)})
                said.text = _clean(test.text) or None
            elif test.text:
                ElementTree.SubElement(case, "system-out").text = _clean(test.text)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _counted(tests: list[_Test]) -> dict[str, str]:
    counts = {name: sum(test.outcome == one for test in tests) for name, one in _OUTCOMES.items()}
    return {"tests": str(len(tests)), **{name: str(n) for name, n in counts.items()}} | {
        "time": f"{sum(test.seconds for test in tests):.3f}"
    }


_OUTCOMES = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def _clean(text: str) -> str:
    """Without the characters that XML has no place for, such as those that colour a terminal's text."""
    return _NO_XML.sub("?", text)


def _of_tiers(record: RunRecord) -> Iterable[tuple[str, list[_Test]]]:
    tiers: dict[tuple[str, str], list[Played]] = {}
    for played in record.played:
        tiers.setdefault((played.level, played.tier), []).append(played)
    for (level, tier), plays in tiers.items():
        suite = f"conformance.{level}.{tier}"
        if tier == "known failures" or (tier in TIERS and issubclass(TIERS[tier].kind, NamedProblem)):
            yield suite, [_of_problem(record.meta, played) for played in plays]
            continue
        failing = [played for played in plays if played.verdict in FAILING]
        failing = [played for played in failing if played.shrunk] or failing
        tests = [] if failing else [_of_passed(plays)]
        yield suite, tests + [_of_problem(record.meta, played) for played in failing]


def _of_problem(meta: Mapping[str, object], played: Played) -> _Test:
    findings = "\n".join(played.findings)
    first = f"{played.verdict}: {(played.findings or ('',))[0]}".partition("\n")[0]
    if played.verdict in FAILING:
        again = "" if played.tier == "known failures" else f"\nplay it again:\n  {replay_command(meta, played)}"
        return _Test(played.text, "failure", first, findings + again, played.seconds)
    if played.verdict == "right":
        return _Test(played.text, "passed", seconds=played.seconds)
    return _Test(played.text, "skipped", first, findings, played.seconds)


def _of_passed(plays: list[Played]) -> _Test:
    """The problems of a tier that draws, of which none failed."""
    verdicts = dict.fromkeys(played.verdict for played in plays)
    said = ", ".join(f"{sum(played.verdict == verdict for played in plays)} {verdict}" for verdict in verdicts)
    seconds = sum(played.seconds for played in plays)
    if "right" in verdicts:
        return _Test(_DRAWN, "passed", text=said, seconds=seconds)
    return _Test(_DRAWN, "skipped", said, "\n".join((plays[0].findings if plays else ()) or ()), seconds)


def _of_steps(record: StepRecord) -> Iterable[tuple[str, list[_Test]]]:
    for report in record.reports:
        first = report.diagnosis[0].partition("\n")[0] if report.diagnosis else ""
        whole = _Test("the step", "passed" if report.right else "failure", first, str(report))
        yield f"step over {report.title}", [whole, *(_of_value(report, value) for value in report.values)]
    if record.error:
        yield "step", [_Test("the step", "error", record.error.strip().splitlines()[-1], record.error)]


def _of_value(report: StepReport, value: Compared) -> _Test:
    row, name = value.row, f"{value.kind} {value.name}".strip()
    if row.ok:
        return _Test(name, "passed")
    ranks = ranks_in_words(value.wrong, report.ranks)
    message = f"error {row.max_error:.3g}, allowed {row.max_bound:.3g}; mean {row.mean_error:.3g}, allowed "
    message += f"{row.mean_bound:.3g}" + f"; ranks: {ranks}" * bool(ranks) + f"; {row.note}" * bool(row.note)
    return _Test(name, "failure", message)
