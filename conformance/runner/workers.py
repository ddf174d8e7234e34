"""A pool of worker processes, which a crash or a hang of one call ends and the next call starts again.

The driver sends a function and its argument to all workers, and a worker sends an `Answer` back. With `size` None one
worker runs all ranks as threads. Otherwise every rank is a worker, and the ranks exchange outcomes through the driver,
so the driver knows which rank it waits for.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import torch

from conformance.checks.hygiene import context_error, forked, forks_of
from conformance.checks.reference import Hang, watching
from conformance.implementation import Implementation, LoadError, load
from conformance.problems.capabilities import Capabilities, ask, probe_by, try_case
from conformance.record import FAILING, Played, Verdict
from conformance.runner.play_problem import InProcess, Offer, Pairs, Patience, Runner, Task, pairs_of, play_task
from conformance.runner.processes import join_group

__all__ = ["Answer", "Failed", "Pool", "Worker", "WorkerRunner", "open_runner", "start_runner"]

_START_S = 300.0  # for the import and, on a GPU, for what the import compiles
_GRACE_S = 5.0  # how long the other ranks may take after one raised


class Answer(NamedTuple):
    """The value that a worker's function returned, or its error; and whether the worker must not be used again."""

    value: Any
    error: Exception | None = None
    spent: bool = False


class Failed(Exception):
    """A call ended its workers: the verdict, and why."""

    def __init__(self, verdict: Verdict, findings: list[str]) -> None:
        super().__init__("; ".join(findings))
        self.verdict: Verdict = verdict
        self.findings = tuple(findings)


class Pool:
    """The workers of an implementation: one for each rank, or with `size` None one for all ranks."""

    def __init__(self, name: str, device: str, limit_s: float, size: int | None = None) -> None:
        self._name, self._device, self._limit_s, self._size = name, device, limit_s, size
        self._who = "the worker process" if size is None else "rank {}"
        self.workers: list[Worker] = []
        self._offer: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the ranks' store

    def start(self) -> None:
        """Start the workers, unless they run. Raises LoadError."""
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

    def call(self, function: Callable[..., Any], argument: Any) -> Any:
        """`function(implementation, argument, device)` in every worker; the first worker's answer counts."""
        self.start()
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

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.stop()
        if self._folder is not None:
            self._folder.cleanup()
        self.workers, self._folder = [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failed(self, verdict: Verdict, outcomes: dict[int, tuple[str, Any]], findings: list[str]) -> Failed:
        self.close()
        errors = [f"rank {rank} raised {error}" for rank, (error, _) in sorted(outcomes.items()) if error]
        return Failed(verdict, errors + findings if verdict == "hung" else findings + errors)

    def _why_silent(self, rank: int, seconds: float) -> list[str]:
        worker, who = self.workers[rank], self._who.format(rank)
        copies = forks_of(worker.pid)
        late = f"{who} did not finish within {seconds:.3g} s: {worker.where()}"
        return [f"{who}: {forked(copies)}", late] if copies else [late]


class Worker:
    """The driver's end of one worker process. Each worker has its own session, output file and connection."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.connection, theirs = context.Pipe()
        self._output = tempfile.NamedTemporaryFile("r", errors="replace")  # noqa: SIM115  # closed by `stop`
        changes = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        before = {name: os.environ.get(name) for name in changes}
        os.environ |= changes
        arguments = theirs, self._output.name, dict(os.environ), *arguments
        self._process = context.Process(target=_serve, args=arguments)
        try:  # a worker would run the driver's script again if it knew its name
            with patch.multiple("__main__", create=True, __spec__=None, __file__=None):
                self._process.start()
        finally:
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
        return "; ".join(_places_in(self._output.read())[:2]) or "its position is unknown"

    def death(self) -> str:
        """How it ended."""
        self._process.join(5.0)
        code, text = self._process.exitcode, self._output.read()
        if code is None:
            return "it closed its connection"
        if code == -signal.SIGKILL:
            return "killed by SIGKILL, which most often means that memory ran out"
        fatal = re.findall(r"Fatal Python error: .*", text)[-1:]
        words = [*fatal, *_places_in(text)[:1]] if fatal else text.strip().splitlines()[-1:]
        return "; ".join([f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}", *words])


def _places_in(output: str) -> list[str]:
    """The innermost frame of each thread in faulthandler's last dump, without the threads that wait for others.

    >>> dump = 'Thread 0x1 (most recent call first):\\n  File "/a/user.py", line 3 in f\\n  File "/b.py", line 9 in g'
    >>> _places_in("Fatal Python error: Aborted\\n" + dump)
    ['at user.py:3 in f']
    """
    found = []
    for thread in re.split(r"(?:Current t|T)hread 0x", output.rpartition("Fatal Python error")[2])[1:]:
        frames = re.findall(r'File "(?:[^"]*/)?([^"/]*)", line (\d+) in (\S+)', thread)
        waits = frames and frames[0][2] == "wait_to_run"  # for its rank's turn, in the simulated group
        if frames and not waits and not any(file == "threading.py" for file, _, _ in frames[:4]):
            found.append("at {}:{} in {}".format(*frames[0]))
    return list(dict.fromkeys(found))


def _serve(
    connection: Connection, output: str, environment: dict[str, str], device: str, limit_s: float, place: Any
) -> None:
    """The worker's end: load the implementation that the first message names, then answer until the driver closes the
    connection. place: (rank, size, store) in a group of processes; None where all ranks are threads of this process.
    """
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    faulthandler.enable()
    if sys.platform == "linux" and (parent := multiprocessing.parent_process()):
        import fcntl

        # the kernel sends SIGKILL when the driver's end of this pipe closes: a worker that hangs ends too
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(1)
    impl: Implementation | None = None
    with suppress(EOFError):
        while message := connection.recv():
            try:
                with watching(float("inf") if place else 0.8 * limit_s):  # `run_ranks` knows more than the driver
                    if impl is None:
                        if place:
                            join_group(connection, device, *place)
                        impl, value = (loaded := load(message)), Offer.of(loaded)
                    else:
                        value = message[0](impl, message[1], device)
                answer = Answer(value, None, bool(context_error(device)))
            except (ValueError, Hang, LoadError) as error:
                answer = Answer(None, error, isinstance(error, Hang))
            connection.send(answer)


# ---- the runner
#
# Worker processes play the problems of a run: a crash or a hang ends one problem, and the run goes on.


def open_runner(
    impl: Any, device: str, limit_s: float, cp_sizes: Callable[[str], tuple[int, ...]], isolate: bool
) -> Runner:
    """`start_runner` for a name; an object, and what is not isolated, is played in this process.

    Raises:
        LoadError: there is no such implementation.
        ValueError: its ranks need processes, and it is not isolated.
    """
    if isinstance(impl, str) and isolate:
        return start_runner(impl, device, limit_s, cp_sizes)
    return InProcess(load(impl) if isinstance(impl, str) else impl, device, limit_s)


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
