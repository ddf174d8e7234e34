"""Hypothesis draws problems, a runner plays them until one fails, and Hypothesis makes that one smaller."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.strategies import SearchStrategy

from conformance.case import Case
from conformance.draw.distinctive import distinctive_features
from conformance.judge.run_record import FAILING, Level, Played
from conformance.run.play_problem import Runner, Task
from conformance.tiers import CASE_TIERS

__all__ = ["Draw", "OnProblem", "Profile"]


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

    def __init__(self, runner: Runner, level: Level, tier: str, on_problem: OnProblem) -> None:
        self._runner, self._tier, self._on_problem = runner, tier, on_problem
        self._level: Level = level
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
        for dtype in CASE_TIERS[self._tier].dtypes:
            other = replace(case, problem=replace(case.problem, dtype=dtype))
            if other != case and self._runner.play(Task(self._level, self._tier, str(other))).verdict == "right":
                return frozenset()
        return frozenset({f"dtype {case.problem.dtype}"})

    def _one(self, problem: Any) -> None:
        text = str(problem)
        if text not in self._failing:
            if time.monotonic() > self._give_up_at:  # enough shrinking: only what is known to fail still does
                return
            played = self._runner.play(Task(self._level, self._tier, text))
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
