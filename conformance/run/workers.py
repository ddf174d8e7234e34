"""Worker processes play the problems of a run: a crash or a hang ends one problem, and the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from conformance.draw.capabilities import Capabilities, ask, probe_by, try_case
from conformance.implementation import Implementation, LoadError
from conformance.judge.reference import Hang
from conformance.judge.run_record import FAILING, Played, Verdict
from conformance.run.play_problem import Offer, Pairs, Patience, Task, pairs_of, play_task
from conformance.run.pool import Failed, Pool

__all__ = ["WorkerRunner", "start_runner"]


def start_runner(name: str, device: str, limit_s: float, cp_sizes: Callable[[str], tuple[int, ...]]) -> WorkerRunner:
    """Start the workers that the implementation's `group_kind` needs: one, or one a rank. Raises LoadError."""
    if not name:
        raise LoadError("the implementation's name is empty; it is pkg.module, pkg.module:object, or an entry point's")
    runner = WorkerRunner(name, device, limit_s)
    sizes = cp_sizes(kind := runner.info.group_kind)
    if kind == "member":
        return runner
    runner.close()
    return WorkerRunner(name, device, limit_s, max(2, *sizes))


class WorkerRunner(Pool):
    """A `Runner` on a pool: one worker for each rank, or with `size` None one for all ranks."""

    def __init__(self, name: str, device: str, limit_s: float, size: int | None = None) -> None:
        super().__init__(name, device, limit_s, size)
        self._patience = Patience(limit_s)
        self._known: Capabilities | None = None

    @property
    def info(self) -> Offer:
        """The levels and members that the implementation offers. Raises LoadError."""
        self.start()
        return self._offer

    def capabilities(self) -> Capabilities:
        """The capabilities of its `attention`, asked once. Raises ValueError when it supports no plain problem."""
        if self._known is None:
            asked, tried = (partial(self._ask, question) for question in (ask, try_case))
            self._known = probe_by(asked, tried, "make_plan" not in self.info.missing, self._device)
            self.call(_know, self._known)
        return self._known

    def play(self, task: Task) -> Played:
        """Run a problem. Raises ValueError for a task that means nothing."""
        played = self._patience.play(task, self._play)
        self._clean_up(played.verdict)
        return played

    def pairs(self, case: str) -> Pairs | None:
        """The (query, key) pairs that carried weight in a small case; None where the runner cannot say."""
        try:
            return self.call(pairs_of, case)
        except (Failed, Hang):
            return None
        finally:
            self._clean_up("wrong")

    def start(self) -> None:
        """Start the workers, unless they run, and tell them what is known. Raises LoadError."""
        if not self.workers:
            super().start()
            if self._known is not None:
                self.call(_know, self._known)

    def _clean_up(self, verdict: Verdict) -> None:
        """A failure leaves threads and memory behind, or messages between processes."""
        if verdict in (("hung", "out of memory") if self._size is None else FAILING):
            self.close()

    def _ask(self, question: Callable[..., tuple[bool, str]], about: Any) -> tuple[bool, str]:
        """The answer. (True, "") for a question that ends the workers: the tiers will see it."""
        try:
            return self.call(question, about)
        except Failed as failed:
            if failed.verdict == "hung":
                raise Hang(str(failed)) from None
            return True, ""

    def _play(self, task: Task) -> Played:
        began = time.monotonic()
        try:
            return self.call(play_task, task)
        except Failed as failed:
            seconds = round(time.monotonic() - began, 4)
            return Played(task.level, task.tier, task.text, failed.verdict, failed.findings, {}, seconds)


def _know(impl: Implementation, capabilities: Capabilities, device: str) -> None:
    """Store what the driver found by asking."""
    impl.probed[device] = capabilities
