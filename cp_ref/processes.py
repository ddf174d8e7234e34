"""torch.distributed process groups as `cp_ref.spec.Group`: one process a rank, over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_ref.spec import Group, PairGroup, Parcel, Pending

__all__ = ["ProcessMember", "as_group"]


class ProcessMember:
    """This process's place in a torch.distributed group, over gloo or NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks = frozenset(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        """Post the messages as one batch of isend and irecv."""
        ops = [dist.P2POp(dist.isend, p.tensor, self._global(p.peer), self._group, p.tag) for p in sends]
        ops += [dist.P2POp(dist.irecv, p.tensor, self._global(p.peer), self._group, p.tag) for p in recvs]
        return _Works(dist.batch_isend_irecv(ops) if ops else [])

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)  # pyright: ignore[reportUnknownMemberType]  # untyped
        return values

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


class _Works:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def as_group(group: Any, cp_comm_type: str) -> Group:
    """What the user passed as `group`, as a `Group`.

    Args:
        group: for "a2a+p2p" a pair (a2a_group, p2p_group) or a 2-D DeviceMesh [p2p, a2a]; for the others one group: a
            ProcessGroup, a 1-D DeviceMesh, or anything with the members of `cp_ref.spec.Group` (a SimGroup's member).

    Raises:
        TypeError: it is none of them. ValueError: the two groups of a pair have more than this rank in common.
    """
    if cp_comm_type == "a2a+p2p":
        if isinstance(group, DeviceMesh) and group.ndim == 2 and not _left_out(group):
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


def _left_out(group: Any) -> bool:
    """Whether this process is no member of what it has: `new_group` gives it a group all the same."""
    if isinstance(group, DeviceMesh):
        return group.get_coordinate() is None
    if isinstance(group, dist.ProcessGroup):
        return dist.get_rank(group) < 0
    return group is dist.GroupMember.NON_GROUP_MEMBER


def _one_group(group: Any) -> Group:
    if isinstance(group, Group):
        return group
    if _left_out(group):
        raise ValueError(f"group is {group!r}, which this process (rank {dist.get_rank()}) is no member of")
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return ProcessMember(group)
    raise TypeError(
        f"group is {group!r}; it must be a torch.distributed ProcessGroup, a 1-D DeviceMesh or one member of a SimGroup"
    )
