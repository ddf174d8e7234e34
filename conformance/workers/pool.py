"""Players whose problems run in worker processes, with a watchdog."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.capabilities import Capabilities, probe_by
from conformance.implementation import LoadError
from conformance.record import Played, Verdict
from conformance.reference import Hang
from conformance.runner import FAILING, Offer, Pairs, Patience, Task
from conformance.workers.turn import GRACE_S, Turn
from conformance.workers.worker import Worker, WorkerDied

__all__ = ["IsolatedRunner", "ProcessRunner", "RemotePlayer", "start_runner"]

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
            _tell(self._running(), self._known)
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


def start_runner(name: str, device: str, limit_s: float, cp_sizes: Callable[[str], tuple[int, ...]]) -> RemotePlayer:
    """The runner that the implementation needs, by its `group_kind`; it is loaded already.

    Args:
        limit_s: when a problem is taken for hanging, in seconds.
        cp_sizes: the group sizes that will be played, for a `group_kind`; the largest is how many processes a pool has.

    Raises:
        LoadError: there is no such implementation, or loading it crashes or takes too long.
    """
    isolated = IsolatedRunner(name, device, limit_s)
    kind = isolated.info.group_kind
    sizes = cp_sizes(kind)
    if kind == "member":
        return isolated
    isolated.close()
    return ProcessRunner(name, device, limit_s, max(2, *sizes))


def _first_word(worker: Worker, who: str) -> Offer:
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


def _tell(workers: list[Worker], capabilities: Capabilities | None) -> None:
    """The known capabilities of the implementation, so that no worker has to find it out again."""
    for worker in workers if capabilities is not None else ():
        worker.send(("know", capabilities))
    for worker in workers if capabilities is not None else ():
        worker.receive(_START_S)


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
            worker = Worker(self._name, self._device, str(self._limit_s))
            self._info = _first_word(worker, "the worker process")
            _tell([worker], self._known)
            self._worker = worker
        return self._worker


class ProcessRunner(RemotePlayer):
    """A pool of processes, one for each rank, for implementations that take a torch.distributed group."""

    def __init__(self, name: str, device: str, limit_s: float, size: int) -> None:
        super().__init__(name, device, limit_s)
        self._size = size
        self._workers: list[Worker] = []
        self._info: Offer | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def info(self) -> Offer:
        """The levels and members that the implementation offers."""
        self._start()
        assert self._info is not None
        return self._info

    def _running(self) -> list[Worker]:
        return self._workers

    def _question(self, message: tuple[str, Any]) -> tuple[bool, str]:
        task = Task("schedule", "probe", "what the implementation supports")
        answer = self._together(message, task, self._limit_s)
        if not isinstance(answer, Played):
            return answer
        if answer.verdict == "hung":
            raise Hang("; ".join(answer.findings))
        return True, ""

    def _play(self, task: Task) -> Played:
        played = self._together(("play", task), task, self._limit_s)
        if played.verdict in FAILING and self._workers:  # messages may be left on the wire
            self._renew(task)
        return played

    def pairs(self, case: str) -> Pairs | None:
        """The (query, key) pairs that carried weight in a small case."""
        task = Task("schedule", "pairs", case)
        found = self._together(("pairs", case), task, self._limit_s)
        if isinstance(found, Played):
            return None
        self._renew(task)
        return found

    def _renew(self, task: Task) -> None:
        """New groups over gloo; over NCCL, where destroying one may hang, new processes."""
        if self._device == "cpu":
            self._together(("renew",), task, self._limit_s)
        else:
            self.close()

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.stop()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        if self._workers:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="conformance-")
        store = str(Path(self._folder.name) / "store")
        arguments = (self._name, self._device, str(self._limit_s))
        self._workers = [Worker(*arguments, str(rank), str(self._size), store) for rank in range(self._size)]
        try:
            offers = [_first_word(worker, f"rank {rank}") for rank, worker in enumerate(self._workers)]
            self._info = offers[0]
            _tell(self._workers, self._known)
        except LoadError:
            self.close()
            raise

    def _together(self, message: Any, task: Task, limit_s: float) -> Any:
        """Let all ranks do the same, and pass their outcomes around, until all are done.

        Returns:
            What rank 0 answers; or a `Played` for ranks that died or did not finish.
        """
        self._start()
        began = time.monotonic()
        try:
            for worker in self._workers:
                worker.send(message)
        except WorkerDied as death:
            return self._ended(task, "crashed", [f"a rank died before the problem began: {death}"], began)
        turn = Turn(self._workers)
        deadline = began + limit_s
        while not turn.over:
            for rank in turn.ready(deadline - time.monotonic()):
                try:
                    turn.take(rank)
                except WorkerDied as death:
                    verdict = "out of memory" if death.by_memory else "crashed"
                    return self._ended(task, verdict, [f"rank {rank} died: {death}", *turn.errors()], began)
            # only while this round waits for the rest of it: a refusal by all is the end of a round, not of the problem
            grace = turn.failed + min(GRACE_S, limit_s) if turn.failed and not turn.over else deadline
            if time.monotonic() > min(deadline, grace):
                return self._ended(task, "hung", [*turn.errors(), *turn.waiting(time.monotonic() - began)], began)
        word, answer = turn.answers[0]
        if word == "refused":
            raise ValueError(answer)
        if "context lost" in (word for word, _ in turn.answers.values()):
            self._end()
        return answer
