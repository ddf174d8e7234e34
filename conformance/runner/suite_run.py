"""A whole run: every level and tier that an implementation is asked about, and the record of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis.strategies import SearchStrategy

from conformance.problems.capabilities import EVERYTHING, Capabilities
from conformance.problems.problem import NamedProblem
from conformance.problems.strategies import CP_SIZES
from conformance.record import FAILING, LEVELS, Played, RunRecord, TierResult, what_runs
from conformance.runner.known_failures import KnownFailures
from conformance.runner.play_problem import Offer, Pairs, Runner, Task
from conformance.runner.run_tiers import Profile, replay, run_tier
from conformance.runner.tiers import TIERS, tiers_of

__all__ = ["ALL_TIERS", "Part", "SuiteRun", "describe_run", "nothing_tested", "parts", "play_part"]

ALL_TIERS: tuple[str, ...] = tuple(TIERS)


@dataclass
class SuiteRun:
    """How an implementation is played.

    Attributes:
        runner: plays its problems.
        profile: how much is drawn.
        tiers: which of `ALL_TIERS`.
        cp_sizes: the group sizes that are drawn.
        known_failures: the failures that do not make the run fail.
    """

    runner: Runner
    profile: Profile
    tiers: Sequence[str] = ALL_TIERS
    cp_sizes: tuple[int, ...] = CP_SIZES
    device: str = "cpu"
    known_failures: KnownFailures = field(default_factory=KnownFailures)

    def __post_init__(self) -> None:
        """Known failures are judged, and problems in quarantine are not played."""
        self.judged = _Judged(self.runner, self.known_failures)
        self._capabilities: Capabilities | None = None

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the implementation's `attention`; asked once."""
        if self._capabilities is None:
            self._capabilities = self.runner.capabilities()
        return self._capabilities

    def results(self, on_problem: Callable[[str], None] = lambda tier: None) -> Iterator[TierResult]:
        """Play tier after tier. A level that is not offered is one problem of the verdict "missing".

        Args:
            on_problem: called with the tier's name after every problem, shrinking left out.

        Raises:
            ValueError: the implementation supports no plain problem at all.
        """
        for level in LEVELS:
            tiers = [tier for tier in self.tiers if TIERS[tier].level == level]
            for tier in tiers if level in self.runner.info.levels else tiers[:1]:
                yield self.play(tier, on_problem=lambda tier=tier: on_problem(tier))

    def play(
        self, tier: str, items: Iterable[str] | None = None, on_problem: Callable[[], None] = lambda: None
    ) -> TierResult:
        """Play one tier, or some `items` of it. Raises ValueError like `results`."""
        level = TIERS[tier].level
        if level not in self.runner.info.levels:
            reason = f"the implementation does not offer the level {level}"
            return TierResult(tier, [Played(level, tier, f"level {level}", "missing", (reason,))], note=reason)
        capabilities = self.capabilities if level == "schedule" else replace(EVERYTHING, device=self.device)
        result = run_tier(
            self.judged, tier, capabilities, self.profile, items=items, cp_sizes=self.cp_sizes, on_problem=on_problem
        )
        for n, played in enumerate(result.played):
            if played.shrunk and played.verdict == "wrong" and played.text.startswith("Case("):
                result.played[n] = replace(played, pairs=self.runner.pairs(played.text))  # for the report
        return result

    def expected(self, tier: str) -> int:
        """How many problems the tier will play, if none fails."""
        each, capabilities = TIERS[tier], self.capabilities if TIERS[tier].level == "schedule" else EVERYTHING
        count = 0
        for item in each.items(capabilities):
            drawn = each.problems(item, capabilities, self.cp_sizes)
            count += self.profile.max_examples if isinstance(drawn, SearchStrategy) else sum(1 for _ in drawn)
        return count

    def replay(self, text: str, tier_names: Sequence[str] = ()) -> list[TierResult]:
        """Play one problem again; see `conformance.replay`."""
        if any(isinstance(problem, NamedProblem) for _, problem in tiers_of(text)):  # adapted to the capabilities
            _ = self.capabilities
        return replay(self.judged, text, tier_names, self.device)

    def strict(self, results: Iterable[TierResult]) -> list[TierResult]:
        """A result for the known failures themselves: every entry whose problems all passed is wrong."""
        record = RunRecord({}, tuple(p for result in results for p in result.played))
        stale = self.known_failures.unexpected_passes(record)
        played = [Played("schedule", "known failures", sentence, "wrong", (sentence,)) for sentence in stale]
        return [TierResult("known failures", played)] if played else []


class _Judged(Runner):
    """A runner that does not play problems in quarantine, and gives known failures their verdict."""

    def __init__(self, runner: Runner, known_failures: KnownFailures) -> None:
        self._runner, self._known_failures = runner, known_failures

    @property
    def info(self) -> Offer:
        return self._runner.info

    def capabilities(self) -> Capabilities:
        return self._runner.capabilities()

    def pairs(self, case: str) -> Pairs | None:
        return self._runner.pairs(case)

    def close(self) -> None:
        self._runner.close()

    def play(self, task: Task) -> Played:
        problem = tiers_of(task.text)[0][1]
        named = tuple(str(case) for case in problem.cases) if isinstance(problem, NamedProblem) else ()
        reason = self._known_failures.quarantined(task.text, level=task.level, tier=task.tier, cases=named)
        if reason is not None:
            return Played(task.level, task.tier, task.text, "known", (reason,))
        return self._known_failures.judge(self._runner.play(task))


def nothing_tested(results: Iterable[TierResult]) -> bool:
    """Whether no problem at all was computed."""
    return not any(result.count("right", "known", *FAILING) for result in results)


def describe_run(impl: Any, profile: str, suite_run: SuiteRun, options: Sequence[str] = ()) -> dict[str, Any]:
    """The implementation, versions and machine of a run, for the record's `meta`.

    Args:
        impl: the implementation's name, or an object, which has none that a command line could take.
        options: what a command needs beside name, device and problem to play a problem as it was played; see
            `conformance.record.replay_command`.
    """
    name = impl if isinstance(impl, str) else repr(impl)
    return {
        "impl": name,
        "by_name": isinstance(impl, str),
        "options": list(options),
        "profile": profile,
        "max_examples": suite_run.profile.max_examples,
        "seed": suite_run.profile.seed,
        "cp_sizes": list(suite_run.cp_sizes),
        "levels": list(suite_run.runner.info.levels),
        "missing": list(suite_run.runner.info.missing),
    } | what_runs(suite_run.device, "hypothesis", name.partition(":")[0].partition(".")[0])


_REFUSALS = "everything that is refused"  # which choices these are, only the implementation knows


@dataclass(frozen=True)
class Part:
    """A tier, or an item of it."""

    tier: str
    item: str = ""

    def __str__(self) -> str:
        return f"{self.tier}-{self.item}" if self.item else self.tier


def parts(tiers: Sequence[str] | None = None) -> list[Part]:
    """All parts, or those of some tiers.

    Raises:
        ValueError: there is no such tier.
    """
    if unknown := [tier for tier in tiers or () if tier not in ALL_TIERS]:
        raise ValueError(f"there is no tier {', '.join(unknown)}; there are: {', '.join(ALL_TIERS)}")
    found: list[Part] = []
    for tier in tiers or ALL_TIERS:
        found += [Part(tier, item) for item in TIERS[tier].items(EVERYTHING)]
        found += [Part(tier, _REFUSALS)] if tier == "errors" else []
    return found


def play_part(suite_run: SuiteRun, part: Part) -> TierResult:
    """Play a part.

    Raises:
        ValueError: the implementation supports no plain problem at all.
    """
    if part.item != _REFUSALS or TIERS[part.tier].level not in suite_run.runner.info.levels:
        return suite_run.play(part.tier, [part.item] if part.item else None)
    known, there = (TIERS[part.tier].items(capabilities) for capabilities in (EVERYTHING, suite_run.capabilities))
    return suite_run.play(part.tier, [entry for entry in there if entry not in known])
