"""A worker, which loads the implementation and plays what comes; forked from the nursery for the driver alone.

A worker says ("ready", offer) or ("load error", why), and then answers ("ask", problem), ("try", case), ("know",
capabilities), ("play", task), ("pairs", case) and ("renew",) with ("done", answer), with ("context lost", answer) if
it can answer nothing more, ("hung", where) for a question, or ("refused", why) for what means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from conformance.capabilities import ask, try_case
from conformance.gpu_context import context_error
from conformance.implementation import LoadError, load
from conformance.reference import Hang, running_ranks_by, watching
from conformance.runner import Offer, pairs_of, play_task
from conformance.workers.forks import without_copies
from conformance.workers.ranks import ProcessRanks, join, rejoin

__all__ = ["play"]


def play(connection: Connection, name: str, device: str, limit_s: float, place: tuple[int, int, str] | None) -> None:
    """Load, then play what comes until the driver hangs up.

    Args:
        name: of the implementation.
        limit_s: of a problem, in seconds.
        place: (rank, size, store) in a group of processes; None where all ranks are threads of this one.
    """
    renew = _become_a_rank(connection, device, *place) if place else lambda: None
    try:
        impl = load(name)
    except LoadError as error:
        connection.send(("load error", str(error)))
        return
    connection.send(("ready", Offer.of(impl)))
    inner_limit_s = float("inf") if place else 0.8 * limit_s  # the ranks' own watchdog says more
    answers: dict[str, Callable[..., Any]] = {
        "ask": lambda problem: ask(impl, problem, device),
        "try": lambda case: try_case(impl, case, device),
        "know": lambda capabilities: impl.probed.update({device: capabilities}),
        "play": lambda task: without_copies(play_task(impl, task, device, inner_limit_s)),
        "pairs": lambda case: pairs_of(impl, case, device, inner_limit_s),
        "renew": renew,
    }
    while True:
        try:
            message: Any = connection.recv()
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


def _become_a_rank(connection: Connection, device: str, rank: int, size: int, store: str) -> Callable[[], None]:
    """Join the pool; returns what joins it anew."""
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(rank)
    place = ("nccl" if on_gpu else "gloo", store, rank, size)
    join(*place)
    running_ranks_by(ProcessRanks(connection, rank, size, device))
    return lambda: rejoin(*place)
