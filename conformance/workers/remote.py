"""What runners have in common whose problems run in worker processes, with a watchdog."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from conformance.capabilities import Capabilities, probe_by
from conformance.implementation import LoadError
from conformance.record import Played, Verdict
from conformance.runner import Offer, Pairs, Patience, Task
from conformance.workers.worker import Worker, WorkerDied

__all__ = ["RemotePlayer", "first_word", "tell"]

_START_S = 300.0  # for importing and, on a GPU, compiling what the import compiles


class RemotePlayer(ABC):
    """A `Runner` for an implementation that other processes load. Close it, or use it as a context manager."""

    def __init__(self, name: str, device: str, limit_s: float) -> None:
        self._name, self._device, self._limit_s = name, device, limit_s
        self.restarts = 0
        self._patience = Patience(limit_s)
        self._known: Capabilities | None = None

    @property
    @abstractmethod
    def info(self) -> Offer:
        """The levels and members that the implementation offers. Raises LoadError."""

    def capabilities(self) -> Capabilities:
        """`conformance.capabilities.probe`, over there; asked once, and told to every worker. Raises ValueError."""
        if self._known is None:
            plans = "make_plan" not in self.info.missing
            asked, tried = (lambda thing, word=word: self._question((word, thing)) for word in ("ask", "try"))
            self._known = probe_by(asked, tried, plans, self._device)
            tell(self._running(), self._known)
        return self._known

    @abstractmethod
    def _running(self) -> list[Worker]:
        """The workers that are there; what is started later is told by `_start`."""

    @abstractmethod
    def _question(self, message: tuple[str, Any]) -> tuple[bool, str]:
        """The workers' answer; (True, "") where the question ends them: what fails is no refusal, and the tiers will
        see it. Raises Hang.
        """

    def play(self, task: Task) -> Played:
        """Play a problem. Raises ValueError for a task that means nothing."""
        return self._patience.play(task, self._play)

    @abstractmethod
    def _play(self, task: Task) -> Played:
        """Play a problem, whatever came before."""

    @abstractmethod
    def pairs(self, case: str) -> Pairs | None:
        """The (query, key) pairs that carried weight in a small case; None where the runner cannot say."""

    @abstractmethod
    def close(self) -> None:
        """End the processes."""

    def __enter__(self) -> RemotePlayer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        """End the processes for good; what is played next starts others."""
        self.close()
        self.restarts += 1

    def _ended(self, task: Task, verdict: Verdict, findings: list[str], began: float) -> Played:
        """A problem that took its workers along."""
        self._end()
        seconds = round(time.monotonic() - began, 4)
        return Played(task.level, task.tier, task.text, verdict, tuple(findings), {}, seconds)


def first_word(worker: Worker, who: str) -> Offer:
    """The first message of a worker that has loaded the implementation."""
    try:
        word, info = worker.receive(_START_S)
    except TimeoutError:
        worker.stop()
        raise LoadError(f"{who} did not load the implementation within {_START_S:g} s") from None
    except WorkerDied as death:
        worker.stop()
        raise LoadError(f"{who} died while it loaded the implementation: {death}") from None
    if word != "ready":
        worker.stop()
        raise LoadError(info)
    return info


def tell(workers: list[Worker], capabilities: Capabilities | None) -> None:
    """The known capabilities of the implementation, so that no worker has to find it out again."""
    for worker in workers if capabilities is not None else ():
        worker.send(("know", capabilities))
    for worker in workers if capabilities is not None else ():
        worker.receive(_START_S)
