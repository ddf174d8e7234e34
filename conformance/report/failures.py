"""The failing problems of a run, smallest first, what separates them from the others, and the reasons of the refused
ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import log

from conformance.case import Case
from conformance.problems.features import Choice, choices_of
from conformance.record import FAILING, MOST, Pair, Played, RunRecord, replay_command
from conformance.report.coverage import played_cases
from conformance.tensors import seen

__all__ = [
    "Difference",
    "Failure",
    "Refusal",
    "Separating",
    "failures",
    "refusals",
    "separating",
    "visibility_difference",
    "visible",
]

# ---- masks as differences of pairs
#
# Expected and observed pairs of queries and keys: a failing problem's mask as a difference of pairs.


SEEN, HIDDEN, EXTRA, MISSING = "#.+-"  # the characters of a picture


@dataclass(frozen=True)
class Difference:
    """A part of a problem's score matrix, at most `MOST` x `MOST`.

    Attributes:
        rows, columns: its packed query rows and packed key rows; `whole` if they are all of them.
        expected, seen: the pairs inside.
        wrong: the missing (expected and not seen) and the extra pairs (seen and not expected), counted over the whole
            problem; None where nobody knows what was seen.
    """

    rows: range
    columns: range
    whole: bool
    expected: frozenset[Pair]
    seen: frozenset[Pair]
    wrong: tuple[int, int] | None

    @property
    def sentence(self) -> str:
        """The difference in words."""
        if self.wrong is None:
            return f"The observed pairs are not known; {SEEN} should be seen, {HIDDEN} should be hidden."
        if not any(self.wrong):
            return f"Every query saw the keys that it should see ({SEEN}): the error is not in the mask."
        missing, extra = (f"{count:,} {'pair is' if count == 1 else 'pairs are'}" for count in self.wrong)
        parts = [f"{extra} seen that should be hidden ({EXTRA})"] if self.wrong[1] else []
        parts += [f"{missing} not seen that should be visible ({MISSING})"] if self.wrong[0] else []
        return f"{', '.join(parts)}; {SEEN} is seen, {HIDDEN} is hidden, as they should be."

    @property
    def picture(self) -> str:
        """One line for each query, one character for each key.

        >>> from cp_ref.schedules.problem import Problem, Sequence
        >>> print(visibility_difference(Case(Problem(2, (Sequence(2, 2, 2, 2),))), [(0, 0), (0, 1), (1, 1)]).picture)
        #+
        -#
        """
        marks = {(True, True): SEEN, (False, False): HIDDEN, (False, True): EXTRA, (True, False): MISSING}
        lines = [[((q, k) in self.expected, (q, k) in self.seen) for k in self.columns] for q in self.rows]
        return "\n".join("".join(marks[pair] for pair in line) for line in lines)


def visible(case: Case) -> frozenset[Pair]:
    """Every pair that the mask lets through, of all sequences; padding and tails see nothing.

    >>> from cp_ref.schedules.problem import Problem, Sequence
    >>> sorted(visible(Case(Problem(1, (Sequence(1, 1, 2, 2), Sequence(2, 2, 2, 2)), qkv_format="thd"))))
    [(0, 0), (2, 2), (3, 2), (3, 3)]
    """
    return frozenset((row, key) for row, keys in seen(case.problem) for key in keys)


def visibility_difference(case: Case, got_pairs: Iterable[Pair] | None) -> Difference:
    """The part of the mask that a picture shows: all of it, or the part around the first wrong pair.

    Args:
        got_pairs: the pairs that were seen; None when that is not known.

    >>> from cp_ref.schedules.problem import Problem, Sequence
    >>> found = visibility_difference(Case(Problem(1, (Sequence(2, 2, 2, 2),))), [(0, 0), (0, 1), (1, 1)])
    >>> sorted(found.expected - found.seen), sorted(found.seen - found.expected), found.wrong
    ([(1, 0)], [(0, 1)], (1, 1))

    Raises:
        ValueError: a pair lies outside the buffers.
    """
    expected, n, m = visible(case), case.rows("q"), case.rows("kv")
    got = expected if got_pairs is None else frozenset((q, k) for q, k in got_pairs)
    for q, k in got - expected:
        if not (0 <= q < n and 0 <= k < m):
            raise ValueError(f"the pair {(q, k)} is outside the buffers of {n} queries and {m} keys of {case}")
    missing, extra = expected - got, got - expected
    q, k = min(missing | extra, default=(0, 0))
    rows, columns = _around(q, n), _around(k, m)
    inside = frozenset(product(rows, columns))
    wrong = None if got_pairs is None else (len(missing), len(extra))
    return Difference(rows, columns, len(inside) == n * m, expected & inside, got & inside, wrong)


def _around(at: int, size: int) -> range:
    """At most `MOST` of [0, size), `at` in the middle unless an end is near."""
    start = max(0, min(at - MOST // 2, size - MOST))
    return range(start, min(size, start + MOST))


# ---- failures


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
        """The number of failing problems of the run that shrank to it."""
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
    """The features that separate failing from passing cases, the most telling first; nothing where none does.

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
