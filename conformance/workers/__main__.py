"""`python -m conformance.workers FD NAME DEVICE LIMIT_S [RANK SIZE STORE]`: a worker; started by the driver alone.

It says ("ready", info) or ("load error", why), and then answers ("probe",) and ("play", task).
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys
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
    from conformance.player import play_task

    try:
        impl = load(name)
    except LoadError as error:
        connection.send(("load error", str(error)))
        return
    info = {"levels": impl.levels, "missing": impl.missing, "group_kind": impl.group_kind, "name": impl.name}
    connection.send(("ready", info))
    inner_limit_s = float("inf") if place else 0.8 * float(limit_s)  # the ranks' own watchdog says more
    while True:
        try:
            message: Any = connection.recv()
        except EOFError:
            return
        try:
            if message[0] == "probe":
                answer = probe(impl, device)
            else:
                answer = play_task(impl, message[1], device, inner_limit_s)
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
