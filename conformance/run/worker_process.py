"""A worker process (see `conformance.run.workers`): it answers the driver, and may be one rank of a process group."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from conformance.draw.capabilities import Capabilities
from conformance.implementation import Implementation, LoadError, Missing, load
from conformance.judge.reference import Hang, Outcome, describe_error, running_ranks_by, watching
from conformance.run.gpu_context import context_error
from conformance.run.play_case import UnsupportedCase
from conformance.run.play_problem import Offer

__all__ = ["Answer", "know", "places_in", "serve"]


class Answer(NamedTuple):
    """The value that a worker's function returned, or its error; and whether the worker must not be used again."""

    value: Any
    error: Exception | None = None
    spent: bool = False


def serve(
    connection: Connection, output: str, environment: dict[str, str], device: str, limit_s: float, place: Any
) -> None:
    """Load the implementation that the first message names, then answer until the driver closes the connection.

    Args:
        output: the file for stdout and stderr.
        place: (rank, size, store) in a group of processes; None where all ranks are threads of this process.
    """
    _separate(output, environment)
    impl: Implementation | None = None
    with suppress(EOFError):
        while message := connection.recv():
            try:
                with watching(float("inf") if place else 0.8 * limit_s):  # `run_ranks` knows more than the driver
                    if impl is None:
                        if place:
                            _join(connection, device, *place)
                        impl, value = (loaded := load(message)), Offer.of(loaded)
                    else:
                        value = message[0](impl, message[1], device)
                answer = Answer(value, None, bool(context_error(device)))
            except (ValueError, Hang, LoadError) as error:
                answer = Answer(None, error, isinstance(error, Hang))
            connection.send(answer)


def _separate(output: str, environment: dict[str, str]) -> None:
    """Give the process a session, its output file and the driver's environment; it ends when the driver ends."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    faulthandler.enable()
    if sys.platform == "linux" and (parent := multiprocessing.parent_process()):
        import fcntl

        # the kernel sends SIGKILL when the driver's end of this pipe closes: a worker that hangs ends too
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(1)


def places_in(output: str) -> list[str]:
    """The innermost frame of each thread in faulthandler's last dump, without the threads that wait for others.

    >>> dump = 'Thread 0x1 (most recent call first):\\n  File "/a/user.py", line 3 in f\\n  File "/b.py", line 9 in g'
    >>> places_in("Fatal Python error: Aborted\\n" + dump)
    ['at user.py:3 in f']
    """
    found = []
    for thread in re.split(r"(?:Current t|T)hread 0x", output.rpartition("Fatal Python error")[2])[1:]:
        frames = re.findall(r'File "(?:[^"]*/)?([^"/]*)", line (\d+) in (\S+)', thread)
        if frames and not any(file in ("threading.py", "rank_scheduler.py") for file, _, _ in frames[:4]):
            found.append("at {}:{} in {}".format(*frames[0]))
    return list(dict.fromkeys(found))


def know(impl: Implementation, capabilities: Capabilities, device: str) -> None:
    """Store what the driver found by asking."""
    impl.probed[device] = capabilities


_KINDS: tuple[type[Exception], ...] = (
    Missing,
    UnsupportedCase,
    MemoryError,
    NotImplementedError,
    ValueError,
    TypeError,
    RuntimeError,
)


@dataclass(frozen=True)
class _Member:
    """A process's rank in a group, the group's size, and the `process_group` for `Implementation.ContextParallel`."""

    rank: int
    size: int
    process_group: Any

    def split(self, a2a_size: int) -> tuple[_Member, _Member]:
        """Return its members of its a2a group and of its p2p group: rank = p2p_rank * a2a_size + a2a_rank."""
        if a2a_size < 1 or self.size % a2a_size:
            raise ValueError(f"a2a_size is {a2a_size}; it must divide the group's size {self.size}")
        first = self.rank - self.rank % a2a_size
        inner = tuple(range(first, first + a2a_size))
        outer = tuple(range(self.rank % a2a_size, self.size, a2a_size))
        return _member(inner, self.rank), _member(outer, self.rank)


_groups: dict[tuple[int, ...], Any] = {}


def _join(connection: Any, device: str, rank: int, size: int, store: str) -> None:
    """Become one rank, and create every group that a problem may need.

    All ranks create all groups here, in one order, as `new_group` requires.

    Args:
        connection: to the driver.
        store: the path of a file that the ranks share.
    """
    if device.startswith("cuda"):
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device.startswith("cuda") else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(hours=1),  # The driver is the watchdog.
    )
    wanted = []
    for cp_size in range(1, size + 1):
        wanted.append(tuple(range(cp_size)))
        for inner in (n for n in range(1, cp_size + 1) if cp_size % n == 0):
            wanted += [tuple(range(first, first + inner)) for first in range(0, cp_size, inner)]
            wanted += [tuple(range(first, cp_size, inner)) for first in range(inner)]
    for ranks in dict.fromkeys(wanted):
        _groups[ranks] = dist.new_group(list(ranks))
    running_ranks_by(_ProcessRanks(connection, rank, size, device))


def _member(ranks: tuple[int, ...], rank: int) -> _Member:
    return _Member(ranks.index(rank), len(ranks), _groups[ranks])


class _ProcessRanks:
    """A `RankRunner`: the first `cp_size` processes are the ranks; the others only receive the outcomes."""

    def __init__(self, connection: Any, rank: int, size: int, device: str) -> None:
        self._connection, self._rank, self._size, self._device = connection, rank, size, device
        self._inside, self._pid = False, os.getpid()

    def __call__(self, cp_size: int, fn: Callable[[Any], Any], limit_s: float) -> list[Outcome]:
        """Like `conformance.judge.reference.run_ranks`; the driver enforces the time limit."""
        if self._inside:
            raise Missing("the suite cannot make a group of processes inside another one")
        if cp_size > self._size:
            raise Missing(f"a group of {cp_size} processes is more than the pool's {self._size}")
        outcome = None
        if self._rank < cp_size:
            self._inside = True
            try:
                outcome = Outcome(fn(_member(tuple(range(cp_size)), self._rank)), None)
            except (Exception, SystemExit) as error:
                outcome = Outcome(None, error)
            finally:
                self._inside = False
        if os.getpid() != self._pid:  # The implementation forked: the copy must not answer for this rank.
            os._exit(0)
        error = describe_error(outcome.error) if outcome is not None and outcome.error is not None else ""
        self._connection.send((error, None if outcome is None else _pack(outcome)))
        answer = self._connection.recv()
        return [_unpack(packed, self._device) for packed in answer[:cp_size]]


def _pack(outcome: Outcome) -> bytes:
    """Serialise an outcome. A value that cannot be pickled becomes its type's name, an error one of its kind."""
    value, error = outcome
    if error is not None:
        error = _portable(error)
    buffer = io.BytesIO()
    try:
        torch.save((value, error), buffer)
    except Exception:  # A plan with streams, for example; the receiver does not read it.
        buffer = io.BytesIO()
        torch.save((f"<{type(value).__name__}>", error), buffer)
    return buffer.getvalue()


def _unpack(packed: bytes, device: str) -> Outcome:
    return Outcome(*torch.load(io.BytesIO(packed), map_location=device, weights_only=False))


def _portable(error: BaseException) -> Exception:
    described = describe_error(error)
    try:
        copy = pickle.loads(pickle.dumps(error))
        if not isinstance(copy, Exception) or str(copy) != str(error):
            raise ValueError("the copy differs")
    except Exception:
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), Exception)
        copy = kind(described)
    copy.described = described  # type: ignore[attr-defined]  # the traceback is not copied
    return copy
