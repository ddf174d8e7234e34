"""Let one process build at a time, as far as locks work; no process waits for ever.

The kernel releases a lock when its process ends, for any reason. A lock does not tell if its builder was suspended.
Some file systems have no locks, or separate ones on each node: then several processes build, each in a separate folder.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cp_fast.tools.build import trust
from cp_fast.tools.log import log

__all__ = ["VARIABLE", "exclusive", "place"]

VARIABLE = "CP_ATTENTION_BUILD_WAIT"
_DEFAULT = 600.0  # Seconds: some builds are for many GPU architectures on few cores.
_SAY_AFTER = 5.0
_LINUX_ENOTSUPP = 524  # Some network file systems return it; errno lacks it.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, _LINUX_ENOTSUPP)


@contextmanager
def exclusive(path: Path, done: Callable[[], bool]) -> Iterator[bool]:
    """Wait until this process may build; it holds the lock until the block ends.

    Yields:
        Whether another process held the lock before, so that there may be a result or a failure. Also False if this
        process builds without the lock: locks do not work, or the holder took too long.

    Raises:
        OSError: the lock is not ours or cannot be made. ValueError: the environment variable cannot be read.
    """
    limit = _limit()
    descriptor = trust.open_lock(path)
    try:
        yield _wait(descriptor, path, done, limit)
    finally:
        os.close(descriptor)


def place() -> str:
    """The scope of process ids: this host and this container's process namespace."""
    try:
        processes = f"{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        processes = "0"
    return f"{socket.gethostname().replace('/', '_')}.{processes}"


def _wait(descriptor: int, path: Path, done: Callable[[], bool], limit: float) -> bool:
    import fcntl  # Not on Windows, where nothing is built.

    began, waited, said, pause = time.monotonic(), False, False, 0.02
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return waited
        if done():
            return True
        seconds = time.monotonic() - began
        if seconds >= limit:
            log(f"{_holder(descriptor)} has not built the native kernels in {seconds:.0f} s; this process builds them")
            return False
        if not said and seconds >= _SAY_AFTER:
            said = True
            log(
                f"waiting for {_holder(descriptor)}, which builds the native kernels and holds {path}; "
                f"after {limit:g} s ({VARIABLE}) this process builds them itself"
            )
        time.sleep(pause)
        waited, pause = True, min(2 * pause, 0.5)


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"


def _limit() -> float:
    text = os.environ.get(VARIABLE) or str(_DEFAULT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{VARIABLE} is {text!r}; it must be a number of seconds, 0 or more")
    return seconds
