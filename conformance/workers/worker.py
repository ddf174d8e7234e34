"""The driver's end of one worker process: start it, talk to it, say how it died."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from conformance.workers.nursery import nursery

__all__ = ["Worker", "WorkerDied"]

_LOOK_S = 0.5  # for a hanging worker to say where it is


class WorkerDied(Exception):
    """The process is gone; the message says how. `by_memory` when it was killed, which is what the kernel does then."""

    def __init__(self, how: str, by_memory: bool) -> None:
        super().__init__(how)
        self.by_memory = by_memory


class Worker:
    """One process that runs `conformance.workers.player.play`.

    Args:
        name: of the implementation.
        device: where it plays.
        limit_s: of a problem, in seconds.
        place: (rank, size, store) in a group of processes; None where all ranks are threads of this process.
    """

    def __init__(self, name: str, device: str, limit_s: float, place: tuple[int, int, str] | None = None) -> None:
        self.connection, theirs = Pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # stdout and stderr, until `stop`
        self._nursery = nursery()
        self._code: int | None = None
        self.pid = self._nursery.fork(theirs.fileno(), self._said.fileno(), (name, device, limit_s, place))
        theirs.close()

    def send(self, message: Any) -> None:
        """Raises WorkerDied."""
        try:
            self.connection.send(message)
        except OSError:
            raise self.death() from None

    def receive(self, timeout_s: float) -> Any:
        """The next message. Raises WorkerDied, and TimeoutError when there is none in time."""
        if not self.connection.poll(timeout_s):
            raise TimeoutError
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self.death() from None

    def death(self) -> WorkerDied:
        """How it died; to be called when the connection is gone."""
        if self._code is None:
            self._code = self._nursery.exit_code(self.pid, 5.0)
        if (code := self._code) is None:
            self.stop()
            return WorkerDied("it closed its connection", False)
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                return WorkerDied(f"{how}, which most often means that memory ran out", True)
        else:
            how = f"exit code {code}"
        return WorkerDied("; ".join([how, *self._last_words()]), False)

    def where(self) -> list[str]:
        """Where its threads are, by faulthandler: file, line and function of their innermost frames."""
        begin = self._said.seek(0, os.SEEK_END)
        try:
            os.kill(self.pid, signal.SIGUSR1)
        except OSError:
            return []
        time.sleep(_LOOK_S)
        return _places(self._text(begin))

    def stop(self) -> None:
        """End it and whatever it started, at once; what it started may outlive it."""
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._code is None:
            with suppress(OSError):  # it may not lead a group yet
                os.kill(self.pid, signal.SIGKILL)
            self._code = self._nursery.exit_code(self.pid)
        self.connection.close()
        self._said.close()

    def _text(self, begin: int = 0) -> str:
        return os.pread(self._said.fileno(), 1 << 20, begin).decode(errors="replace")

    def _last_words(self) -> list[str]:
        """The fatal error and its place if faulthandler saw one, else the last line."""
        text = self._text()
        fatal = re.findall(r"Fatal Python error: .*", text)
        if fatal:
            return [fatal[-1], *_places(text[text.rfind(fatal[-1]) :])[:1]]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1:]


def _places(dump: str) -> list[str]:
    """The innermost frame of every thread of a faulthandler dump; threads that wait for others are left out.

    >>> _places('Thread 0x1 (most recent call first):\\n  File "/a/user.py", line 3 in f\\n  File "/b.py", line 9 in g')
    ['at user.py:3 in f']
    """
    found = []
    for thread in re.split(r"(?:Current t|T)hread 0x", dump)[1:]:
        frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', thread)
        frames = [(Path(file).name, line, name) for file, line, name in frames]
        if frames and not any(file in ("threading.py", "sim_switch.py") for file, _, _ in frames[:4]):
            found.append("at {}:{} in {}".format(*frames[0]))
    return list(dict.fromkeys(found))
