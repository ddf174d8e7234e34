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
from conformance.draw.draw_problems import Draw, OnProblem, Profile
from conformance.draw.strategies import CP_SIZES, cases
from conformance.judge.run_record import FAILING, Level, Played, TierResult
from conformance.levels import LEVEL_TIERS
from conformance.run.play_problem import InProcess, Runner, Task, task_of
from conformance.tiers import CASE_TIERS, TABLE_TIERS
from cp_ref.schedules.problem import Problem

__all__ = ["PROFILES", "Profile", "TierResult", "replay", "run_tier"]


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
    runner, result = _runner(impl, capabilities.device), TierResult(tier_name)
    if tier_name in TABLE_TIERS:
        table = TABLE_TIERS[tier_name]
        for entry in table.ids(capabilities) if items is None else items:
            result.played.append(runner.play(Task("schedule", tier_name, f"{table.word} {entry}")))
            on_problem()
        result.seconds = sum(played.seconds for played in result.played)
        return result
    if tier_name in LEVEL_TIERS:
        level_tier = LEVEL_TIERS[tier_name]
        if capabilities.device != "cpu" and level_tier.most_on_gpu is not None:
            profile = replace(profile, max_examples=min(profile.max_examples, level_tier.most_on_gpu))
        for item in level_tier.parts if items is None else items:
            part = _drawn_problems(
                runner, level_tier.level, tier_name, level_tier.strategy(item, cp_sizes), profile, on_problem
            )
            result.played += part.played
            result.seconds += part.seconds
            result.note = "; ".join(filter(None, (result.note, part.note)))
        return result
    tier = CASE_TIERS[tier_name]
    dtypes = tier.dtypes_of(capabilities)
    if not dtypes:
        return TierResult(tier_name, note=f"none of {', '.join(tier.dtypes)} is supported")
    if tier.made is not None:
        return _made_problems(runner, tier_name, tier.made(capabilities, cp_sizes), profile, on_problem)
    strategy = cases(capabilities, cp_sizes=cp_sizes, dtypes=dtypes).map(lambda c: narrowed(c, capabilities))
    return _drawn_problems(runner, "schedule", tier_name, strategy, profile, on_problem)


def _drawn_problems(
    runner: Runner,
    level: Level,
    tier_name: str,
    strategy: SearchStrategy[Any],
    profile: Profile,
    on_problem: OnProblem,
) -> TierResult:
    """Draw problems of one strategy and play them, until `profile.max_examples` were judged.

    Other problems replace the refused ones, up to `_MOST_DRAWN` times `profile.max_examples` in all. A failure is
    shrunk; then drawing goes on without the problems that have all the features of the smallest one, until
    `profile.most_failures` are found. A missing function is played once.
    """
    result, began, explained = TierResult(tier_name), time.monotonic(), []
    for draws in count():
        left = min(profile.max_examples - result.judged, _MOST_DRAWN * profile.max_examples - result.run)
        if left <= 0 or len(explained) == profile.most_failures or result.count("missing"):
            break
        draw = Draw(runner, level, tier_name, on_problem)
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
    result.seconds = time.monotonic() - began
    return result


def _made_problems(
    runner: Runner, tier_name: str, made: Iterable[Case], profile: Profile, on_problem: OnProblem
) -> TierResult:
    """Play given cases, at most the number that a tier would draw. After a failure, cases with all features of its
    smallest problem are left out.
    """
    result, began, explained = TierResult(tier_name), time.monotonic(), []
    for case in islice(made, _MOST_DRAWN * profile.max_examples):
        if any(features <= distinctive_features(case) for features in explained):
            continue
        result.played.append(played := runner.play(Task("schedule", tier_name, str(case))))
        on_problem()
        if played.verdict in FAILING:
            give_up_at = time.monotonic() + profile.shrink_s
            smallest, small = _plainest(case, played, runner, give_up_at)
            result.played.append(replace(small, shrunk=True))
            explained.append(distinctive_features(smallest))
        if played.verdict == "missing" or len(explained) == profile.most_failures:
            break
    result.seconds = time.monotonic() - began
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
    for task in task_of(text):
        if task.tier in CASE_TIERS and tier_names and task.tier not in tier_names:
            continue
        played = _runner(impl, device).play(task)
        note = "; ".join(played.findings) if played.verdict in ("unsupported", "missing", "known") else ""
        results.append(TierResult(task.tier, [played], played.seconds, note))
    return results


def _runner(impl: Any, device: str) -> Runner:
    """The runner, or one that plays the implementation here."""
    return impl if hasattr(type(impl), "play") else InProcess(impl, device)
