"""The failing problems of a run, smallest first, and the reasons of the refused ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from conformance.case import Case
from conformance.commands import replay_command
from conformance.draw.feature_coverage import played_cases
from conformance.judge.run_record import FAILING, Played, RunRecord
from conformance.report.mask_differences import Difference, visibility_difference

__all__ = ["Failure", "Refusal", "failures", "refusals"]


@dataclass(frozen=True)
class Failure:
    """One failing problem.

    Attributes:
        number: its place on the page, from 1.
        case: the problem, or the first that failed of an entry of a table; None if there is no case.
        played: every failed play of it, one for each tier.
        commands: the commands that replay it.
    """

    number: int
    case: Case | None
    played: tuple[Played, ...]
    commands: tuple[str, ...]

    @property
    def text(self) -> str:
        """The text that `--repro` takes."""
        return self.played[0].text

    @property
    def shrunk(self) -> bool:
        """Whether it is the smallest that was found."""
        return any(p.shrunk for p in self.played)

    @property
    def size(self) -> str:
        """The number of tokens and ranks, in words."""
        if self.case is None:
            return ""
        p = self.case.problem
        queries, keys = sum(s.len_q for s in p.sequences), sum(s.len_kv for s in p.sequences)
        tokens = f"{queries:,}" if queries == keys else f"{queries:,} x {keys:,}"
        return f"{tokens} token{'' if tokens == '1' else 's'}, {p.cp_size} rank{'' if p.cp_size == 1 else 's'}"

    @cached_property
    def difference(self) -> Difference | None:
        """The expected pairs, and the observed pairs if a probe knows them; None if the problem has no mask."""
        if self.case is None or not self.case.problem.pairs + sum(len(p.pairs or ()) for p in self.played):
            return None
        return visibility_difference(self.case, next((p.pairs for p in self.played if p.pairs is not None), None))


def failures(record: RunRecord) -> tuple[Failure, ...]:
    """Every failing problem once: the shrunk ones first, then by tokens and ranks; named entries last."""
    found: dict[str, dict[str, Played]] = {}
    for played in record.played:
        if played.verdict in FAILING:  # the smallest problem was also drawn; the later findings are more complete
            found.setdefault(played.text, {})[played.tier] = played
    groups = {text: tuple(by_tier.values()) for text, by_tier in found.items()}
    cases = {text: _failing_case(group) for text, group in groups.items()}

    def place(text: str) -> tuple[object, ...]:
        named = not text.startswith("Case(")
        return not any(p.shrunk for p in groups[text]), named, _size(cases[text]), len(text), text

    return tuple(
        Failure(n, cases[text], groups[text], _commands(record, groups[text]))
        for n, text in enumerate(sorted(groups, key=place), 1)
    )


def _commands(record: RunRecord, group: Sequence[Played]) -> tuple[str, ...]:
    """The replay commands; none for a known failure that passes, which is no problem."""
    commands = (replay_command(record.meta, played) for played in group if played.tier != "known failures")
    return tuple(dict.fromkeys(commands))


def _failing_case(group: Sequence[Played]) -> Case | None:
    return next((case for played in group for case, verdict in played_cases(played) if verdict in FAILING), None)


def _size(case: Case | None) -> tuple[float, int]:
    if case is None:
        return float("inf"), 0
    return sum(s.len_q + s.len_kv for s in case.problem.sequences), case.problem.cp_size


@dataclass(frozen=True)
class Refusal:
    """Problems that were refused, or are not offered, for one reason; `example` is the shortest."""

    verdict: str
    reason: str
    count: int
    where: tuple[str, ...]
    example: str


def refusals(record: RunRecord) -> tuple[Refusal, ...]:
    """Every reason, the most frequent first."""
    groups: dict[tuple[str, str], list[Played]] = {}
    for played in record.played:
        if played.verdict in ("unsupported", "missing"):
            reason = "\n".join(played.findings) or "no reason given"
            groups.setdefault((played.verdict, reason), []).append(played)
    found = [
        Refusal(
            verdict,
            reason,
            len(group),
            tuple(dict.fromkeys(f"{p.level} {p.tier}" for p in group)),
            min((p.text for p in group), key=lambda text: (len(text), text)),
        )
        for (verdict, reason), group in groups.items()
    ]
    return tuple(sorted(found, key=lambda r: (-r.count, r.verdict, r.reason)))
