"""The failing problems of a run, smallest first, and the reasons of the refused ones."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
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
    groups: dict[str, dict[str, Played]] = defaultdict(dict)
    for played in record.played:
        if played.verdict in FAILING:  # the smallest problem was also drawn; the later findings are more complete
            groups[played.text][played.tier] = played
    found = []
    for group in groups.values():
        cases = (case for played in group.values() for case, verdict in played_cases(played) if verdict in FAILING)
        plays = (p for tier, p in group.items() if tier != "known failures")  # what passes is no problem
        commands = dict.fromkeys(replay_command(record.meta, played) for played in plays)
        found.append(Failure(0, next(cases, None), tuple(group.values()), tuple(commands)))

    def place(failure: Failure) -> tuple[object, ...]:
        text, size = failure.text, (float("inf"), 0)
        if failure.case is not None:
            p = failure.case.problem
            size = sum(s.len_q + s.len_kv for s in p.sequences), p.cp_size
        return not failure.shrunk, not text.startswith("Case("), size, len(text), text

    return tuple(replace(failure, number=n) for n, failure in enumerate(sorted(found, key=place), 1))


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
    groups: dict[tuple[str, str], list[Played]] = defaultdict(list)
    for played in record.played:
        if played.verdict in ("unsupported", "missing"):
            reason = "\n".join(played.findings) or "no reason given"
            groups[played.verdict, reason].append(played)
    found = []
    for (verdict, reason), group in groups.items():
        where = tuple(dict.fromkeys(f"{p.level} {p.tier}" for p in group))
        example = min((p.text for p in group), key=lambda text: (len(text), text))
        found.append(Refusal(verdict, reason, len(group), where, example))
    return tuple(sorted(found, key=lambda r: (-r.count, r.verdict, r.reason)))
