"""`python -m conformance.workers FD NAME DEVICE LIMIT_S [RANK SIZE STORE]`: a worker; started by the driver alone.

It says ("ready", offer) or ("load error", why), and then answers ("probe",), ("play", task), ("pairs", case) and
("renew",) with ("done", answer), or ("refused", why) for what means nothing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
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
    if place:
        _join(connection, device, *place)
    from conformance.capabilities import probe
    from conformance.implementation import LoadError, load
    from conformance.player import Offer, pairs_of, play_task
    from conformance.workers.ranks import renew_groups

    try:
        impl = load(name)
    except LoadError as error:
        connection.send(("load error", str(error)))
        return
    connection.send(("ready", Offer.of(impl)))
    inner_limit_s = float("inf") if place else 0.8 * float(limit_s)  # the ranks' own watchdog says more
    answers: dict[str, Callable[..., Any]] = {
        "probe": lambda: probe(impl, device),
        "play": lambda task: play_task(impl, task, device, inner_limit_s),
        "pairs": lambda case: pairs_of(impl, case, device, inner_limit_s),
        "renew": renew_groups,
    }
    while True:
        try:
            message: Any = connection.recv()
        except EOFError:
            return
        try:
            answer = answers[message[0]](*message[1:])
        except ValueError as error:
            connection.send(("refused", str(error)))
        else:
            connection.send(("done", answer))


def _join(connection: Connection, device: str, rank: str, size: str, store: str) -> None:
    """Become one rank of the pool."""
    import torch
    import torch.distributed as dist

    from conformance.reference import running_ranks_by
    from conformance.workers.ranks import ProcessRanks

    if device.startswith("cuda"):
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        "nccl" if device.startswith("cuda") else "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(hours=1),  # the driver is the watchdog
    )
    running_ranks_by(ProcessRanks(connection, int(rank), int(size), device))


if __name__ == "__main__":
    main(*sys.argv[1:])
