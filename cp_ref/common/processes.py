"""torch.distributed process groups as `cp_ref.spec.Group`: one process a rank, over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_ref.spec import Group, PairGroup, Parcel, Pending

__all__ = ["PeerError", "ProcessMember", "as_group", "during"]


class PeerError(RuntimeError):
    """Messages did not come through: a peer died, or did not answer within the group's time-out. Names the peers."""


@contextmanager
def during(what: str) -> Generator[None]:
    """Say what was being done when a peer did not answer.

    >>> with during("forward, step 1 of 3"):
    ...     raise PeerError("rank 0: nothing came from rank 1")
    Traceback (most recent call last):
        ...
    cp_ref.common.processes.PeerError: forward, step 1 of 3: rank 0: nothing came from rank 1
    """
    try:
        yield
    except PeerError as error:
        raise PeerError(f"{what}: {error}") from error


class ProcessMember:
    """This process's place in a torch.distributed group, over gloo or NCCL.

    NCCL runs an exchange on a stream of its own: it begins when what the current stream has so far is done, and `wait`
    makes the current stream wait for it, not the host. So kernels launched between the two overlap with it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._global = dist.get_process_group_ranks(group)
        self.ranks = frozenset(self._global)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        """Post all messages as one batch, so that NCCL runs them in one kernel and no order of ranks can block."""
        ops = [dist.P2POp(dist.isend, p.tensor, self._global[p.peer], self._group, p.tag) for p in sends]
        ops += [dist.P2POp(dist.irecv, p.tensor, self._global[p.peer], self._group, p.tag) for p in recvs]
        if not ops:
            return _Works(self.rank, [], (), ())
        try:
            return _Works(self.rank, dist.batch_isend_irecv(ops), sends, recvs)
        except RuntimeError as error:
            raise PeerError(_complaint(self.rank, _messages(sends, recvs), error)) from error

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Reads from the device on NCCL: for plans, not for the hot path."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)  # pyright: ignore[reportUnknownMemberType]  # untyped
        return values


class _Works:
    """What torch.distributed is doing for one exchange: one work for each message (gloo), or one for all (NCCL)."""

    def __init__(self, rank: int, works: list[Any], sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        self._rank, self._works, self._sends, self._recvs = rank, works, sends, recvs

    def wait(self) -> None:
        works, self._works = self._works, []
        for number, work in enumerate(works):
            try:
                work.wait()
            except RuntimeError as error:
                messages = _messages(self._sends, self._recvs)
                late = messages[number : number + 1] if len(works) == len(messages) else messages
                raise PeerError(_complaint(self._rank, late, error)) from error


def _messages(sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> list[str]:
    return [f"{what} rank {p.peer} (tag {p.tag})" for what, ps in (("to", sends), ("from", recvs)) for p in ps]


def _complaint(rank: int, messages: list[str], error: Exception) -> str:
    return f"rank {rank}: what should go {', '.join(messages)} did not come through: {error}"


def as_group(group: Any, cp_comm_type: str) -> Group:
    """What the user passed as `group`, as a `Group`.

    Args:
        group: for "a2a+p2p" a pair (a2a_group, p2p_group) or a 2-D DeviceMesh [p2p, a2a]; for the others one group: a
            ProcessGroup, a 1-D DeviceMesh, or anything with the members of `cp_ref.spec.Group` (a SimGroup's member).

    Raises:
        TypeError: it is none of them. ValueError: the two groups of a pair have more than this rank in common.
    """
    if cp_comm_type == "a2a+p2p":
        if isinstance(group, DeviceMesh) and group.ndim == 2:
            group = (group.get_group(1), group.get_group(0))
        pair = cast(Sequence[Any], group) if isinstance(group, tuple | list) else ()
        if len(pair) == 2:
            return _pair(*(_one_group(part) for part in pair))
        raise TypeError(
            f"group is {group!r}; cp_comm_type 'a2a+p2p' needs a pair (a2a_group, p2p_group) or a 2-D DeviceMesh "
            "[p2p, a2a]"
        )
    return _one_group(group)


def _pair(a2a: Group, p2p: Group) -> PairGroup:
    if isinstance(a2a, ProcessMember) and isinstance(p2p, ProcessMember) and len(a2a.ranks & p2p.ranks) != 1:
        raise ValueError(
            f"group is a pair of groups with ranks {sorted(a2a.ranks & p2p.ranks)} in common; an a2a and a p2p group "
            "have this rank in common, and no other"
        )
    return PairGroup(a2a, p2p)


def _one_group(group: Any) -> Group:
    if isinstance(group, Group):
        return group
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return ProcessMember(group)
    raise TypeError(
        f"group is {group!r}; it must be a torch.distributed ProcessGroup, a 1-D DeviceMesh or one member of a SimGroup"
    )
