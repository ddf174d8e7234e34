"""Playing one problem: from its text to a verdict. A worker process needs only these texts.

Task("schedule", "logic", "Case(...)")    ->    Played(..., verdict="right")
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from conformance.case import Case
from conformance.draw.capabilities import EVERYTHING, Capabilities, probe
from conformance.implementation import LEVEL_MEMBER, Implementation, Missing, as_implementation
from conformance.judge.ranks import UnsupportedCase
from conformance.judge.reference import Hang, Watch, describe_error, is_out_of_memory, run_ranks, watching
from conformance.judge.run_record import FAILING, Judged, Level, Played, Verdict
from conformance.levels import LEVEL_TIERS, Raised
from conformance.run.global_state import context_error, forked, forks_of, kept
from conformance.tiers import CASE_TIERS, TABLE_TIERS, cases_of, table_entry
from conformance.tiers.calls.error_cases import ERRORS
from conformance.tiers.calls.small_calls import call_of

__all__ = ["InProcess", "Offer", "Pairs", "Patience", "Runner", "Task", "pairs_of", "play_task", "task_of"]

Pairs = tuple[tuple[int, int], ...]
_MOST_HUNG = 2.5  # Times the limit: three hangs, or dozens of problems with one rank that raised while others wait.
_WHOLE: tuple[Verdict, ...] = ("unsupported", "missing")  # Such a verdict on an entry holds for all its problems.

# A tier that judges those of these members that exist; the other tiers need `attention`.
_ANY_OF = {"plan": ("make_plan", "shard", "unshard", "position_ids")}


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
        """The (query, key) pairs that carried weight in a small case (see `conformance.report.observed`); None where
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
    from conformance.report import observed_pairs  # Play does not need it: it draws pages.

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
    check = _check_of(task)
    began, forks = time.monotonic(), forks_of(os.getpid())
    if absent := _absent(impl, task):
        reason = f"the implementation does not offer {absent}"
        return Played(task.level, task.tier, task.text, "missing", (reason,), cases=_cases(task, "missing", None))
    judged: list[str] = []
    with watching(limit_s) as watch, kept():
        try:
            judged = check(impl, device)
            verdict, findings = _verdict(judged, watch)
            if verdict == "wrong" and task.tier == "errors" and (reason := _refused_anyway(impl, task, device)):
                verdict, findings = "unsupported", [reason]
        except UnsupportedCase as refusal:
            verdict, findings = "unsupported", [str(refusal)]
        except Missing as missing:
            verdict, findings = "missing", [str(missing)]
        except Raised as raised:
            verdict, findings = "wrong", [str(raised)]
        except ValueError as error:
            if table_entry(task.text) and str(error).startswith("there is no "):
                raise
            verdict, findings = "wrong", [f"the suite could not judge this case: {describe_error(error)}"]
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
    cases = _cases(task, verdict, more)
    return Played(task.level, task.tier, task.text, verdict, tuple(findings), more.ratios, seconds, cases=cases)


def _cases(task: Task, verdict: Verdict, judged: Judged | None) -> tuple[tuple[str, Verdict], ...]:
    """The verdict on each problem of an entry of a table; of one that failed in another way than being wrong, that."""
    if judged is not None and judged.cases:
        became: dict[str, Verdict] = dict(judged.cases)
        if verdict in (*FAILING, "missing"):
            became |= {case: verdict for case, one in became.items() if one == "wrong"}
        return tuple(became.items())
    if table_entry(task.text) is None:
        return ()
    cases = cases_of(task.text)
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


def _refused_anyway(impl: Implementation, task: Task, device: str) -> str:
    """Why the well-formed call that an error entry changes is itself unsupported; empty when it is not."""
    entry = ERRORS.get(task.text.partition(" ")[2].strip())
    for base in ("bshd", "thd") if entry is None else (entry.base,):
        call = call_of(impl, base, device)
        try:
            errors = [o.error for o in run_ranks(2, lambda member, call=call: call.run(impl, member))]
        except Hang:
            return ""
        if all(isinstance(error, impl.Unsupported | NotImplementedError) for error in errors):
            return f"the well-formed call ({base}) is unsupported: {errors[0]}"
    return ""


def _check_of(task: Task) -> Any:
    """The function (impl, device) -> findings that judges the task. Raises ValueError for an unknown tier."""
    if task.level != "schedule":
        level_tier = LEVEL_TIERS[task.tier]
        level_case = level_tier.parse(task.text)
        return lambda impl, device: level_tier.check(impl, level_case, device)
    if (entry := table_entry(task.text)) is not None:
        table, entry_id = entry
        return lambda impl, device: table.check(impl, entry_id, device)
    if task.tier not in CASE_TIERS:
        raise ValueError(f"the tier {task.tier!r} does not play {task.text!r}")
    case = Case.parse(task.text)
    return lambda impl, device: CASE_TIERS[task.tier].check(impl, case, device)


def _absent(impl: Implementation, task: Task) -> str:
    """The members that the task needs and the implementation does not offer; empty when nothing is."""
    absent = [m for m in _ANY_OF.get(task.tier, (LEVEL_MEMBER[task.level],)) if not impl.offers(m)]
    if task.tier in _ANY_OF and len(absent) < len(_ANY_OF[task.tier]):
        return ""
    if not absent and task.level == "helpers":
        name = LEVEL_TIERS[task.tier].parse(task.text).name
        absent = [] if hasattr(impl.thd, name) else [f"thd.{name}"]
    return ", ".join(absent)


def task_of(text: str, tier: str | None = None) -> list[Task]:
    """The tasks of a `--repro` text: the tasks that a text names, one for each tier that plays it, or for `tier` alone.

    Raises:
        ValueError: the text cannot be read, or the tier does not play it.
    """
    text = text.strip()
    for name, level_tier in LEVEL_TIERS.items():
        if text.startswith(level_tier.word + "(") and tier in (None, name):
            level_tier.parse(text)
            return [Task(level_tier.level, name, text)]
    if (entry := table_entry(text)) is not None:
        table, entry_id = entry
        if entry_id not in (ids := table.ids(EVERYTHING)) and not table.cases(entry_id):
            raise ValueError(f"there is no {table.word} {entry_id!r}; there are: {', '.join(ids)}")
        return [Task("schedule", table.name, text)]
    Case.parse(text)
    if tier in TABLE_TIERS:
        raise ValueError(f"the tier {tier!r} does not play {text!r}")
    return [Task("schedule", name, text) for name in ([tier] if tier else CASE_TIERS)]
