"""A whole run: every level and tier that an implementation is asked about, and the record of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.commands import what_runs
from conformance.draw.capabilities import EVERYTHING, Capabilities
from conformance.draw.strategies import CP_SIZES
from conformance.judge.known_failures import KnownFailures
from conformance.judge.run_record import FAILING, LEVELS, Level, Played, RunRecord
from conformance.levels import LEVEL_TIERS
from conformance.run.play_problem import Offer, Pairs, Runner, Task
from conformance.run.run_tiers import Profile, TierResult, replay, run_tier
from conformance.tiers import CASE_TIERS, TABLE_TIERS, cases_of, table_entry

__all__ = ["ALL_TIERS", "SuiteRun", "describe_run", "level_of", "nothing_tested"]

ALL_TIERS: tuple[str, ...] = (*LEVEL_TIERS, *CASE_TIERS, *TABLE_TIERS)


def level_of(tier: str) -> Level:
    """The level that a tier belongs to."""
    return LEVEL_TIERS[tier].level if tier in LEVEL_TIERS else "schedule"


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
            tiers = [tier for tier in self.tiers if level_of(tier) == level]
            for tier in tiers if level in self.runner.info.levels else tiers[:1]:
                yield self.play(tier, on_problem=lambda tier=tier: on_problem(tier))

    def play(
        self, tier: str, items: Iterable[str] | None = None, on_problem: Callable[[], None] = lambda: None
    ) -> TierResult:
        """Play one tier, or some `items` of it. Raises ValueError like `results`."""
        level = level_of(tier)
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
        if tier in LEVEL_TIERS:
            return self.profile.max_examples * len(LEVEL_TIERS[tier].parts)
        if tier in CASE_TIERS and (made := CASE_TIERS[tier].made) is not None:
            return sum(1 for _ in made(self.capabilities, self.cp_sizes))
        return len(TABLE_TIERS[tier].ids(self.capabilities)) if tier in TABLE_TIERS else self.profile.max_examples

    def replay(self, text: str, tier_names: Sequence[str] = ()) -> list[TierResult]:
        """Play one problem again; see `conformance.replay`."""
        if table_entry(text) is not None:  # an entry is adapted to the capabilities
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
        named = () if task.text.startswith("Case(") else tuple(str(case) for case in cases_of(task.text))
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
            `conformance.commands.replay_command`.
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
