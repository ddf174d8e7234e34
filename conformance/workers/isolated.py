"""A worker process in which all ranks of a problem are threads."""

from __future__ import annotations

import time
from typing import Any

from conformance.record import Played
from conformance.reference import Hang
from conformance.runner import Offer, Pairs, Task
from conformance.workers.remote import RemotePlayer, first_word, tell
from conformance.workers.worker import Worker, WorkerDied

__all__ = ["IsolatedRunner"]


class IsolatedRunner(RemotePlayer):
    """One worker process, in which all ranks of a problem are threads. The worker is started again when needed."""

    def __init__(self, name: str, device: str, limit_s: float) -> None:
        super().__init__(name, device, limit_s)
        self._worker: Worker | None = None
        self._info: Offer | None = None

    @property
    def info(self) -> Offer:
        """The levels and members that the implementation offers."""
        self._start()
        assert self._info is not None
        return self._info

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._start().pid

    def _running(self) -> list[Worker]:
        return [] if self._worker is None else [self._worker]

    def _question(self, message: tuple[str, Any]) -> tuple[bool, str]:
        worker = self._start()
        try:
            return self._ask(message, self._limit_s)
        except TimeoutError:
            places = "; ".join(worker.where())
            self.close()
            raise Hang(f"no answer within {self._limit_s:g} s: {places}") from None
        except WorkerDied:
            self.close()
            return True, ""

    def _ask(self, message: tuple[str, Any], limit_s: float) -> Any:
        """The worker's answer, after which its context may be lost.

        Raises:
            ValueError, TimeoutError, WorkerDied, Hang.
        """
        worker = self._start()
        worker.send(message)
        word, answer = worker.receive(limit_s)
        if word == "refused":
            raise ValueError(answer)
        if word == "hung":  # its threads are left behind
            self._end()
            raise Hang(answer)
        if word == "context lost":
            self._end()
        return answer

    def _play(self, task: Task) -> Played:
        worker, began = self._start(), time.monotonic()
        try:
            answer = self._ask(("play", task), self._limit_s)
        except TimeoutError:
            places = "; ".join(worker.where()) or "nobody can say where"
            return self._ended(
                task, "hung", [f"the problem did not finish within {self._limit_s:g} s: {places}"], began
            )
        except WorkerDied as death:
            verdict = "out of memory" if death.by_memory else "crashed"
            return self._ended(task, verdict, [f"the worker process died: {death}"], began)
        if answer.verdict in ("hung", "out of memory") and self._worker is not None:  # threads are left, or memory
            self._end()
        return answer

    def pairs(self, case: str) -> Pairs | None:
        """The (query, key) pairs that carried weight in a small case."""
        try:
            return self._ask(("pairs", case), self._limit_s)
        except (TimeoutError, WorkerDied):
            self.close()
            return None

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _start(self) -> Worker:
        if self._worker is None:
            worker = Worker(self._name, self._device, self._limit_s)
            self._info = first_word(worker, "the worker process")
            tell([worker], self._known)
            self._worker = worker
        return self._worker
