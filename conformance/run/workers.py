"""Worker processes run the problems: a crash or a hang ends one problem, and the run goes on.

The driver sends a function and its argument to the workers, and a worker sends an `Answer` back. With `group_kind =
"member"` one worker runs all ranks as threads. With `group_kind = "process"` every rank is a worker, and the ranks
exchange results through the driver, so the driver knows which rank it waits for.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.draw.capabilities import Capabilities, ask, probe_by, try_case
from conformance.implementation import LoadError
from conformance.judge.reference import Hang
from conformance.judge.run_record import FAILING, Played, Verdict
from conformance.run.global_state import forked, forks_of
from conformance.run.play_problem import Offer, Pairs, Patience, Task, pairs_of, play_task
from conformance.run.worker_process import Answer, know, places_in, serve

__all__ = ["Worker", "WorkerRunner", "start_runner"]

_START_S = 300.0  # for the import and, on a GPU, for what the import compiles
_GRACE_S = 5.0  # how long the other ranks may take after one raised


def start_runner(name: str, device: str, limit_s: float, cp_sizes: Callable[[str], tuple[int, ...]]) -> WorkerRunner:
    """Start the workers that the implementation's `group_kind` needs: one, or one a rank. Raises LoadError."""
    runner = WorkerRunner(name, device, limit_s)
    sizes = cp_sizes(kind := runner.info.group_kind)
    if kind == "member":
        return runner
    runner.close()
    return WorkerRunner(name, device, limit_s, max(2, *sizes))


@dataclass(eq=False)
class Failed(Exception):
    """A call ended its workers."""

    verdict: Verdict
    findings: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.findings)


class Worker:
    """The driver's end of one worker process. Each worker has its own session, output file and connection."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])
        self.connection, theirs = context.Pipe()
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115  # closed by `stop`
        changes = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        main, before = sys.modules["__main__"], {name: os.environ.get(name) for name in changes}
        sys.modules["__main__"] = ModuleType("__main__")  # a worker would run the driver's script again
        os.environ |= changes
        arguments = (theirs, self._output.name, dict(os.environ), *arguments)
        self._process = context.Process(target=serve, args=arguments)
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        self.pid = self._process.pid or 0
        theirs.close()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Kill it and its process group."""
        atexit.unregister(self.stop)
        for kill in (os.killpg, os.kill):  # it may not lead a group yet
            with suppress(OSError):
                kill(self.pid, signal.SIGKILL)
        self._process.join()
        self.connection.close()
        self._output.close()

    def where(self) -> str:
        """End it, and return the innermost frame of each of its threads."""
        with suppress(OSError):
            os.kill(self.pid, signal.SIGABRT)
        self._process.join(5.0)
        return (
            "; ".join(places_in(Path(self._output.name).read_text(errors="replace"))[:2]) or "its position is unknown"
        )

    def death(self) -> str:
        """How it ended."""
        self._process.join(5.0)
        code, text = self._process.exitcode, Path(self._output.name).read_text(errors="replace")
        if code is None:
            return "it closed its connection"
        if code == -signal.SIGKILL:
            return "killed by SIGKILL, which most often means that memory ran out"
        fatal = re.findall(r"Fatal Python error: .*", text)[-1:]
        words = [*fatal, *places_in(text)[:1]] if fatal else text.strip().splitlines()[-1:]
        return "; ".join([f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}", *words])


class WorkerRunner(AbstractContextManager["WorkerRunner"]):
    """A `Runner` that starts workers when it needs them: one for each rank, or with `size` None one for all ranks."""

    def __init__(self, name: str, device: str, limit_s: float, size: int | None = None) -> None:
        self._name, self._device, self._limit_s, self._size = name, device, limit_s, size
        self._who = "the worker process" if size is None else "rank {}"
        self.workers: list[Worker] = []
        self._patience = Patience(limit_s)
        self._known: Capabilities | None = None
        self._offer: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the ranks' store

    @property
    def info(self) -> Offer:
        """The levels and members that the implementation offers. Raises LoadError."""
        self._start()
        return self._offer

    def capabilities(self) -> Capabilities:
        """The capabilities of its `attention`, asked once. Raises ValueError when it supports no plain problem."""
        if self._known is None:
            asked, tried = (partial(self._ask, question) for question in (ask, try_case))
            self._known = probe_by(asked, tried, "make_plan" not in self.info.missing, self._device)
            self._call(know, self._known)
        return self._known

    def play(self, task: Task) -> Played:
        """Run a problem. Raises ValueError for a task that means nothing."""
        played = self._patience.play(task, self._play_once)
        self._clean_up(played.verdict)
        return played

    def pairs(self, case: str) -> Pairs | None:
        """The (query, key) pairs that carried weight in a small case; None where the runner cannot say."""
        try:
            return self._call(pairs_of, case)
        except (Failed, Hang):
            return None
        finally:
            self._clean_up("wrong")

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.stop()
        if self._folder is not None:
            self._folder.cleanup()
        self.workers, self._folder = [], None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _clean_up(self, verdict: Verdict) -> None:
        """A failure leaves threads and memory behind, or messages between processes."""
        if verdict in (("hung", "out of memory") if self._size is None else FAILING):
            self.close()

    def _ask(self, question: Callable[..., tuple[bool, str]], about: Any) -> tuple[bool, str]:
        """The answer. (True, "") for a question that ends the workers: the tiers will see it."""
        try:
            return self._call(question, about)
        except Failed as failed:
            if failed.verdict == "hung":
                raise Hang(str(failed)) from None
            return True, ""

    def _play_once(self, task: Task) -> Played:
        began = time.monotonic()
        try:
            return self._call(play_task, task)
        except Failed as failed:
            seconds = round(time.monotonic() - began, 4)
            return Played(task.level, task.tier, task.text, failed.verdict, failed.findings, {}, seconds)

    def _start(self) -> None:
        if self.workers:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="conformance-")
        places = [(rank, self._size, f"{self._folder.name}/store") for rank in range(self._size or 0)] or [None]
        self.workers = [Worker(self._device, self._limit_s, place) for place in places]
        try:
            self._offer = self._exchange(_START_S, self._name)
        except (Failed, LoadError) as error:
            self.close()
            raise error if isinstance(error, LoadError) else LoadError(f"while it was loaded, {error}") from None
        if self._known is not None:
            self._call(know, self._known)

    def _call(self, function: Callable[..., Any], argument: Any) -> Any:
        """`function(implementation, argument, device)` in every worker; the first worker's answer counts."""
        self._start()
        return self._exchange(self._limit_s, (function, argument))

    def _exchange(self, limit_s: float, message: Any) -> Any:
        """Send a message to all workers, pass the ranks' outcomes around, and return the first worker's answer.

        Raises Failed after a worker died or did not answer in time, and all have been ended; or the function's error.
        """
        workers, began, limit, rank = self.workers, time.monotonic(), limit_s, 0
        answers: dict[int, Answer] = {}
        outcomes: dict[int, tuple[str, bytes | None]] = {}  # of one `run_ranks`: (error or "", packed)
        try:
            for rank in range(len(workers)):
                workers[rank].connection.send(message)
            while len(answers) < len(workers):
                ready = wait([worker.connection for worker in workers], max(0.0, began + limit - time.monotonic()))
                for rank, worker in enumerate(workers):
                    if worker.connection in ready:
                        received = worker.connection.recv()
                        (answers if isinstance(received, Answer) else outcomes)[rank] = received
                if len(outcomes) == len(workers):
                    for rank in range(len(workers)):
                        workers[rank].connection.send([outcomes[n][1] for n in range(len(workers))])
                    outcomes, limit = {}, limit_s
                elif ready and any(error for error, _ in outcomes.values()):  # the others may wait for this rank
                    limit = min(limit, time.monotonic() - began + _GRACE_S)
                elif not ready:
                    silent = [n for n in range(len(workers)) if n not in outcomes and n not in answers]
                    raise self._failed("hung", outcomes, [word for n in silent for word in self._why_silent(n, limit)])
        except (EOFError, OSError):
            how = workers[rank].death()
            verdict = "out of memory" if "SIGKILL" in how else "crashed"
            raise self._failed(verdict, outcomes, [f"{self._who.format(rank)} died: {how}"]) from None
        if any(answer.spent for answer in answers.values()):
            self.close()
        if answers[0].error is not None:
            raise answers[0].error
        return answers[0].value

    def _failed(self, verdict: Verdict, outcomes: dict[int, tuple[str, Any]], findings: list[str]) -> Failed:
        self.close()
        errors = [f"rank {rank} raised {error}" for rank, (error, _) in sorted(outcomes.items()) if error]
        return Failed(verdict, tuple(errors + findings if verdict == "hung" else findings + errors))

    def _why_silent(self, rank: int, seconds: float) -> list[str]:
        worker, who = self.workers[rank], self._who.format(rank)
        copies = forks_of(worker.pid)
        late = f"{who} did not finish within {seconds:.3g} s: {worker.where()}"
        return [f"{who}: {forked(copies)}", late] if copies else [late]
