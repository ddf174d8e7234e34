"""torch.distributed process groups as `cp_ref.groups.group.Group`: one process a rank, over gloo or NCCL."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from cp_ref.groups.group import Group, PairGroup, Parcel, Pending
from cp_ref.schedules.planners.make_schedule import SCHEDULES
from cp_ref.schedules.values import shown

if not dist.is_initialized():
    # Its functions have the default group of the moment as a default argument. Imported later, as an optimizer does,
    # they keep that group for ever. PyTorch (2.13, 2.14) then aborts at exit: gloo's thread outlives the interpreter.
    import torch.distributed.nn  # pyright: ignore[reportUnusedImport]

__all__ = [
    "PeerError",
    "ProcessMember",
    "as_group",
    "error_context",
    "follow",
    "silent_rank",
    "under_way",
]

_GRACE = 3.0  # Seconds in which a peer can write that it also waits.
_FRESH = 3600.0  # Seconds after which an entry belongs to an earlier failure.


def silent_rank(here: int, missing: int) -> int | None:
    """The silent rank that kept a peer from answering this one. None if it cannot be found: the store is gone too, or
    every rank answers.

    Args:
        here, missing: this rank and the peer, by their numbers in the job.
    """
    found: list[int | None] = []

    def ask() -> None:
        with suppress(Exception):  # Any error of the store: there is an error to report already.
            found.append(follow(_job_store(), here, missing, _GRACE))

    asks = threading.Thread(target=ask, daemon=True)  # A store whose process is stopped never answers.
    asks.start()
    asks.join(2 * _GRACE)
    return found[0] if found else None


def _job_store() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    return PrefixStore("cp_attention/missing", store.clone() if hasattr(store, "clone") else store)


def follow(store: Any, here: int, missing: int, grace: float) -> int | None:
    """Write down that this rank misses a peer. Then follow the others' entries to a rank that has written nothing for
    `grace` seconds, and return it. None if every rank has written.

    >>> store = dist.HashStore()
    >>> follow(store, 3, 2, 0), follow(store, 0, 3, 0), follow(store, 2, 0, 0)
    (2, 2, None)
    """
    store.set(str(here), json.dumps([time.time(), missing]))
    until = time.monotonic() + grace
    while True:
        at, seen = missing, {here}
        while at not in seen:
            seen.add(at)
            if (then := _missed_by(store, at)) is None:
                break
            at = then
        else:
            return None
        if time.monotonic() >= until:
            return at
        time.sleep(0.05)


def _missed_by(store: Any, rank: int) -> int | None:
    """The peer that a rank misses, by its entry."""
    if not store.check([str(rank)]):
        return None
    at, missing = json.loads(store.get(str(rank)))
    return int(missing) if time.time() - at < _FRESH else None


_GATHER_TAG = 2**27  # Far above the tags of schedules.


class PeerError(RuntimeError):
    """Messages did not come through: a peer died, or did not answer within the group's time-out.

    Names the peers by their global ranks, those of the whole job.
    """


class error_context:  # Used like a function; a generator would take the host three times as long.
    """Name the current work in the error when a peer does not answer.

    >>> with error_context("forward, step 1 of 3"):
    ...     raise PeerError("rank 0: nothing came from rank 1")
    Traceback (most recent call last):
        ...
    cp_ref.groups.process_groups.PeerError: forward, step 1 of 3: rank 0: nothing came from rank 1
    """

    __slots__ = ("_before", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._before = _under_way.get()
        _under_way.set((*self._before, self._what))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _under_way.set(self._before)
        if isinstance(error, PeerError):
            raise PeerError(f"{self._what}: {error}") from error


_under_way: ContextVar[tuple[str, ...]] = ContextVar("_under_way", default=())


def under_way() -> tuple[str, ...]:
    """The current work of this thread, from `error_context`.

    >>> with error_context("forward"), error_context("step 1 of 3"):
    ...     under_way()
    ('forward', 'step 1 of 3')
    """
    return _under_way.get()


class ProcessMember:
    """This process's place in a torch.distributed group, over gloo or NCCL.

    NCCL runs an exchange on a separate stream: it begins after the work so far on the current stream, and `wait` makes
    the current stream wait for it, not the host. So kernels launched between the two overlap with it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._global = dist.get_process_group_ranks(group)
        self.ranks = frozenset(self._global)
        self._is_gloo = dist.get_backend(group) == "gloo"

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        """Post all messages as one batch, so that NCCL runs them in one kernel and no order of ranks can block."""
        ops = [dist.P2POp(dist.isend, _sendable(p.tensor), self._global[p.peer], self.group, p.tag) for p in sends]
        ops += [dist.P2POp(dist.irecv, _sendable(p.tensor), self._global[p.peer], self.group, p.tag) for p in recvs]
        here = self._global[self.rank]
        messages = [
            _Late(self._global[p.peer], f"{what} global rank {self._global[p.peer]} (tag {p.tag})")
            for what, parcels in (("to", sends), ("from", recvs))
            for p in parcels
        ]
        works: list[Any] = []
        # gloo has no batches, so the message that cannot be posted is known.
        for first, some in enumerate([op] for op in ops) if self._is_gloo else enumerate([ops] if ops else []):
            try:
                works += dist.batch_isend_irecv(some)
            except RuntimeError as error:
                raise _lost(here, messages[first : first + 1] if self._is_gloo else messages, error) from error
        return _Works(here, works, messages)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Reads from the device on NCCL: for plans, not for the hot path."""
        if self._is_gloo:
            return self._gather(value)
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.group)  # pyright: ignore[reportUnknownMemberType]  # untyped
        except RuntimeError as error:
            here = self._global[self.rank]
            others = [_Late(rank, f"from global rank {rank}") for rank in self._global if rank != here]
            raise _lost(here, others, error) from error
        return values

    def _gather(self, value: Any) -> list[Any]:
        """`all_gather_object` by messages between every two ranks, so that the error names a lost peer."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.tensor([len(own)], dtype=torch.int64, device="cpu") for _ in range(self.size)]
        peers = [rank for rank in range(self.size) if rank != self.rank]
        tag = 2 * _GATHER_TAG
        sends = [Parcel(peer, tag, sizes[self.rank]) for peer in peers]
        self.exchange(sends, [Parcel(peer, tag, sizes[peer]) for peer in peers]).wait()
        buffers = [torch.empty(int(size), dtype=torch.uint8, device="cpu") for size in sizes]
        sends = [Parcel(peer, tag + 1, own) for peer in peers]
        self.exchange(sends, [Parcel(peer, tag + 1, buffers[peer]) for peer in peers]).wait()
        buffers[self.rank] = own
        return [pickle.loads(buffer.numpy().tobytes()) for buffer in buffers]


def _sendable(x: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that NCCL has: 16-bit integers as bytes."""
    return x.view(torch.uint8) if x.dtype == torch.int16 else x


class _Late(NamedTuple):
    """A message that may not have come through: its peer in the whole job, and words for it."""

    peer: int
    words: str


class _Works:
    """The works of torch.distributed for one exchange: one for each message (gloo), or one for all (NCCL)."""

    def __init__(self, here: int, works: list[Any], messages: Sequence[_Late]) -> None:
        self._here, self._works, self._messages = here, works, messages

    def wait(self) -> None:
        works, self._works = self._works, []
        for number, work in enumerate(works):
            try:
                work.wait()
            except RuntimeError as error:
                alone = len(works) == len(self._messages)
                late = self._messages[number : number + 1] if alone else self._messages
                raise _lost(self._here, late, error) from error


def _lost(here: int, late: Sequence[_Late], error: Exception) -> PeerError:
    """The error of messages that did not come through; it names the silent rank if the ranks can find it."""
    words = ", ".join(message.words for message in late)
    complaint = f"global rank {here}: what should go {words} did not come through: {error}"
    silent = silent_rank(here, late[0].peer) if len({message.peer for message in late}) == 1 else None
    return PeerError(complaint if silent is None else f"global rank {silent} does not answer; {complaint}")


def as_group(group: Any, cp_comm_type: str) -> Group:
    """The user's argument `group` as a `Group`.

    Args:
        group: for "a2a+p2p" a pair (a2a_group, p2p_group) or a 2-D DeviceMesh [p2p, a2a]; for the others one group: a
            ProcessGroup, a 1-D DeviceMesh, or anything with the members of `cp_ref.groups.group.Group` (a SimGroup's
            member). For "auto" either.

    Raises:
        TypeError: it is none of them. ValueError: the two groups of a pair have more than this rank in common.
    """
    several = isinstance(group, tuple | list) or (isinstance(group, DeviceMesh) and group.ndim == 2)
    if several if cp_comm_type == "auto" else SCHEDULES[cp_comm_type].exchanging == "inner":
        if isinstance(group, DeviceMesh) and group.ndim == 2 and not _left_out(group):
            group = (group.get_group(1), group.get_group(0))
        pair = cast(Sequence[Any], group) if isinstance(group, tuple | list) else ()
        if len(pair) == 2:
            return _pair(*(_one_group(part) for part in pair))
        raise TypeError(
            f"group is {shown(group)}; cp_comm_type {cp_comm_type!r} needs a pair (a2a_group, p2p_group) or a 2-D "
            "DeviceMesh [p2p, a2a]"
        )
    return _one_group(group)


def _pair(a2a: Group, p2p: Group) -> PairGroup:
    if isinstance(a2a, ProcessMember) and isinstance(p2p, ProcessMember) and len(a2a.ranks & p2p.ranks) != 1:
        raise ValueError(
            f"group is a pair of groups with ranks {sorted(a2a.ranks & p2p.ranks)} in common; an a2a and a p2p group "
            "have this rank in common, and no other"
        )
    return PairGroup(a2a, p2p)


def _left_out(group: Any) -> bool:
    """Whether this process is not a member of its group: `new_group` returns a group to it all the same."""
    if isinstance(group, DeviceMesh):
        return group.get_coordinate() is None
    if isinstance(group, dist.ProcessGroup):
        return dist.get_rank(group) < 0
    return group is dist.GroupMember.NON_GROUP_MEMBER


def _one_group(group: Any) -> Group:
    if isinstance(group, Group):
        return group
    if _left_out(group):
        raise ValueError(f"group is {shown(group)}, which this process (rank {dist.get_rank()}) is no member of")
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return ProcessMember(group)
    hint = "; call torch.distributed.init_process_group() first" if group is None and not dist.is_initialized() else ""
    raise TypeError(
        f"group is {shown(group)}; it must be a torch.distributed ProcessGroup, a 1-D DeviceMesh or one member of a "
        f"SimGroup{hint}"
    )
