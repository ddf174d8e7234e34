"""Known failures of an implementation: a run fails only when something else fails.

A TOML file has one table for each known failure:

    [[entry]]
    match = {qkv_format = "thd", cp_comm_type = ["all_gather", "p2p"], window_right = {low = 1}}
    reason = "the right side of the window is dropped"
    issue = "https://example.org/issues/7"
    tier = "logic"          # optional: only in this tier
    level = "schedule"      # optional: only at this level
    quarantine = true       # optional: the problem ends the machine or the process, so it does not run

A problem matches as `conformance.matching` says. An empty `match` covers everything. When every problem that an entry
covers passes, the run fails until the entry is removed.

A problem that is no case has only the field `text`. An entry with any other field does not match it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.matching import FIELDS, field_values, matches
from conformance.record import LEVELS, Played, RunRecord, Verdict
from cp_ref.schedules.values import parse_toml

__all__ = ["KnownFailure", "KnownFailures", "KnownFailuresError"]

_FAILED = ("wrong", "crashed", "hung")
_NEEDED = {"match": dict, "reason": str, "issue": str}
_OPTIONAL = {"tier": str, "level": str, "quarantine": bool}


class KnownFailuresError(ValueError):
    """The file cannot be read; the message names the file and the entry."""


@dataclass(frozen=True)
class KnownFailure:
    """One known failure. `number` counts from 1 in the file `source`."""

    source: str
    number: int
    match: Mapping[str, Any]
    reason: str
    issue: str
    tier: str | None = None
    level: str | None = None
    quarantine: bool = False

    def __str__(self) -> str:
        words = ", ".join(f"{name} = {wanted!r}" for name, wanted in self.match.items())
        return f"{self.source}: entry {self.number} ({words})"

    def matches(self, text: str, level: str | None, tier: str | None, case: str | None) -> bool:
        """Whether the entry covers a problem at this level and tier.

        Args:
            text: what `--repro` takes.
            case: of a named problem, the "Case(...)" that ran.
        """
        if (self.tier is not None and self.tier != tier) or (self.level is not None and self.level != level):
            return False
        values = {**field_values(case or text), "text": text}
        return matches(values, self.match)


@dataclass(frozen=True)
class KnownFailures:
    """The entries of a file, in its order. `KnownFailures()` has none."""

    entries: tuple[KnownFailure, ...] = ()

    @staticmethod
    def load(path: str | Path) -> KnownFailures:
        """Read a file.

        Raises:
            KnownFailuresError: the file does not exist, is not TOML, or has a malformed entry.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise KnownFailuresError(f"cannot read the known failures {path}: {error}") from error
        return KnownFailures.parse(text, str(path))

    @staticmethod
    def parse(text: str, source: str = "known failures") -> KnownFailures:
        """Read a text; `source` is its name in messages. Raises KnownFailuresError like `load`.

        >>> known = KnownFailures.parse('''
        ... [[entry]]
        ... match = {cp_comm_type = "a2a", heads_kv = {high = 3}}
        ... reason = "K/V heads are not replicated"
        ... issue = "#12"
        ... ''')
        >>> text = "Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)], cp_comm_type='a2a', a2a_size=2, heads_q=2))"
        >>> known.judge(Played("schedule", "logic", text, "wrong", ("dk is wrong",))).findings
        ('known: K/V heads are not replicated (#12)', 'dk is wrong')
        """
        try:
            data = parse_toml(text)
        except ValueError as error:
            raise KnownFailuresError(f"{source}: {error}") from error
        tables = data.pop("entry", [])
        if data or not isinstance(tables, list):
            raise KnownFailuresError(f"{source}: the file may have only tables [[entry]], not {', '.join(data)}")
        return KnownFailures(tuple(_entry(source, n, table) for n, table in enumerate(tables, start=1)))

    def match(self, played: Played) -> KnownFailure | None:
        """The first entry that covers a failed problem. For a named problem it must cover each case that failed."""
        failed = [case for case, verdict in played.cases if verdict in _FAILED] or [None]
        return next(
            (e for e in self.entries if all(e.matches(played.text, played.level, played.tier, c) for c in failed)), None
        )

    def judge(self, played: Played) -> Played:
        """Change wrong, crashed or hung to "known" if an entry covers the problem; its reason and issue come first."""
        if played.verdict not in _FAILED or (entry := self.match(played)) is None:
            return played
        findings = (f"known: {entry.reason} ({entry.issue})", *played.findings)
        cases: tuple[tuple[str, Verdict], ...] = tuple(
            (case, "known" if verdict in _FAILED else verdict) for case, verdict in played.cases
        )
        return replace(played, verdict="known", findings=findings, cases=cases)

    def quarantined(
        self, text: str, *, level: str | None = "schedule", tier: str | None = None, cases: Sequence[str] = ()
    ) -> str | None:
        """The reason why a problem must not run, or None.

        An entry that names a tier holds back this tier only. For a named problem, `cases` are its cases: one match is
        enough.
        """
        for entry in self.entries:
            if entry.quarantine and any(entry.matches(text, level, tier, case) for case in cases or [None]):
                return f"quarantined: {entry.reason} ({entry.issue})"
        return None

    def unexpected_passes(self, record: RunRecord) -> tuple[str, ...]:
        """One sentence for each entry that covers problems of a run, all of which passed."""
        found = []
        for entry in self.entries:
            if entry.quarantine:
                continue
            verdicts = [
                verdict
                for p in record.played
                for case, verdict in p.cases or ((None, p.verdict),)
                if verdict in ("right", "known", *_FAILED) and entry.matches(p.text, p.level, p.tier, case)
            ]  # a refused, missing or too large problem proves nothing
            if verdicts and set(verdicts) == {"right"}:
                problems = "the one problem" if len(verdicts) == 1 else f"all {len(verdicts)} problems"
                found.append(f"{entry} no longer fails: remove it; {problems} that it covers passed")
        return tuple(found)


def _entry(source: str, number: int, table: Any) -> KnownFailure:
    name = f"{source}: entry {number}"
    if not isinstance(table, dict):
        raise KnownFailuresError(f"{name} is {table!r}; it must be a table")
    if missing := [key for key in _NEEDED if key not in table]:
        raise KnownFailuresError(f"{name} lacks {', '.join(missing)}")
    if unknown := [key for key in table if key not in _NEEDED | _OPTIONAL]:
        known = ", ".join(_NEEDED | _OPTIONAL)
        raise KnownFailuresError(f"{name} has {', '.join(unknown)}; an entry has {known}")
    for key, value in table.items():
        kind = (_NEEDED | _OPTIONAL)[key]
        if not isinstance(value, kind) or value == "":
            words = {bool: "true or false", dict: "a table"}.get(kind, "a text")
            raise KnownFailuresError(f"{name}: {key} is {value!r}; it must be {words}")
    if table.get("level", LEVELS[0]) not in LEVELS:
        raise KnownFailuresError(f"{name}: level is {table['level']!r}; it must be one of {', '.join(LEVELS)}")
    for field, wanted in table["match"].items():
        if field not in FIELDS:
            raise KnownFailuresError(f"{name}: {field!r} is no field of a problem; there are {', '.join(FIELDS)}")
        _check_wanted(f"{name}: {field}", wanted)
    return KnownFailure(source, number, **table)


def _check_wanted(name: str, wanted: Any) -> None:
    """Raise KnownFailuresError unless this is a value, a list of values, or a range of numbers."""
    if isinstance(wanted, dict):
        numbers = all(isinstance(n, int | float) and not isinstance(n, bool) for n in wanted.values())
        if not wanted or not wanted.keys() <= {"low", "high"} or not numbers:
            raise KnownFailuresError(f"{name} is {wanted!r}; a range has the numbers low and high, or one of them")
        return
    values = wanted if isinstance(wanted, list) else [wanted]
    if not values or not all(isinstance(value, str | int | float) for value in values):
        raise KnownFailuresError(f"{name} is {wanted!r}; it must be a value, a list of values or {{low, high}}")
