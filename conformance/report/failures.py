"""The failing problems of a run, smallest first, what separates them from the others, and the reasons of the refused
ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from math import log

from conformance.case import Case
from conformance.commands import replay_command
from conformance.draw.case_features import Choice, choices_of
from conformance.draw.feature_coverage import played_cases
from conformance.judge.run_record import FAILING, Played, RunRecord
from conformance.report.mask_differences import Difference, visibility_difference

__all__ = ["Failure", "Refusal", "Separating", "failures", "refusals", "separating"]

_SEPARATES = 6.0  # the least evidence (twice a log likelihood ratio); one in seventy axes has it by chance
_MOST_AXES, _MOST_CHOICES = 5, 6


@dataclass(frozen=True)
class Failure:
    """Failing problems that shrinking led to one smallest problem, or one that was not made smaller.

    Attributes:
        number: its place on the page, from 1.
        case: the smallest problem, or the first that failed of an entry of a table; None if there is no case.
        played: every failed play of it, one for each tier.
        commands: the commands that replay it.
        drawn: the texts of the problems that count, one for each tier that played one.
    """

    number: int
    case: Case | None
    played: tuple[Played, ...]
    commands: tuple[str, ...]
    drawn: tuple[str, ...]

    @property
    def problems(self) -> int:
        """How many failing problems of the run it stands for."""
        return len(self.drawn)

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
    """Every failing problem in its smallest form: the shrunk ones first, then by tokens and ranks; named entries last.

    A tier shrinks a problem right after it drew it.
    """
    groups: dict[str, dict[str, Played]] = defaultdict(dict)
    stands_for: dict[str, list[str]] = defaultdict(list)
    shown: list[tuple[Played, Played]] = []  # the smallest form of a problem, and the problem
    may_shrink: dict[tuple[str, str], int] = {}  # (level, tier) -> its latest problem
    for played in record.played:
        where = played.level, played.tier
        if played.verdict in FAILING and played.shrunk and where in may_shrink:
            at = may_shrink.pop(where)
            shown[at] = played, shown[at][1]
        elif played.verdict in FAILING:
            if not played.shrunk:
                may_shrink[where] = len(shown)
            shown.append((played, played))
    for smallest, played in shown:
        stands_for[smallest.text].append(played.text)
        if smallest.shrunk or smallest.tier not in groups[smallest.text]:
            groups[smallest.text][smallest.tier] = smallest
    found = []
    for text, group in groups.items():
        cases = (case for played in group.values() for case, verdict in played_cases(played) if verdict in FAILING)
        plays = (p for tier, p in group.items() if tier != "known failures")  # what passes is no problem
        commands = dict.fromkeys(replay_command(record.meta, played) for played in plays)
        found.append(Failure(0, next(cases, None), tuple(group.values()), tuple(commands), tuple(stands_for[text])))

    def place(failure: Failure) -> tuple[object, ...]:
        text, size = failure.text, (float("inf"), 0)
        if failure.case is not None:
            p = failure.case.problem
            size = sum(s.len_q + s.len_kv for s in p.sequences), p.cp_size
        return not failure.shrunk, not text.startswith("Case("), size, len(text), text

    return tuple(replace(failure, number=n) for n, failure in enumerate(sorted(found, key=place), 1))


@dataclass(frozen=True)
class Separating:
    """An axis of features, or the tiers, whose choices fail more or less often.

    Attributes:
        choices: (name, how many failed, of how many that were computed), the most failing first.
        evidence: of the most telling choice, twice a log likelihood ratio.
        name: of that choice. fails_more: whether it fails more often than the others.
    """

    axis: str
    choices: tuple[tuple[str, int, int], ...]
    evidence: float
    name: str
    fails_more: bool

    def __str__(self) -> str:
        shown = "; ".join(f"{name} {bad:,} of {count:,} failed" for name, bad, count in self.choices[:_MOST_CHOICES])
        more = len(self.choices) - _MOST_CHOICES
        return f"{self.axis}: {shown}" + f"; and {more} more" * (more > 0)


def separating(record: RunRecord) -> tuple[Separating, ...]:
    """What separates failing from passing cases, the most telling first; nothing where no feature does.

    A case is a drawn problem, or one that a named problem plays.

    >>> from cp_ref.schedules.problem import Problem, Sequence
    >>> cases = [Case(Problem(2, (Sequence(8, 8, 8, 8),), attn_mask_type=m)) for m in ("causal", "no_mask") * 8]
    >>> verdicts = ("wrong", "right") * 8
    >>> played = [Played("schedule", "logic", str(c), v) for c, v in zip(cases, verdicts)]
    >>> print(separating(RunRecord({}, tuple(played)))[0])
    mask: causal 8 of 8 failed; no_mask 0 of 8 failed
    """
    bad, count = Counter[Choice](), Counter[Choice]()
    failed = total = 0
    for played in record.drawn:
        for case, verdict in played_cases(played):
            if verdict in ("unsupported", "missing"):
                continue
            total += 1
            failed += verdict in FAILING
            for choice in (Choice("tier", played.tier), *choices_of(case)):
                count[choice] += 1
                bad[choice] += verdict in FAILING
    axes: dict[str, list[Choice]] = defaultdict(list)
    for choice in count:
        axes[choice.axis].append(choice)
    found = []
    for axis, choices in axes.items():
        choices.sort(key=lambda choice: (-bad[choice] / count[choice], -count[choice]))
        told = [_evidence(bad[choice], count[choice], failed, total) for choice in choices]
        best = told.index(max(told))
        if told[best] >= _SEPARATES:
            rows = tuple((choice.name, bad[choice], count[choice]) for choice in choices)
            more = bad[choices[best]] * total > failed * count[choices[best]]
            found.append(Separating(axis, rows, told[best], choices[best].name, more))
    return tuple(sorted(found, key=lambda each: -each.evidence)[:_MOST_AXES])


def _evidence(bad: int, count: int, failed: int, total: int) -> float:
    """Twice the log likelihood ratio of two shares of failures, inside a choice and outside, against one share.

    >>> round(_evidence(6, 37, 6, 68), 1), _evidence(3, 30, 6, 60)
    (7.8, 0.0)
    """
    table = ((bad, count, failed), (count - bad, count, total - failed))
    table += ((failed - bad, total - count, failed), (total - count - failed + bad, total - count, total - failed))
    return 2.0 * sum(n * log(n * total / (size * kind)) for n, size, kind in table if n)


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
