"""The driver's end of the nursery, the process from which its workers are forked (`conformance.workers.__main__`)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from threading import Lock
from typing import Any

__all__ = ["Nursery", "nursery"]

_POLL_S = 0.005


class Nursery:
    """A process that has imported PyTorch and the suite; it ends when this one does."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._lock = Lock()
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "conformance.workers", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        theirs.close()

    def fork(self, connection: int, said: int, arguments: tuple[Any, ...]) -> int:
        """Start a worker with this process's environment, working directory and path.

        Args:
            connection: the worker's end of its connection, a file descriptor.
            said: of the file for what it prints.
            arguments: of `conformance.workers.player.play`, after the connection.

        Returns:
            Its process id.
        """
        path = [os.getcwd(), *(os.path.abspath(p) for p in sys.path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path[1:]), "OMP_NUM_THREADS": "1"}
        with self._lock:
            self._connection.send(("fork", environment, path, arguments))
            for descriptor in (connection, said):
                send_handle(self._connection, descriptor, self._process.pid)
            return self._connection.recv()

    def exit_code(self, pid: int, timeout_s: float = float("inf")) -> int | None:
        """Wait for a worker's end; None if it does not end in time. To be asked until it has ended, and not again."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._connection.send(("ended", pid))
                code = self._connection.recv()
            if code is not None or time.monotonic() > deadline:
                return code
            time.sleep(_POLL_S)

    @property
    def lives(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None


@cache
def _nursery(pid: int) -> Nursery:
    return Nursery()


def nursery() -> Nursery:
    """This process's nursery, which is started when it is needed."""
    if not _nursery(os.getpid()).lives:
        _nursery.cache_clear()
    return _nursery(os.getpid())
