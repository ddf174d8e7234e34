"""The results of tiers, and the record of a run as data: a `Played` for every problem, a `TierResult`, a `RunRecord`.

The report, the known failures and the coverage table read only this; the tiers and the entry points write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "FAILING",
    "LEVELS",
    "VERDICTS",
    "Judged",
    "Level",
    "Played",
    "RunRecord",
    "TierResult",
    "Verdict",
    "readable",
]

Level = Literal["helpers", "merge", "kernel", "schedule", "linear"]
LEVELS: tuple[Level, ...] = ("helpers", "merge", "kernel", "schedule", "linear")

Verdict = Literal["right", "unsupported", "wrong", "missing", "crashed", "hung", "out of memory", "known"]
VERDICTS: tuple[Verdict, ...] = (
    "right",
    "unsupported",
    "wrong",
    "missing",
    "crashed",
    "hung",
    "out of memory",
    "known",
)
"""right: all checks held. unsupported: refused as it should be. wrong: computed, and not what the oracle says, or an
error that should not be. missing: the implementation does not offer this level or function. crashed: the worker process
died. hung: the watchdog ended it. known: wrong or crashed, and an expected failure.
"""
FAILING: tuple[Verdict, ...] = ("wrong", "crashed", "hung", "out of memory")


def readable(text: str) -> str:
    """The text with lone surrogates, which no encoding has, as escapes.

    >>> readable("Zürich \\udc80")
    'Zürich \\\\udc80'
    """
    return text.encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class Played:
    """One problem, played once.

    Attributes:
        text: the argument of --repro: "Case(...)", "error ID", "special ID", "known ID", "helper ...", ...
        findings: sentences; for unsupported and missing, the reason.
        ratios: error / bound of the budget tier's "out max", "dq mean" and so on.
        shrunk: the smallest failing problem found, and not one drawn.
        cases: for a text that is a name: each "Case(...)" played, and its verdict, so that the tables can count it.
        pairs: who saw whom: (query row, key row) of the global packed buffers, padding and tails counted. None if no
            probe can tell.
    """

    level: Level
    tier: str
    text: str
    verdict: Verdict
    findings: tuple[str, ...] = ()
    ratios: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    shrunk: bool = False
    cases: tuple[tuple[str, Verdict], ...] = ()
    pairs: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        """Messages of other libraries can be printed and written."""
        object.__setattr__(self, "findings", tuple(readable(finding) for finding in self.findings))


@dataclass(frozen=True)
class RunRecord:
    """A whole run. `meta` says what ran where: impl, versions, device, profile, seed, date, commit, command."""

    meta: dict[str, Any]
    played: tuple[Played, ...]

    @property
    def drawn(self) -> tuple[Played, ...]:
        """The problems that count: every one that was drawn or is in a table, once for each tier that played it. Those
        that shrinking found are smaller forms of them.
        """
        return tuple(p for p in self.played if not p.shrunk) or self.played

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists; `from_json` reads it back.

        >>> record = RunRecord({"impl": "x"}, (Played("schedule", "logic", "Case(...)", "right"),))
        >>> RunRecord.from_json(record.to_json()) == record
        True
        """
        return {"meta": self.meta, "played": [vars(p) | {"findings": list(p.findings)} for p in self.played]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> RunRecord:
        """The record that `to_json` wrote."""
        return RunRecord(data["meta"], tuple(_played(p) for p in data["played"]))


def _played(data: dict[str, Any]) -> Played:
    """Lists, which is all that JSON has, become tuples again, and "inf" and "nan" numbers."""
    ratios = {name: float(ratio) for name, ratio in data.get("ratios", {}).items()}
    pairs = data.get("pairs")
    pairs = None if pairs is None else tuple((int(q), int(k)) for q, k in pairs)
    cases = tuple((text, verdict) for text, verdict in data.get("cases", ()))
    return Played(**{**data, "findings": tuple(data["findings"]), "ratios": ratios, "cases": cases, "pairs": pairs})


class Judged(list[str]):
    """The findings, a list of sentences that is empty when all is well, and the measurements.

    A tier may as well return a plain list. `ratios` are error / bound, named "out max", "dq mean", ...; `cases` says of
    a named problem what became of each "Case(...)" that it plays.

    >>> judged = Judged([], {"out max": 0.5})
    >>> judged == [], judged.ratios
    (True, {'out max': 0.5})
    """

    def __init__(
        self,
        findings: Iterable[str] = (),
        ratios: Mapping[str, float] | None = None,
        cases: Mapping[str, Verdict] | None = None,
    ) -> None:
        super().__init__(findings)
        self.ratios = dict(ratios or {})
        self.cases: dict[str, Verdict] = dict(cases or {})


@dataclass
class TierResult:
    """The problems that a tier played: every one that was drawn or is in its table, and the smallest failing ones."""

    tier: str
    played: list[Played] = field(default_factory=list)
    seconds: float = 0.0
    note: str = ""

    @property
    def drawn(self) -> list[Played]:
        """Without those that shrinking found."""
        return [p for p in self.played if not p.shrunk]

    @property
    def run(self) -> int:
        """How many problems were played, shrinking left out."""
        return len(self.drawn)

    def count(self, *verdicts: str) -> int:
        """How many of them got one of these verdicts."""
        return sum(p.verdict in verdicts for p in self.drawn)

    @property
    def passed(self) -> int:
        """How many are right."""
        return self.count("right")

    @property
    def unsupported(self) -> int:
        """How many are refused as they should be."""
        return self.count("unsupported")

    @property
    def judged(self) -> int:
        """How many were computed, rightly or not."""
        return self.run - self.count("unsupported", "missing")

    @property
    def smallest(self) -> list[Played]:
        """The failing problems: of a drawn tier the smallest of each kind, of a table all of them."""
        shrunk = [p for p in self.played if p.shrunk]
        return shrunk or [p for p in self.played if p.verdict in FAILING]
