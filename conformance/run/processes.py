"""Processes that run one function at the same time, the ranks of a group for example: the first that fails ends all."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

__all__ = ["LONGEST_S", "run_together"]

LONGEST_S = 1e6  # a limit that every timer takes

_END_S = 10.0  # that a process may take to end after its answer


def run_together(
    context: Any, function: Callable[[Any], Any], jobs: Mapping[str, Any], failed: Any, limit_s: float = math.inf
) -> list[Any]:
    """`function(job)` for every job, each in its own process.

    Args:
        context: starts the processes (`multiprocessing.get_context`).
        function: its exceptions must be such that pickle can copy them.
        jobs: by the names of their processes.
        failed: a type of exception, made from one sentence.

    Returns:
        What the function returned, with tensors on the CPU, in the order of the jobs.

    Raises:
        failed: a process died, or did not end in time. Otherwise what `function` raised, the first if there are
        several: a rank that fails lets others fail, which lose their connections. All processes have been ended.
    """
    names, values = list(jobs), dict[str, Any]()
    running: dict[Any, tuple[str, Any]] = {}  # pipe -> process
    deadline = time.monotonic() + limit_s
    try:
        for name, job in jobs.items():
            pipe, theirs = context.Pipe(duplex=False)
            running[pipe] = name, context.Process(target=_run, args=(function, job, theirs), name=name)
            running[pipe][1].start()
            theirs.close()
        waiting = list(running)
        while waiting:
            ready = wait(waiting, None if limit_s == math.inf else max(0.0, deadline - time.monotonic()))
            if not ready:
                late = running[waiting[0]][0]
                raise failed(f"{late} did not end within {limit_s:g} s; the ranks may wait for each other")
            waiting = [pipe for pipe in waiting if pipe not in ready]
            answers = [(*_answer(pipe, *running[pipe], failed), running[pipe][0]) for pipe in ready]
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


def _answer(pipe: Any, name: str, process: Any, failed: Any) -> tuple[float, Exception | None, Any]:
    """When a process answered, the error or None, the value."""
    try:
        return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False, map_location="cpu")
    except EOFError:
        process.join()
        return 0.0, failed(f"{name} died with exit code {process.exitcode}"), None


def _run(function: Callable[[Any], Any], job: Any, pipe: Connection) -> None:
    try:
        answer = None, function(job)
    except Exception as error:
        answer = error, None
    packed = io.BytesIO()
    torch.save((time.time(), *answer), packed)
    pipe.send_bytes(packed.getbuffer())
