"""Running tiers: draws problems with Hypothesis, plays them, and looks for the smallest that fails.

Hypothesis runs in `conformance.runner.run_tiers`; where a problem is played is the runner's affair
(`conformance.runner.play_problem`, `conformance.runner.workers`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count, islice
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.strategies import SearchStrategy

from conformance.case import Case
from conformance.problems.capabilities import Capabilities
from conformance.problems.features import distinctive_features
from conformance.problems.problem import SuiteProblem
from conformance.problems.strategies import CP_SIZES
from conformance.record import FAILING, Played, TierResult
from conformance.runner.play_problem import InProcess, Runner, Task, tasks_of
from conformance.runner.tiers import TIERS, Tier
from cp_ref.schedules.problem import Problem

__all__ = ["PROFILES", "Draw", "OnProblem", "Profile", "replay", "run_tier"]


@dataclass(frozen=True)
class Profile:
    """How many problems each tier draws, and whether they are the same ones every time.

    `most_failures` is how many different failures a tier looks for, and `shrink_s` how long it makes each of them
    smaller, in seconds (0: not at all). `seed` fixes what is drawn when `derandomize` does not.
    """

    max_examples: int
    derandomize: bool
    most_failures: int = 1
    shrink_s: float = 30.0
    seed: int | None = None


OnProblem = Callable[[], None]


class _Failed(AssertionError):
    """The exception of the drawn test; `Draw` stores the problem."""


class _Enough(BaseException):
    """Ends a test whose function is missing; Hypothesis would catch an `Exception`."""


class Draw:
    """One Hypothesis test: it ends with its first failure, after the failure is shrunk.

    Attributes:
        drawn: the problems played until the first failure.
        smallest: the smallest failure, or None; `smallest_problem` is its problem.
        note: the complaint of Hypothesis, if any.
    """

    def __init__(self, runner: Runner, tier: Tier, on_problem: OnProblem) -> None:
        self._runner, self._tier, self._on_problem = runner, tier, on_problem
        self._failing: dict[str, Played] = {}
        self._give_up_at, self._shrink_s = float("inf"), 0.0
        self.drawn: list[Played] = []
        self.smallest: Played | None = None
        self.smallest_problem: Any = None
        self.note = ""

    def draw(self, strategy: SearchStrategy[Any], profile: Profile, explained: list[frozenset[str]]) -> None:
        """Draw and play; problems that have all features of one of `explained` are left out."""
        self._shrink_s = profile.shrink_s

        @settings(
            max_examples=profile.max_examples,
            derandomize=profile.derandomize and profile.seed is None,
            deadline=None,
            database=None,
            print_blob=True,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink] if profile.shrink_s else [Phase.generate],
            verbosity=Verbosity.quiet,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        )
        @given(strategy)
        def one_problem(problem: Any) -> None:
            if any(features <= distinctive_features(problem) for features in explained):
                return
            self._one(problem)

        try:
            (one_problem if profile.seed is None else hypothesis.seed(profile.seed)(one_problem))()
        except _Enough:
            return
        except Exception as error:
            if self.smallest is None:
                raise
            if not isinstance(error, _Failed):
                self.note = f"{type(error).__name__}: {error}"  # Hypothesis found it flaky, say

    def irrelevant_features(self) -> frozenset[str]:
        """The dtype of the smallest failing case, if it fails in another one too: then it does not matter."""
        case = self.smallest_problem
        if not isinstance(case, Case):
            return frozenset()
        for dtype in self._tier.dtypes:
            other = replace(case, problem=replace(case.problem, dtype=dtype))
            if other != case and self._runner.play(_task(self._tier, other)).verdict == "right":
                return frozenset()
        return frozenset({f"dtype {case.problem.dtype}"})

    def _one(self, problem: Any) -> None:
        text = str(problem)
        if text not in self._failing:
            if time.monotonic() > self._give_up_at:  # enough shrinking: only what is known to fail still does
                return
            played = self._runner.play(_task(self._tier, problem))
            if not self._failing:
                self.drawn.append(played)
                if played.verdict != "unsupported":  # others are drawn in its place
                    self._on_problem()
                if played.verdict == "missing":
                    raise _Enough
            if played.verdict not in FAILING:
                return
            self._failing[text] = played
            self._give_up_at = min(self._give_up_at, time.monotonic() + self._shrink_s)
        self.smallest, self.smallest_problem = self._failing[text], problem
        raise _Failed


_MOST_DRAWN = 5  # for an implementation that refuses most problems
_KEPT = ("cp_size", "sequences", "dtype", "heads_q", "heads_kv")
_PLAIN: dict[str, dict[str, Any]] = {
    "case": {f.name: f.default for f in fields(Case) if f.name != "problem"},
    "problem": {f.name: f.default for f in fields(Problem) if f.name not in _KEPT},
}

PROFILES = {"quick": Profile(60, True), "ci": Profile(500, True), "nightly": Profile(5000, False)}


def run_tier(
    impl: Any,
    tier_name: str,
    capabilities: Capabilities,
    profile: Profile,
    *,
    items: Iterable[str] | None = None,
    cp_sizes: Sequence[int] = CP_SIZES,
    on_problem: OnProblem = lambda: None,
) -> TierResult:
    """Play a tier: draw problems until `profile.max_examples` have passed or one fails, or play its table.

    Args:
        impl: a `Runner`, or an implementation, which is played in this process.
        tier_name: of any level. The tiers of the lower levels read the device alone from `capabilities`.
        items: the functions of a lower level, or the entries of a table; None for all.
        on_problem: called after every problem, shrinking left out.
    """
    runner, result, tier = _runner(impl, capabilities.device), TierResult(tier_name), TIERS[tier_name]
    if tier.dtypes and not tier.dtypes_of(capabilities):
        return TierResult(tier_name, note=f"none of {', '.join(tier.dtypes)} is supported")
    if capabilities.device != "cpu" and tier.most_on_gpu is not None:
        profile = replace(profile, max_examples=min(profile.max_examples, tier.most_on_gpu))
    for item in tier.items(capabilities) if items is None else items:
        drawn, began = tier.problems(item, capabilities, cp_sizes), time.monotonic()
        if isinstance(drawn, SearchStrategy):
            part = _drawn_problems(runner, tier, drawn, profile, on_problem)
        else:
            part = _made_problems(runner, tier, drawn, profile, on_problem)
        result.played += part.played
        result.seconds += time.monotonic() - began
        result.note = "; ".join(filter(None, (result.note, part.note)))
    return result


def _task(tier: Tier, problem: SuiteProblem) -> Task:
    return Task(tier.level, tier.name, str(problem))


def _drawn_problems(
    runner: Runner, tier: Tier, strategy: SearchStrategy[Any], profile: Profile, on_problem: OnProblem
) -> TierResult:
    """Draw problems of one strategy and play them, until `profile.max_examples` were judged.

    Other problems replace the refused ones, up to `_MOST_DRAWN` times `profile.max_examples` in all. A failure is
    shrunk; then drawing goes on without the problems that have all the features of the smallest one, until
    `profile.most_failures` are found. A missing function is played once.
    """
    result, explained = TierResult(tier.name), list[frozenset[str]]()
    for draws in count():
        left = min(profile.max_examples - result.judged, _MOST_DRAWN * profile.max_examples - result.run)
        if left <= 0 or len(explained) == profile.most_failures or result.count("missing"):
            break
        draw = Draw(runner, tier, on_problem)
        seed = (profile.seed or 0) + draws if draws else profile.seed  # other problems each time
        draw.draw(strategy, replace(profile, max_examples=left, seed=seed), [*explained])
        result.played += draw.drawn
        result.note = result.note or draw.note
        if draw.smallest is None:
            if len(draw.drawn) < left or not any(p.verdict == "unsupported" for p in draw.drawn):
                break
            continue
        result.played.append(replace(draw.smallest, shrunk=True))
        features = distinctive_features(draw.smallest_problem) - draw.irrelevant_features()
        if not features:  # the plainest problem fails: so will all
            break
        explained.append(features)
    return result


def _made_problems(
    runner: Runner, tier: Tier, made: Iterable[SuiteProblem], profile: Profile, on_problem: OnProblem
) -> TierResult:
    """Play given problems, at most the number that a tier would draw. After a failure of a case, cases with all
    features of its smallest form are left out.
    """
    result, explained = TierResult(tier.name), list[frozenset[str]]()
    for problem in islice(made, _MOST_DRAWN * profile.max_examples):
        if any(features <= distinctive_features(problem) for features in explained):
            continue
        result.played.append(played := runner.play(_task(tier, problem)))
        on_problem()
        if played.verdict in FAILING and isinstance(problem, Case):
            give_up_at = time.monotonic() + profile.shrink_s
            smallest, small = _plainest(problem, played, runner, give_up_at)
            result.played.append(replace(small, shrunk=True))
            explained.append(distinctive_features(smallest))
        if played.verdict == "missing" or len(explained) == profile.most_failures:
            break
    return result


def _plainest(case: Case, played: Played, runner: Runner, give_up_at: float) -> tuple[Case, Played]:
    """The failing case with every field that it does not need to fail at its default."""
    for owner in ("problem", "case"):
        for name, plain in _PLAIN[owner].items():
            try:
                problem = replace(case.problem, **{name: plain}) if owner == "problem" else case.problem
                other = replace(case, problem=problem) if owner == "problem" else replace(case, **{name: plain})
            except ValueError:  # not without another field
                continue
            if other == case or time.monotonic() > give_up_at:
                continue
            again = runner.play(Task("schedule", played.tier, str(other)))
            if again.verdict in FAILING:
                case, played = other, again
    return case, played


def replay(impl: Any, text: str, tier_names: Sequence[str] = (), device: str = "cpu") -> list[TierResult]:
    """Play one problem again: `text` is what a failure printed.

    Args:
        impl: a `Runner`, or an implementation, which is played in this process.
        tier_names: for a `Case(...)`, the tiers that play it; all without any. Other texts name their tier.

    Returns:
        One result for each of the tiers.

    Raises:
        ValueError: the text cannot be read, or names nothing.
    """
    results = []
    for task in tasks_of(text):
        if TIERS[task.tier].kind is Case and tier_names and task.tier not in tier_names:
            continue
        played = _runner(impl, device).play(task)
        note = "; ".join(played.findings) if played.verdict in ("unsupported", "missing", "known") else ""
        results.append(TierResult(task.tier, [played], played.seconds, note))
    return results


def _runner(impl: Any, device: str) -> Runner:
    """The runner, or one that plays the implementation here."""
    return impl if hasattr(type(impl), "play") else InProcess(impl, device)
