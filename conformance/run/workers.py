"""Worker processes run the problems: a crash or a hang ends one problem, and the run goes on.

The driver (this process) sends a problem as text; a worker (`conformance.run.worker_process`) answers with a `Played`.
With `group_kind = "member"` one worker runs all ranks as threads. With `group_kind = "process"` every rank is a worker,
and the ranks exchange results through the driver, so the driver always knows which rank it waits for.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.draw.capabilities import Capabilities, probe_by
from conformance.implementation import LoadError
from conformance.judge.reference import Hang
from conformance.judge.run_record import FAILING, Played, Verdict
from conformance.run.play_problem import Offer, Pairs, Patience, Task
from conformance.run.worker_process import copies, serve

__all__ = ["WorkerRunner", "start_runner"]

_START_S = 300.0  # for the import and, on a GPU, for what the import compiles
_GRACE_S = 5.0  # how long the other ranks may take after one raised
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["conformance.run.worker_process"])


def start_runner(name: str, device: str, limit_s: float, cp_sizes: Callable[[str], tuple[int, ...]]) -> WorkerRunner:
    """Start the workers that the implementation's `group_kind` needs; they have loaded it.

    Args:
        limit_s: the time limit of a problem, in seconds; a longer one counts as a hang.
        cp_sizes: returns the group sizes of the run for a `group_kind`; a pool has as many processes as the largest.

    Raises:
        LoadError: there is no such implementation, or loading it crashes or takes too long.
    """
    runner = WorkerRunner(name, device, limit_s)
    kind = runner.info.group_kind
    sizes = cp_sizes(kind)
    if kind == "member":
        return runner
    runner.close()
    return WorkerRunner(name, device, limit_s, max(2, *sizes))


class WorkerDied(Exception):
    """A worker process ended; the message says how."""


class Failed(Exception):
    """A call ended its workers: a verdict and the findings."""


class Worker:
    """The driver's end of one worker process. Each worker has its own session, output file and connection."""

    def __init__(self, *arguments: Any) -> None:
        self.connection, theirs = _context.Pipe()
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115  # closed by `stop`
        with _environment_of_the_fork_server() as environment:
            self._process = _context.Process(target=serve, args=(theirs, self._output.name, environment, *arguments))
            self._process.start()
        self.pid = self._process.pid or 0
        theirs.close()
        atexit.register(self.stop)

    def send(self, message: Any) -> None:
        """Send a message. Raises WorkerDied."""
        try:
            self.connection.send(message)
        except OSError:
            raise WorkerDied(self._death()) from None

    def receive(self, timeout_s: float) -> Any:
        """Receive the next message. Raises WorkerDied, or TimeoutError."""
        if not self.connection.poll(timeout_s):
            raise TimeoutError
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise WorkerDied(self._death()) from None

    def where(self) -> str:
        """The innermost frame of each of its threads, from faulthandler."""
        begin = os.stat(self._output.name).st_size
        with suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.5)
        return "; ".join(_places(self._text()[begin:])[:2]) or "its position is unknown"

    def stop(self) -> None:
        """Kill it and its process group."""
        atexit.unregister(self.stop)
        for kill in (os.killpg, os.kill):  # it may not lead a group yet
            with suppress(OSError):
                kill(self.pid, signal.SIGKILL)
        self._process.join()
        self.connection.close()
        self._output.close()

    def _text(self) -> str:
        return Path(self._output.name).read_text(errors="replace")

    def _death(self) -> str:
        self._process.join(5.0)
        code = self._process.exitcode
        if code is None:
            return "it closed its connection"
        if code == -signal.SIGKILL:
            return "killed by SIGKILL, which most often means that memory ran out"
        text = self._text()
        fatal = re.findall(r"Fatal Python error: .*", text)
        words = [fatal[-1], *_places(text[text.rfind(fatal[-1]) :])[:1]] if fatal else text.strip().splitlines()[-1:]
        return "; ".join([f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}", *words])


class WorkerRunner:
    """A `Runner` with worker processes: one for each rank, or with `size` None one for all ranks.

    Close it, or use it as a context manager. It starts workers when it needs them.
    """

    def __init__(self, name: str, device: str, limit_s: float, size: int | None = None) -> None:
        self._name, self._device, self._limit_s, self._size = name, device, limit_s, size
        self.restarts = 0
        self.workers: list[Worker] = []
        self._patience = Patience(limit_s)
        self._known: Capabilities | None = None
        self._info: Offer | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the ranks' store

    @property
    def info(self) -> Offer:
        """The levels and members that the implementation offers. Raises LoadError."""
        self._start()
        assert self._info is not None
        return self._info

    def capabilities(self) -> Capabilities:
        """The capabilities of its `attention`, asked once. Raises ValueError when it supports no plain problem."""
        if self._known is None:
            plans = "make_plan" not in self.info.missing
            asked, tried = (lambda thing, word=word: self._question(word, thing) for word in ("ask", "try"))
            self._known = probe_by(asked, tried, plans, self._device)
            self._call("know", self._known)
        return self._known

    def play(self, task: Task) -> Played:
        """Run a problem. Raises ValueError for a task that means nothing."""
        return self._patience.play(task, self._play)

    def pairs(self, case: str) -> Pairs | None:
        """The (query, key) pairs that carried weight in a small case; None where the runner cannot say."""
        try:
            found = self._call("pairs", case)
        except (Failed, Hang):
            return None
        self._clean_up("wrong")
        return found

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.stop()
        self.workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> WorkerRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _question(self, word: str, about: Any) -> tuple[bool, str]:
        """The answer of `ask` or `try_case`. (True, "") for a question that ends the workers: the tiers will see it."""
        try:
            return self._call(word, about)
        except Failed as failed:
            if failed.args[0] == "hung":
                raise Hang("; ".join(failed.args[1])) from None
            return True, ""

    def _play(self, task: Task) -> Played:
        played = self._play_once(task)
        self._clean_up(played.verdict)
        return played

    def _play_once(self, task: Task) -> Played:
        began = time.monotonic()
        try:
            return self._call("play", task)
        except Failed as failed:
            seconds = round(time.monotonic() - began, 4)
            return Played(task.level, task.tier, task.text, failed.args[0], tuple(failed.args[1]), {}, seconds)

    def _clean_up(self, verdict: Verdict) -> None:
        """Remove what a failure left behind: in one process threads and memory, between processes messages."""
        if not self.workers:
            return
        if self._size is None:
            if verdict in ("hung", "out of memory"):
                self._restart()
        elif verdict in FAILING:
            if self._device == "cpu":
                with suppress(Failed):
                    self._call("renew")
            else:  # to destroy a NCCL group may hang
                self.close()

    def _restart(self) -> None:
        self.close()
        self.restarts += 1

    def _start(self) -> list[Worker]:
        if self.workers:
            return self.workers
        self._folder = tempfile.TemporaryDirectory(prefix="conformance-")
        store = str(Path(self._folder.name) / "store")
        places = [(rank, self._size, store) for rank in range(self._size)] if self._size else [None]
        self.workers = [Worker(self._name, self._device, self._limit_s, place) for place in places]
        try:
            offers = [self._offer_of(rank, worker) for rank, worker in enumerate(self.workers)]
        except LoadError:
            self.close()
            raise
        self._info = offers[0]
        if self._known is not None:
            self._call("know", self._known)
        return self.workers

    def _offer_of(self, rank: int, worker: Worker) -> Offer:
        try:
            word, answer = worker.receive(_START_S)
        except TimeoutError:
            raise LoadError(f"{self._who(rank)} did not load the implementation within {_START_S:g} s") from None
        except WorkerDied as death:
            raise LoadError(f"{self._who(rank)} died while it loaded the implementation: {death}") from None
        if word != "ready":
            raise LoadError(answer)
        return answer

    def _who(self, rank: int) -> str:
        return "the worker process" if self._size is None else f"rank {rank}"

    def _call(self, *message: Any) -> Any:
        """Send a message to all workers, pass the ranks' outcomes around, and return the first worker's answer.

        Raises:
            ValueError: the message means nothing.
            Hang: the worker's own watchdog found a hang.
            Failed: a worker died, or did not answer in time. All workers have been ended.
        """
        workers, began = self._start(), time.monotonic()
        answers: dict[int, tuple[str, Any]] = {}
        outcomes: dict[int, tuple[str, bytes | None]] = {}  # of one `run_ranks`: (error or "", packed outcome)
        first_error = float("inf")

        def fail(verdict: Verdict, *findings: str) -> Failed:
            errors = [f"rank {rank} raised {error}" for rank, (error, _) in sorted(outcomes.items()) if error]
            self._restart()
            return Failed(verdict, [*errors, *findings] if verdict == "hung" else [*findings, *errors])

        rank = 0  # of the worker that died
        try:
            for worker in workers:
                worker.send(message)
                rank += 1
            while len(answers) < len(workers):
                ready = wait([worker.connection for worker in workers], _GRACE_S / 10)
                for rank, worker in enumerate(workers):
                    if worker.connection not in ready:
                        continue
                    word, *content = worker.receive(1.0)
                    if word != "outcome":
                        answers[rank] = word, content[0]
                        continue
                    outcomes[rank] = content[0], content[1]
                    first_error = min(first_error, time.monotonic() if content[0] else float("inf"))
                    if len(outcomes) == len(workers):
                        for other in workers:
                            other.send(("outcomes", [outcomes[n][1] for n in range(len(workers))]))
                        outcomes, first_error = {}, float("inf")
                deadline = min(began + self._limit_s, first_error + min(_GRACE_S, self._limit_s))
                if time.monotonic() > deadline and len(answers) < len(workers):
                    silent = [n for n in range(len(workers)) if n not in outcomes and n not in answers]
                    raise fail("hung", *(words for n in silent for words in self._why_silent(n, deadline - began)))
        except WorkerDied as death:
            verdict = "out of memory" if "SIGKILL" in str(death) else "crashed"
            raise fail(verdict, f"{self._who(rank)} died: {death}") from None
        word, answer = answers[0]
        if word == "refused":
            raise ValueError(answer)
        words = [word for word, _ in answers.values()]
        if "hung" in words or "context lost" in words:
            self._restart()
        if word == "hung":
            raise Hang(answer)
        return answer

    def _why_silent(self, rank: int, seconds: float) -> list[str]:
        worker = self.workers[rank]
        forks = len(copies(worker.pid))
        forked = [f"a call of rank {rank} forked the process, and left {forks} copies of it behind"] if forks else []
        return [*forked, f"{self._who(rank)} did not finish within {seconds:.3g} s: {worker.where()}"]


@contextmanager
def _environment_of_the_fork_server() -> Iterator[dict[str, str]]:
    """The environment for workers. Inside, the fork server starts with it if none runs, and workers skip `__main__`.

    multiprocessing would import the driver's main module in every worker, and run a script that has no guard again.
    """
    changes = {"PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path), "OMP_NUM_THREADS": "1"}
    before, main = {name: os.environ.get(name) for name in changes}, sys.modules["__main__"]
    os.environ.update(changes)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield dict(os.environ)
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _places(dump: str) -> list[str]:
    """The innermost frame of each thread in a faulthandler dump, without the threads that wait for others.

    >>> _places('Thread 0x1 (most recent call first):\\n  File "/a/user.py", line 3 in f\\n  File "/b.py", line 9 in g')
    ['at user.py:3 in f']
    """
    found = []
    for thread in re.split(r"(?:Current t|T)hread 0x", dump)[1:]:
        frames = re.findall(r'File "(?:[^"]*/)?([^"/]*)", line (\d+) in (\S+)', thread)
        if frames and not any(file in ("threading.py", "sim_switch.py") for file, _, _ in frames[:4]):
            found.append("at {}:{} in {}".format(*frames[0]))
    return list(dict.fromkeys(found))
