"""A worker process (see `conformance.run.workers`): it loads the implementation, then runs the problems that arrive.

It sends ("ready", offer) or ("load error", reason), then one answer for each message: ("done", answer), ("context
lost", answer) when it can use the GPU no more, ("hung", where) or ("refused", reason).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from conformance.draw.capabilities import ask, try_case
from conformance.implementation import LoadError, load
from conformance.judge.reference import Hang, running_ranks_by, watching
from conformance.judge.run_record import Played
from conformance.run.gpu_context import context_error
from conformance.run.play_problem import Offer, pairs_of, play_task
from conformance.run.run_ranks import ProcessRanks, join, rejoin

__all__ = ["copies", "serve"]


def serve(
    connection: Connection,
    output: str,
    environment: dict[str, str],
    name: str,
    device: str,
    limit_s: float,
    place: tuple[int, int, str] | None,
) -> None:
    """Load the implementation, then answer messages until the driver closes the connection.

    Args:
        output: the file for stdout and stderr.
        name: of the implementation.
        limit_s: the time limit of a problem, in seconds.
        place: (rank, size, store) in a group of processes; None where all ranks are threads of this process.
    """
    _separate(output, environment)
    renew = _become_a_rank(connection, device, *place) if place else lambda: None
    try:
        impl = load(name)
    except LoadError as error:
        connection.send(("load error", str(error)))
        return
    connection.send(("ready", Offer.of(impl)))
    inner_limit_s = float("inf") if place else 0.8 * limit_s  # `run_ranks` knows more about a hang than the driver
    answers: dict[str, Callable[..., Any]] = {
        "ask": lambda problem: ask(impl, problem, device),
        "try": lambda case: try_case(impl, case, device),
        "know": lambda capabilities: impl.probed.update({device: capabilities}),
        "play": lambda task: _without_copies(play_task(impl, task, device, inner_limit_s)),
        "pairs": lambda case: pairs_of(impl, case, device, inner_limit_s),
        "renew": renew,
    }
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        try:
            with watching(inner_limit_s):
                answer = answers[message[0]](*message[1:])
        except ValueError as error:
            connection.send(("refused", str(error)))
        except Hang as hang:
            connection.send(("hung", str(hang)))
        else:
            connection.send(("context lost" if context_error(device) else "done", answer))


def _separate(output: str, environment: dict[str, str]) -> None:
    """Give the process a session, its output file and the driver's environment; it ends when the driver ends."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if sys.platform == "linux" and (parent := parent_process()):
        import fcntl

        # the kernel sends SIGKILL when the driver's end of this pipe closes: a worker that hangs ends too
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)


def _become_a_rank(connection: Connection, device: str, rank: int, size: int, store: str) -> Callable[[], None]:
    """Join the group of processes; returns a function that joins a new one."""
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(rank)
    place = ("nccl" if on_gpu else "gloo", store, rank, size)
    join(*place)
    running_ranks_by(ProcessRanks(connection, rank, size, device))
    return lambda: rejoin(*place)


def copies(pid: int) -> list[int]:
    """The children of a process that are forks of it, running or ended; none without /proc.

    A running child is a fork if it has its parent's command line. Of an ended child only the name is left to compare.
    """

    def words(of: int | str, file: str) -> str:
        try:
            return Path("/proc", str(of), file).read_text().strip("\0\n ")
        except OSError:  # it is gone
            return ""

    listed = Path("/proc", str(pid), "task").glob("*/children")
    children = [int(child) for file in listed for child in words(pid, str(file.relative_to(f"/proc/{pid}"))).split()]
    return [c for c in children if words(pid, f := "cmdline" if words(c, "cmdline") else "comm") == words(c, f)]


def _without_copies(played: Played) -> Played:
    """The verdict, or "wrong" if this process has forks of itself now; they are ended."""
    found = copies(os.getpid())
    for pid in found:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if not found:
        return played
    words = f"a call forked the process, and left {len(found)} copies of it behind"
    return replace(played, verdict="wrong", findings=(words, *played.findings))
