"""Processes that run one function at the same time, the ranks of a group for example: the first that fails ends all."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

__all__ = ["LONGEST_S", "run_together", "say"]

LONGEST_S = 1e6  # a limit that every timer takes

_END_S = 10.0  # that a process may take to end after its answer
_STAGE = b"stage "  # begins a message that is no answer
_said: Connection | None = None  # of this process, to the one that started it


def run_together(
    context: Any,
    function: Callable[[Any], Any],
    jobs: Mapping[str, Any],
    failed: Any,
    limit_s: float = math.inf,
    on_stage: Callable[[str, str], None] = lambda name, stage: None,
) -> list[Any]:
    """`function(job)` for every job, each in its own process.

    Args:
        context: starts the processes (`multiprocessing.get_context`).
        function: its exceptions must be such that pickle can copy them.
        jobs: by the names of their processes.
        failed: a type of exception, made from one sentence.
        on_stage: called with a process's name and what it does now: what the process passes to `say`, and "done".

    Returns:
        What the function returned, with tensors on the CPU, in the order of the jobs.

    Raises:
        failed: a process died, or did not end in time. Otherwise what `function` raised, the first if there are
        several: a rank that fails lets others fail, which lose their connections. All processes have been ended.
    """
    names, values = list(jobs), dict[str, Any]()
    running: dict[Any, tuple[str, Any]] = {}  # pipe -> process
    stages: dict[Any, tuple[str, float]] = {}  # pipe -> what it does, and since when
    deadline = time.monotonic() + limit_s
    try:
        for name, job in jobs.items():
            pipe, theirs = context.Pipe(duplex=False)
            running[pipe] = name, context.Process(target=_run, args=(function, job, theirs), name=name)
            running[pipe][1].start()
            theirs.close()
            stages[pipe] = "starts", time.monotonic()
            on_stage(name, "starts")
        waiting = list(running)
        while waiting:
            ready = wait(waiting, None if limit_s == math.inf else max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(f"{running[pipe][0]} ({_since(*stages[pipe])})" for pipe in waiting)
                raise failed(f"not ended within {limit_s:g} s: {late}; the ranks may wait for each other")
            answers = []
            for pipe in ready:
                stage, *answer = _message(pipe, *running[pipe], failed)
                stages[pipe] = stage, time.monotonic()
                on_stage(running[pipe][0], stage)
                if answer:
                    waiting = [other for other in waiting if other is not pipe]
                    answers.append((*answer, running[pipe][0]))
            for _, error, value, name in sorted(answers, key=lambda answer: answer[0]):
                if error is not None:
                    raise error
                values[name] = value
        for _, process in running.values():
            process.join(_END_S)
        return [values[name] for name in names]
    finally:
        for _, process in running.values():
            if process.pid is not None:
                process.kill()
                process.join()


def say(stage: str) -> None:
    """Tell the process that started this one what it does now, such as "step 1 of 2"."""
    if _said is not None:
        _said.send_bytes(_STAGE + stage.encode())


def _since(stage: str, since: float) -> str:
    return f"{stage}, for {time.monotonic() - since:.0f} s"


def _message(pipe: Any, name: str, process: Any, failed: Any) -> tuple[Any, ...]:
    """What a process does now; or "done", when it answered, the error or None, the value."""
    try:
        said = pipe.recv_bytes()
    except EOFError:
        process.join()
        return "died", 0.0, failed(f"{name} died with exit code {process.exitcode}"), None
    if said.startswith(_STAGE):
        return (said.removeprefix(_STAGE).decode(),)
    return "done", *torch.load(io.BytesIO(said), weights_only=False, map_location="cpu")


def _run(function: Callable[[Any], Any], job: Any, pipe: Connection) -> None:
    global _said
    _said = pipe
    try:
        answer = None, function(job)
    except Exception as error:
        answer = error, None
    packed = io.BytesIO()
    torch.save((time.time(), *answer), packed)
    pipe.send_bytes(packed.getbuffer())
