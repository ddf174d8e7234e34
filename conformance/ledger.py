"""The ledger of known failures: what an implementation is known to get wrong, so that a run fails on news alone.

A TOML file, one table for each failure:

    [[entry]]
    predicate = 'qkv_format == "thd" and cp_comm_type == "all_gather" and window_size[1] > 0'
    reason = "the right side of the window is dropped"
    issue = "https://example.org/issues/7"
    tier = "logic"          # optional: only in this tier
    level = "schedule"      # optional: only at this level
    quarantine = true       # optional: it takes the process down, so it is not even played

The ledger is strict: when every problem that an entry covers passes, the entry has to go.

The language of predicates is in `conformance.predicate`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.predicate import Predicate, PredicateError
from conformance.record import LEVELS, Played, RunRecord, Verdict

__all__ = ["Ledger", "LedgerEntry", "LedgerError"]

_FAILED = ("wrong", "crashed", "hung")
_NEEDED = {"predicate": str, "reason": str, "issue": str}
_OPTIONAL = {"tier": str, "level": str, "quarantine": bool}


class LedgerError(ValueError):
    """A ledger that cannot be read, or a predicate that cannot be judged; names the file and the entry."""


@dataclass(frozen=True)
class LedgerEntry:
    """One known failure. `number` counts from 1 in the file `source`."""

    source: str
    number: int
    predicate: Predicate
    reason: str
    issue: str
    tier: str | None = None
    level: str | None = None
    quarantine: bool = False

    def __str__(self) -> str:
        return f"{self.source}: entry {self.number} ({self.predicate.text})"

    def matches(self, text: str, level: str | None, tier: str | None, case: str | None = None) -> bool:
        """Whether a problem, played at this level and tier, is one of these.

        Raises:
            LedgerError: the predicate makes no sense for it.
        """
        if (self.tier is not None and self.tier != tier) or (self.level is not None and self.level != level):
            return False
        try:
            return self.predicate.holds(text, case)
        except PredicateError as error:
            raise LedgerError(f"{self}: {error}") from error


@dataclass(frozen=True)
class Ledger:
    """The entries of a file, in its order. `Ledger()` knows of no failure."""

    entries: tuple[LedgerEntry, ...] = ()

    @staticmethod
    def load(path: str | Path) -> Ledger:
        """Read a file.

        Raises:
            LedgerError: it is not there, is no TOML, or an entry is malformed; the entry is named.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LedgerError(f"cannot read the ledger {path}: {error}") from error
        return Ledger.parse(text, str(path))

    @staticmethod
    def parse(text: str, source: str = "ledger") -> Ledger:
        """The ledger that a text holds; `source` is its name in messages. Raises LedgerError like `load`.

        >>> ledger = Ledger.parse('''
        ... [[entry]]
        ... predicate = 'cp_comm_type == "a2a" and heads_kv < a2a_size'
        ... reason = "K/V heads are not replicated"
        ... issue = "#12"
        ... ''')
        >>> text = "Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)], cp_comm_type='a2a', a2a_size=2, heads_q=2))"
        >>> ledger.judge(Played("schedule", "logic", text, "wrong", ("dk is wrong",))).findings
        ('known: K/V heads are not replicated (#12)', 'dk is wrong')
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise LedgerError(f"{source}: {error}") from error
        tables = data.pop("entry", [])
        if data or not isinstance(tables, list):
            raise LedgerError(f"{source}: a ledger has tables [[entry]] and nothing else, not {', '.join(data)}")
        return Ledger(tuple(_entry(source, n, table) for n, table in enumerate(tables, start=1)))

    def match(self, played: Played) -> LedgerEntry | None:
        """The first entry that covers a failed problem; of a named one that plays several cases, each that failed."""
        failed = [case for case, verdict in played.cases if verdict in _FAILED] or [None]
        return next(
            (e for e in self.entries if all(e.matches(played.text, played.level, played.tier, c) for c in failed)), None
        )

    def judge(self, played: Played) -> Played:
        """The same, or "known" instead of wrong, crashed or hung, when an entry covers it; reason and issue come
        first.
        """
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
        """Why a problem must not be played, or None. An entry that names a tier holds back this tier alone; `cases` are
        those that a named problem plays: one of them is enough.
        """
        for entry in self.entries:
            if entry.quarantine and any(entry.matches(text, level, tier, case) for case in cases or [None]):
                return f"quarantined: {entry.reason} ({entry.issue})"
        return None

    def unexpected_passes(self, record: RunRecord) -> tuple[str, ...]:
        """One sentence for every entry that covers problems of a run, all of which passed."""
        found = []
        for entry in self.entries:
            if entry.quarantine:
                continue
            verdicts = [
                verdict
                for p in record.played
                for case, verdict in p.cases or ((None, p.verdict),)
                if verdict in ("right", "known", *_FAILED) and entry.matches(p.text, p.level, p.tier, case)
            ]  # not what was refused, missing or too large: that says nothing
            if verdicts and set(verdicts) == {"right"}:
                problems = "the one problem" if len(verdicts) == 1 else f"all {len(verdicts)} problems"
                found.append(f"{entry} no longer fails: remove it; {problems} that it covers passed")
        return tuple(found)


def _entry(source: str, number: int, table: Any) -> LedgerEntry:
    name = f"{source}: entry {number}"
    if not isinstance(table, dict):
        raise LedgerError(f"{name} is {table!r}; it must be a table")
    if missing := [key for key in _NEEDED if key not in table]:
        raise LedgerError(f"{name} lacks {', '.join(missing)}")
    if unknown := [key for key in table if key not in _NEEDED | _OPTIONAL]:
        known = ", ".join(_NEEDED | _OPTIONAL)
        raise LedgerError(f"{name} has {', '.join(unknown)}; an entry has {known}")
    for key, value in table.items():
        kind = (_NEEDED | _OPTIONAL)[key]
        if not isinstance(value, kind) or value == "":
            raise LedgerError(f"{name}: {key} is {value!r}; it must be {'true or false' if kind is bool else 'a text'}")
    if table.get("level", LEVELS[0]) not in LEVELS:
        raise LedgerError(f"{name}: level is {table['level']!r}; it must be one of {', '.join(LEVELS)}")
    try:
        predicate = Predicate.parse(table["predicate"])
    except PredicateError as error:
        raise LedgerError(f"{name} ({table['predicate']}): {error}") from error
    return LedgerEntry(source, number, **{**table, "predicate": predicate})
