"""Processes that run one function at the same time, the ranks of a group for example: the first that fails ends all."""

from __future__ import annotations

import io
import math
import os
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from conformance.checks.reference import Outcome, UnsupportedCase, describe_error, running_ranks_by
from conformance.implementation import Missing

__all__ = ["LONGEST_S", "device_of_group", "join_group", "own_gpu", "run_together", "say"]

LONGEST_S = 1e6  # a limit that every timer takes

_END_S = 10.0  # that a process may take to end after its answer
_STAGE = b"stage "  # begins a message that is no answer
_said: Connection | None = None  # of this process, to the one that started it


def run_together(
    context: Any,
    function: Callable[[Any], Any],
    jobs: Mapping[str, Any],
    failed: Any,
    limit_s: float = math.inf,
    on_stage: Callable[[str, str], None] = lambda name, stage: None,
) -> list[Any]:
    """`function(job)` for every job, each in its own process.

    Args:
        context: starts the processes (`multiprocessing.get_context`).
        function: its exceptions must be such that pickle can copy them.
        jobs: by the names of their processes.
        failed: a type of exception, made from one sentence.
        on_stage: called with a process's name and what it does now: what the process passes to `say`, and "done".

    Returns:
        What the function returned, with tensors on the CPU, in the order of the jobs.

    Raises:
        failed: a process died, or did not end in time. Otherwise what `function` raised, the first if there are
        several: a rank that fails lets others fail, which lose their connections. All processes have been ended.
    """
    names, values = list(jobs), dict[str, Any]()
    running: dict[Any, tuple[str, Any]] = {}  # pipe -> process
    stages: dict[Any, tuple[str, float]] = {}  # pipe -> what it does, and since when
    deadline = time.monotonic() + limit_s
    try:
        for name, job in jobs.items():
            pipe, theirs = context.Pipe(duplex=False)
            running[pipe] = name, context.Process(target=_run, args=(function, job, theirs), name=name)
            running[pipe][1].start()
            theirs.close()
            stages[pipe] = "starts", time.monotonic()
            on_stage(name, "starts")
        waiting = list(running)
        while waiting:
            ready = wait(waiting, None if limit_s == math.inf else max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(f"{running[pipe][0]} ({_since(*stages[pipe])})" for pipe in waiting)
                raise failed(f"not ended within {limit_s:g} s: {late}; the ranks may wait for each other")
            answers = []
            for pipe in ready:
                stage, *answer = _message(pipe, *running[pipe], failed)
                stages[pipe] = stage, time.monotonic()
                on_stage(running[pipe][0], stage)
                if answer:
                    waiting = [other for other in waiting if other is not pipe]
                    answers.append((*answer, running[pipe][0]))
            for _, error, value, name in sorted(answers, key=lambda answer: answer[0]):
                if error is not None:
                    raise error
                values[name] = value
        for _, process in running.values():
            process.join(_END_S)
        return [values[name] for name in names]
    finally:
        for _, process in running.values():
            if process.pid is not None:
                process.kill()
                process.join()


def say(stage: str) -> None:
    """Tell the process that started this one what it does now, such as "step 1 of 2"."""
    if _said is not None:
        _said.send_bytes(_STAGE + stage.encode())


def _since(stage: str, since: float) -> str:
    return f"{stage}, for {time.monotonic() - since:.0f} s"


def _message(pipe: Any, name: str, process: Any, failed: Any) -> tuple[Any, ...]:
    """A message of a process: the stage that begins; or "done", when it answered, the error or None, the value."""
    try:
        said = pipe.recv_bytes()
    except EOFError:
        process.join()
        return "died", 0.0, failed(f"{name} died with exit code {process.exitcode}"), None
    if said.startswith(_STAGE):
        return (said.removeprefix(_STAGE).decode(),)
    return "done", *torch.load(io.BytesIO(said), weights_only=False, map_location="cpu")


def _run(function: Callable[[Any], Any], job: Any, pipe: Connection) -> None:
    global _said
    _said = pipe
    try:
        answer = None, function(job)
    except Exception as error:
        answer = error, None
    packed = io.BytesIO()
    torch.save((time.time(), *answer), packed)
    pipe.send_bytes(packed.getbuffer())


# ---- processes as ranks
#
# Processes as the ranks of a group: `run_ranks` for an implementation whose `group_kind` is "process".
#
# Every process runs the same problem, and the first `cp_size` of them are its ranks. They send their outcomes to the
# driver, which sends all outcomes to each.


_KINDS = Missing, UnsupportedCase, MemoryError, NotImplementedError, ValueError, TypeError, RuntimeError
_groups: dict[tuple[int, ...], Any] = {}


@dataclass(frozen=True)
class _Member:
    """A process's rank in a group, the group's size, and the `process_group` for `Implementation.ContextParallel`."""

    rank: int
    size: int
    process_group: Any

    @staticmethod
    def of(ranks: tuple[int, ...], rank: int) -> _Member:
        return _Member(ranks.index(rank), len(ranks), _groups[ranks])

    def split(self, a2a_size: int) -> tuple[_Member, _Member]:
        """Return its members of its a2a group and of its p2p group: rank = p2p_rank * a2a_size + a2a_rank."""
        if a2a_size < 1 or self.size % a2a_size:
            raise ValueError(f"a2a_size is {a2a_size}; it must divide the group's size {self.size}")
        first = self.rank - self.rank % a2a_size
        inner = tuple(range(first, first + a2a_size))
        outer = tuple(range(self.rank % a2a_size, self.size, a2a_size))
        return _Member.of(inner, self.rank), _Member.of(outer, self.rank)


def own_gpu(rank: int, size: int) -> torch.device:
    """Make a rank's GPU its process's current one, before the process joins a group. With fewer GPUs than ranks, ranks
    share a GPU: NCCL takes each for a separate host and sends through sockets, which is right and slow.
    """
    gpus = max(torch.cuda.device_count(), 1)
    if size > gpus:
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    torch.cuda.set_device(device := torch.device("cuda", rank % gpus))
    return device


def device_of_group() -> torch.device:
    """Where this process's tensors lie: its current GPU if the group of all processes has NCCL, the CPU otherwise."""
    on_gpu = dist.is_initialized() and "cuda:nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def join_group(connection: Any, device: str, rank: int, size: int, store: str) -> None:
    """Become one rank, and create every group that a problem may need: all ranks in one order, as `new_group` requires.

    Args:
        connection: to the driver.
        store: the path of a file that the ranks share.
    """
    cuda = device.startswith("cuda")
    if cuda:
        own_gpu(rank, size)
    group: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(hours=1), **group)  # the driver is quicker
    wanted = []
    for cp_size in range(1, size + 1):
        wanted.append(tuple(range(cp_size)))
        for inner in (n for n in range(1, cp_size + 1) if cp_size % n == 0):
            wanted += [tuple(range(first, first + inner)) for first in range(0, cp_size, inner)]
            wanted += [tuple(range(first, cp_size, inner)) for first in range(inner)]
    for ranks in dict.fromkeys(wanted):
        _groups[ranks] = dist.new_group(list(ranks))
    running_ranks_by(_ProcessRanks(connection, rank, size, device))


class _ProcessRanks:
    """A `RankRunner`; processes that are no rank of a problem only receive the outcomes."""

    def __init__(self, connection: Any, rank: int, size: int, device: str) -> None:
        self._connection, self._rank, self._size, self._device = connection, rank, size, device
        self._inside, self._pid = False, os.getpid()

    def __call__(self, cp_size: int, fn: Callable[[Any], Any], limit_s: float) -> list[Outcome]:
        """Like `conformance.checks.reference.run_ranks`; the driver enforces the time limit."""
        if self._inside:
            raise Missing("the suite cannot make a group of processes inside another one")
        if cp_size > self._size:
            raise Missing(f"a group of {cp_size} processes is more than the pool's {self._size}")
        error, packed = "", None
        if self._rank < cp_size:
            self._inside = True
            try:
                packed = _packed(fn(_Member.of(tuple(range(cp_size)), self._rank)), None)
            except (Exception, SystemExit) as raised:
                error, packed = describe_error(raised), _packed(None, _portable(raised))
            finally:
                self._inside = False
        if os.getpid() != self._pid:  # The implementation forked: the copy must not answer for this rank.
            os._exit(0)
        self._connection.send((error, packed))
        load = {"map_location": self._device, "weights_only": False}
        return [Outcome(*torch.load(io.BytesIO(x), **load)) for x in self._connection.recv()[:cp_size]]


def _packed(value: Any, error: Exception | None) -> bytes:
    """An outcome as bytes. A value that cannot be pickled becomes its type's name."""
    buffer = io.BytesIO()
    try:
        torch.save((value, error), buffer)
    except Exception:  # A plan with streams, for example; the receiver does not read it.
        return _packed(f"<{type(value).__name__}>", error)
    return buffer.getvalue()


def _portable(error: BaseException) -> Exception:
    """A copy that can be pickled, of the same kind at least, with the description: the traceback is not copied."""
    described = describe_error(error)
    try:
        copy = pickle.loads(pickle.dumps(error))
        if not isinstance(copy, Exception) or str(copy) != str(error):
            raise ValueError("the copy differs")
    except Exception:
        copy = next((kind for kind in _KINDS if isinstance(error, kind)), Exception)(described)
    copy.described = described  # type: ignore[attr-defined]
    return copy
