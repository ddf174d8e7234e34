"""`run_ranks` in a process for each rank: the groups of torch.distributed, and the exchange of outcomes."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.implementation import Missing
from conformance.judge.reference import Outcome, describe_error
from conformance.run.play_case import UnsupportedCase

__all__ = ["ProcessMember", "ProcessRanks", "join", "rejoin"]

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
class ProcessMember:
    """A process's rank in a group, the group's size, and the `process_group` for `Implementation.ContextParallel`."""

    rank: int
    size: int
    process_group: Any

    def split(self, a2a_size: int) -> tuple[ProcessMember, ProcessMember]:
        """Return its members of its a2a group and of its p2p group: rank = p2p_rank * a2a_size + a2a_rank."""
        if a2a_size < 1 or self.size % a2a_size:
            raise ValueError(f"a2a_size is {a2a_size}; it must divide the group's size {self.size}")
        first = self.rank - self.rank % a2a_size
        inner = tuple(range(first, first + a2a_size))
        outer = tuple(range(self.rank % a2a_size, self.size, a2a_size))
        return _member(inner, self.rank), _member(outer, self.rank)


_groups: dict[tuple[int, ...], Any] = {}
_joined = 0  # Joins of this process so far: every join has its own store.


def join(backend: str, store: str, rank: int, size: int) -> None:
    """Become one rank, and create every group that a problem may need.

    All ranks create all groups here, in one order, as `new_group` requires.
    """
    global _joined
    _joined += 1
    dist.init_process_group(
        backend,
        init_method=f"file://{store}.{_joined}",
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


def rejoin(backend: str, store: str, rank: int, size: int) -> None:
    """Join again with new groups: a failed problem may have left messages in the old ones."""
    _groups.clear()
    dist.destroy_process_group()
    join(backend, store, rank, size)


def _member(ranks: tuple[int, ...], rank: int) -> ProcessMember:
    return ProcessMember(ranks.index(rank), len(ranks), _groups[ranks])


class ProcessRanks:
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
        self._connection.send(("outcome", error, None if outcome is None else _pack(outcome)))
        _, answer = self._connection.recv()
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
