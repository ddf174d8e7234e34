"""Running tiers: draws problems with Hypothesis, plays them, and looks for the smallest that fails.

Hypothesis runs in `conformance.draw.draw_problems`; where a problem is played is the runner's affair
(`conformance.run.play_problem`, `conformance.run.workers`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import count, islice
from typing import Any

from hypothesis.strategies import SearchStrategy

from conformance.case import Case
from conformance.draw.capabilities import Capabilities, narrowed
from conformance.draw.distinctive import distinctive_features
from conformance.draw.draw_problems import Draw, Judge, OnProblem, Profile, as_it_is
from conformance.draw.strategies import CP_SIZES, cases
from conformance.judge.run_record import FAILING, Level, Played
from conformance.judge.tier_result import TierResult
from conformance.levels import LEVEL_TIERS
from conformance.run.play_problem import InProcess, Runner, Task, task_of
from conformance.tiers import CASE_TIERS, TABLE_TIERS
from cp_ref.spec import Problem

__all__ = [
    "PROFILES",
    "Profile",
    "TierResult",
    "drawn_problems",
    "replay",
    "run_level_tier",
    "run_table",
    "run_tier",
]


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
    cp_sizes: Sequence[int] = CP_SIZES,
    shrink: bool = True,
    on_problem: OnProblem = lambda: None,
    judge: Judge = as_it_is,
) -> TierResult:
    """Draw cases until `profile.max_examples` have passed or one fails; then look for the smallest that fails.

    Args:
        impl: a `Runner`, or an implementation, which is played in this process.
        tier_name: one of `CASE_TIERS`.
        shrink: whether to look for a smaller failing case, or to keep the first.
        on_problem: called after every problem, shrinking left out.
        judge: has the last word on what was played, such as `KnownFailures.judge`.
    """
    tier = CASE_TIERS[tier_name]
    dtypes = tier.dtypes_of(capabilities)
    if not dtypes:
        return TierResult(tier_name, note=f"none of {', '.join(tier.dtypes)} is supported")
    if tier.made is not None:
        made = tier.made(capabilities, cp_sizes)
        return _made_problems(_runner(impl, capabilities.device), tier_name, made, profile, on_problem, judge)
    strategy = cases(capabilities, cp_sizes=cp_sizes, dtypes=dtypes).map(lambda c: narrowed(c, capabilities))
    runner = _runner(impl, capabilities.device)
    return drawn_problems(
        runner, "schedule", tier_name, strategy, profile, shrink=shrink, on_problem=on_problem, judge=judge
    )


def run_level_tier(
    impl: Any,
    tier_name: str,
    profile: Profile,
    device: str = "cpu",
    *,
    shrink: bool = True,
    on_problem: OnProblem = lambda: None,
    judge: Judge = as_it_is,
) -> TierResult:
    """A tier of a lower level, `LEVEL_TIERS`: `profile.max_examples` problems of each of its functions (on a GPU, a few
    where each costs a process).
    """
    tier, total = LEVEL_TIERS[tier_name], TierResult(tier_name)
    if device != "cpu" and tier.most_on_gpu is not None:
        profile = replace(profile, max_examples=min(profile.max_examples, tier.most_on_gpu))
    for strategy in tier.parts.values():
        part = drawn_problems(
            _runner(impl, device), tier.level, tier_name, strategy, profile, shrink=shrink, on_problem=on_problem,
            judge=judge,
        )  # fmt: skip
        total.played += part.played
        total.seconds += part.seconds
        total.note = "; ".join(filter(None, (total.note, part.note)))
    return total


def drawn_problems(
    runner: Runner,
    level: Level,
    tier_name: str,
    strategy: SearchStrategy[Any],
    profile: Profile,
    *,
    shrink: bool = True,
    on_problem: OnProblem = lambda: None,
    judge: Judge = as_it_is,
) -> TierResult:
    """Draw problems of one strategy and play them, until `profile.max_examples` were judged.

    Other problems replace the refused ones, up to `_MOST_DRAWN` times `profile.max_examples` in all. A failure is
    shrunk; then drawing goes on without the problems that have all the features of the smallest one, until
    `profile.most_failures` are found. A missing function is played once.
    """
    result, began, explained = TierResult(tier_name), time.monotonic(), []
    for turn in count():
        left = min(profile.max_examples - result.judged, _MOST_DRAWN * profile.max_examples - result.run)
        if left <= 0 or len(explained) == profile.most_failures or result.count("missing"):
            break
        draw = Draw(runner, level, tier_name, judge, on_problem)
        seed = (profile.seed or 0) + turn if turn else profile.seed  # other problems each time
        draw.draw(strategy, replace(profile, max_examples=left, seed=seed), shrink, [*explained])
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
    result.seconds = time.monotonic() - began
    return result


def _made_problems(
    runner: Runner, tier_name: str, made: Iterable[Case], profile: Profile, on_problem: OnProblem, judge: Judge
) -> TierResult:
    """Play given cases, at most the number that a tier would draw. After a failure, cases with all features of its
    smallest problem are left out.
    """
    result, began, explained = TierResult(tier_name), time.monotonic(), []
    for case in islice(made, _MOST_DRAWN * profile.max_examples):
        if any(features <= distinctive_features(case) for features in explained):
            continue
        result.played.append(played := judge(runner.play(Task("schedule", tier_name, str(case)))))
        on_problem()
        if played.verdict in FAILING:
            give_up_at = time.monotonic() + profile.shrink_s
            smallest, small = _plainest(case, played, runner, judge, give_up_at)
            result.played.append(replace(small, shrunk=True))
            explained.append(distinctive_features(smallest))
        if played.verdict == "missing" or len(explained) == profile.most_failures:
            break
    result.seconds = time.monotonic() - began
    return result


def _plainest(case: Case, played: Played, runner: Runner, judge: Judge, give_up_at: float) -> tuple[Case, Played]:
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
            again = judge(runner.play(Task("schedule", played.tier, str(other))))
            if again.verdict in FAILING:
                case, played = other, again
    return case, played


def run_table(
    impl: Any,
    tier_name: str,
    capabilities: Capabilities,
    *,
    on_problem: OnProblem = lambda: None,
    judge: Judge = as_it_is,
) -> TierResult:
    """The whole table of a tier of `TABLE_TIERS`; every failing entry is reported."""
    tier, result, began = TABLE_TIERS[tier_name], TierResult(tier_name), time.monotonic()
    runner = _runner(impl, capabilities.device)
    for entry_id in tier.ids(capabilities):
        result.played.append(judge(runner.play(Task("schedule", tier_name, f"{tier.word} {entry_id}"))))
        on_problem()
    result.seconds = time.monotonic() - began
    return result


def replay(
    impl: Any, text: str, tier_names: Sequence[str] = (), device: str = "cpu", *, judge: Judge = as_it_is
) -> list[TierResult]:
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
    for task in task_of(text):
        if task.tier in CASE_TIERS and tier_names and task.tier not in tier_names:
            continue
        played = judge(_runner(impl, device).play(task))
        note = "; ".join(played.findings) if played.verdict in ("unsupported", "missing", "known") else ""
        results.append(TierResult(task.tier, [played], played.seconds, note))
    return results


def _runner(impl: Any, device: str) -> Runner:
    """The runner, or one that plays the implementation here."""
    return impl if hasattr(type(impl), "play") else InProcess(impl, device)
