"""Playing one problem: from its text to a verdict. A worker process needs only these texts.

Task("schedule", "logic", "Case(...)")    ->    Played(..., verdict="right")
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from conformance.case import Case
from conformance.checks.hygiene import context_error, forked, forks_of, settings_restored
from conformance.checks.probes import observed_pairs
from conformance.checks.reference import UnsupportedCase, Watch, describe_error, is_out_of_memory, watching
from conformance.implementation import Implementation, Missing, as_implementation
from conformance.problems.capabilities import Capabilities, probe
from conformance.problems.malformed import MalformedCall
from conformance.problems.problem import NamedProblem, Raised, SuiteProblem
from conformance.record import FAILING, Judged, Level, Played, Verdict
from conformance.runner.tiers import TIERS, tiers_of

__all__ = ["InProcess", "Offer", "Pairs", "Patience", "Runner", "Task", "pairs_of", "play_task", "tasks_of"]

Pairs = tuple[tuple[int, int], ...]
_MOST_HUNG = 2.5  # Times the limit: three hangs, or dozens of problems with one rank that raised while others wait.
_WHOLE: tuple[Verdict, ...] = ("unsupported", "missing")  # Such a verdict on an entry holds for all its problems.


@dataclass(frozen=True)
class Task:
    """A problem, and what is to judge it. The text is what `--repro` takes."""

    level: Level
    tier: str
    text: str


class Runner(Protocol):
    """Plays problems, here or elsewhere."""

    @property
    def info(self) -> Offer:
        """The levels and members that the implementation offers."""
        ...

    def capabilities(self) -> Capabilities:
        """The capabilities of its `attention`. Raises ValueError when it supports no plain problem."""
        ...

    def play(self, task: Task) -> Played:
        """Play a problem. Never raises for what the implementation does; ValueError for a task that means nothing."""
        ...

    def pairs(self, case: str) -> Pairs | None:
        """The (query, key) pairs that carried weight in a small case (see `conformance.checks.probes`); None where
        the runner cannot say.
        """
        ...

    def close(self) -> None:
        """End what was started."""
        ...


@dataclass(frozen=True)
class Offer:
    """The levels and members that an implementation offers, as data; see `conformance.implementation`."""

    levels: tuple[Level, ...]
    missing: tuple[str, ...]
    group_kind: str

    @staticmethod
    def of(impl: Implementation) -> Offer:
        """The offer of an implementation."""
        return Offer(impl.levels, impl.missing, impl.group_kind)


class Patience:
    """Ends the playing of a level whose problems hang one after the other, so that few time limits are spent."""

    def __init__(self, limit_s: float) -> None:
        self._most_s = _MOST_HUNG * limit_s
        self._hung_s: dict[Level, float] = defaultdict(float)  # Since the last problem that ended.

    def play(self, task: Task, play: Callable[[Task], Played]) -> Played:
        """`play(task)`; "missing" where the level is given up."""
        if (seconds := self._hung_s[task.level]) > self._most_s:
            words = f"not played: the problems of the level {task.level} before it hung, for {seconds:.0f} s together"
            return Played(task.level, task.tier, task.text, "missing", (words,))
        played = play(task)
        self._hung_s[task.level] = seconds + played.seconds if played.verdict == "hung" else 0.0
        return played


class InProcess:
    """Plays in this process. A crash takes it along; a hanging problem leaves its threads behind."""

    def __init__(self, impl: Any, device: str = "cpu", limit_s: float = float("inf")) -> None:
        self._impl, self._device, self._limit_s = as_implementation(impl), device, limit_s
        self._patience = Patience(limit_s)
        if self._impl.group_kind == "process":
            raise ValueError(f"{self._impl.name} has group_kind 'process': every rank needs a process of its own")

    @property
    def info(self) -> Offer:
        """The levels and members that the implementation offers."""
        return Offer.of(self._impl)

    def capabilities(self) -> Capabilities:
        """The capabilities of its `attention`."""
        with watching(self._limit_s):
            return probe(self._impl, self._device)

    def play(self, task: Task) -> Played:
        """Play a problem; "missing" when earlier ones hung, or ended this process's context on the GPU."""
        return self._patience.play(task, self._play)

    def _play(self, task: Task) -> Played:
        if reason := context_error(self._device):
            words = f"an earlier problem ended this process's use of the GPU ({reason}): play in worker processes"
            return Played(task.level, task.tier, task.text, "missing", (words,))
        return play_task(self._impl, task, self._device, self._limit_s)

    def pairs(self, case: str) -> Pairs | None:
        """The (query, key) pairs that carried weight."""
        return pairs_of(self._impl, case, self._device, self._limit_s)

    def close(self) -> None:
        """Do nothing: this runner starts no process."""


def pairs_of(impl: Implementation, case: str, device: str, limit_s: float = float("inf")) -> Pairs | None:
    """The (query, key) pairs that carried weight in a small case; None where the runner cannot say."""
    try:
        with watching(limit_s):
            return observed_pairs(impl, Case.parse(case), device)
    except Exception:  # A picture is an extra: this failure has been reported before.
        return None


def play_task(impl: Implementation, task: Task, device: str = "cpu", limit_s: float = float("inf")) -> Played:
    """Play a problem and say how it went.

    Args:
        limit_s: when ranks that do not finish are given up, in seconds.

    Raises:
        ValueError: there is no such tier or entry, or the text cannot be read.
    """
    problem = next((problem for tier, problem in tiers_of(task.text) if tier.name == task.tier), None)
    if problem is None:
        raise ValueError(f"the tier {task.tier!r} does not play {task.text!r}")
    tier = TIERS[task.tier]
    began, forks = time.monotonic(), forks_of(os.getpid())
    if absent := tier.absent(impl):
        reason = f"the implementation does not offer {absent}"
        return Played(task.level, task.tier, task.text, "missing", (reason,), cases=_cases(problem, "missing"))
    judged: list[str] = []
    with watching(limit_s) as watch, settings_restored():
        try:
            judged = tier.check(impl, problem, device)
            verdict, findings = _verdict(judged, watch)
            anyway = isinstance(problem, MalformedCall) and verdict == "wrong" and problem.refused_anyway(impl, device)
            if anyway:
                verdict, findings = "unsupported", [anyway]
        except UnsupportedCase as refusal:
            verdict, findings = "unsupported", [str(refusal)]
        except Missing as missing:
            verdict, findings = "missing", [str(missing)]
        except Raised as raised:
            verdict, findings = "wrong", [str(raised)]
        except (Exception, SystemExit) as error:  # The oracle refused the case, or the suite itself is wrong.
            verdict, findings = "wrong", [f"the suite could not judge this case: {describe_error(error)}"]
            if is_out_of_memory(error):
                verdict, findings = "out of memory", [describe_error(error)]
    if copies := forks_of(os.getpid()) - forks:
        findings.insert(0, forked(copies))
        verdict = "wrong"
        for pid in copies:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    more = judged if isinstance(judged, Judged) else Judged()
    seconds = round(time.monotonic() - began, 4)
    cases = _cases(problem, verdict, more.cases)
    return Played(task.level, task.tier, task.text, verdict, tuple(findings), more.ratios, seconds, cases=cases)


def _cases(
    problem: SuiteProblem, verdict: Verdict, judged: Mapping[str, Verdict] | None = None
) -> tuple[tuple[str, Verdict], ...]:
    """The verdict on each case of a named problem; of one that failed in another way than being wrong, that."""
    if judged:
        became = dict(judged)
        if verdict in (*FAILING, "missing"):
            became |= {case: verdict for case, one in became.items() if one == "wrong"}
        return tuple(became.items())
    cases = problem.cases if isinstance(problem, NamedProblem) else ()
    return tuple((str(case), verdict) for case in cases) if verdict in _WHOLE or len(cases) == 1 else ()


def _verdict(judged: list[str], watch: Watch) -> tuple[Verdict, list[str]]:
    """A tier sees that ranks raised; whether it was for want of memory, time or a member, the watch knows."""
    if not judged:
        return "right", []
    if watch.out_of_memory:
        return "out of memory", watch.out_of_memory + [f for f in judged if "out of memory" not in f.lower()]
    if watch.hung:
        return "hung", list(judged)
    if watch.missing:
        return "missing", sorted(set(watch.missing))
    return "wrong", list(judged)


def tasks_of(text: str) -> list[Task]:
    """The tasks of a `--repro` text, one for each tier that plays it.

    Raises:
        ValueError: the text cannot be read.
    """
    return [Task(tier.level, tier.name, text.strip()) for tier, _ in tiers_of(text)]
