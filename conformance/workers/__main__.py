"""`python -m conformance.workers FD`: the nursery, from which workers are forked; started by the driver alone.

It has imported PyTorch and the suite, which takes seconds, and does nothing itself, so that a copy of it is a fresh
process. To ("fork", environment, path, arguments) and two file descriptors, the worker's connection and the file for
what it prints, it says the worker's process id; to ("ended", process id) its exit code, or None while it runs.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch

from conformance.workers.player import play

_PR_SET_PDEATHSIG = 1


def main(fd: str) -> None:
    """Fork what the driver asks for until it hangs up; in a worker, play."""
    driver = Connection(int(fd))
    while True:
        try:
            word, *rest = driver.recv()
        except EOFError:
            return
        if word == "ended":
            pid, status = os.waitpid(rest[0], os.WNOHANG)
            driver.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        connection, said = recv_handle(driver), recv_handle(driver)
        if not (pid := os.fork()):
            driver.close()
            _settle(said, *rest[:2])
            play(Connection(connection), *rest[2])
            return
        os.close(connection)
        os.close(said)
        driver.send(pid)


def _settle(said: int, environment: dict[str, str], path: list[str]) -> None:
    """Make this copy of the nursery a process of its own."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(said, stream)
    if sys.platform == "linux":  # a worker that hangs must not outlive its driver, with which the nursery ends
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    os.chdir(path[0])
    torch.set_num_threads(1)


if __name__ == "__main__":
    main(sys.argv[1])
