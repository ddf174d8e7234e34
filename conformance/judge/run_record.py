"""The record of a run, as data: one `Played` for every problem that was played, and a `RunRecord` around them.

The report, the known failures and the coverage table read only this; the tiers and the entry points write it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["FAILING", "LEVELS", "VERDICTS", "Level", "Played", "RunRecord", "Verdict", "readable"]

Level = Literal["helpers", "merge", "kernel", "schedule"]
LEVELS: tuple[Level, ...] = ("helpers", "merge", "kernel", "schedule")

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
    """One problem, played once."""

    level: Level
    tier: str
    text: str  # The argument of --repro: "Case(...)", "error ID", "special ID", "known ID", "helper ...", ...
    verdict: Verdict
    findings: tuple[str, ...] = ()  # Sentences; for unsupported and missing, the reason.
    ratios: dict[str, float] = field(
        default_factory=dict
    )  # Error / bound of the budget tier's "out max", "dq mean" and so on.
    seconds: float = 0.0
    shrunk: bool = False  # The smallest failing problem found, and not one drawn.
    cases: tuple[tuple[str, Verdict], ...] = ()  # For a text that is a name: each "Case(...)" played, and its verdict,
    # so that the tables can count it.
    pairs: tuple[tuple[int, int], ...] | None = None  # Who saw whom: (query row, key row) of the global packed
    # buffers, padding and tails counted. None if no probe can tell.

    def __post_init__(self) -> None:
        """Messages of other libraries can be printed and written."""
        object.__setattr__(self, "findings", tuple(readable(finding) for finding in self.findings))


@dataclass(frozen=True)
class RunRecord:
    """A whole run. `meta` says what ran where: impl, versions, device, profile, seed, date, commit, command."""

    meta: dict[str, Any]
    played: tuple[Played, ...]

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
