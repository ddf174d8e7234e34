"""`python -m conformance.workers FD NAME DEVICE LIMIT_S [RANK SIZE STORE]`: a worker; started by the driver alone.

A worker says ("ready", offer) or ("load error", why), and then answers ("ask", problem), ("try", case), ("know",
capabilities), ("play", task), ("pairs", case) and ("renew",) with ("done", answer), with ("context lost", answer) if
it can answer nothing more, ("hung", where) for a question, or ("refused", why) for what means nothing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1


def main(fd: str, name: str, device: str, limit_s: str, *place: str) -> None:
    """Load, then play what comes until the driver hangs up."""
    connection = Connection(int(fd))
    if sys.platform == "linux":  # a worker that hangs must not outlive its driver
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    import torch

    torch.set_num_threads(1)
    renew = _become_a_rank(connection, device, *place) if place else lambda: None
    from conformance.capabilities import ask, try_case
    from conformance.gpu_context import context_error
    from conformance.implementation import LoadError, load
    from conformance.reference import Hang, watching
    from conformance.runner import Offer, pairs_of, play_task
    from conformance.workers.forks import without_copies

    try:
        impl = load(name)
    except LoadError as error:
        connection.send(("load error", str(error)))
        return
    connection.send(("ready", Offer.of(impl)))
    inner_limit_s = float("inf") if place else 0.8 * float(limit_s)  # the ranks' own watchdog says more
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


def _become_a_rank(connection: Connection, device: str, rank: str, size: str, store: str) -> Callable[[], None]:
    """Join the pool; returns what joins it anew."""
    import torch

    from conformance.reference import running_ranks_by
    from conformance.workers.ranks import ProcessRanks, join, rejoin

    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(int(rank))
    place = ("nccl" if on_gpu else "gloo", store, int(rank), int(size))
    join(*place)
    running_ranks_by(ProcessRanks(connection, int(rank), int(size), device))
    return lambda: rejoin(*place)


if __name__ == "__main__":
    main(*sys.argv[1:])
