"""Groups of ranks as `cp_ref.spec.Group`: torch.distributed process groups, and a pair of groups as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_ref.spec import Group, Parcel, Pending

__all__ = ["PairGroup", "ProcessMember", "as_group"]


class ProcessMember:
    """This process's place in a torch.distributed group, over gloo or NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        """Post the messages as one batch of isend and irecv."""
        ops = [dist.P2POp(dist.isend, p.tensor, self._global(p.peer), self._group, p.tag) for p in sends]
        ops += [dist.P2POp(dist.irecv, p.tensor, self._global(p.peer), self._group, p.tag) for p in recvs]
        return _All(dist.batch_isend_irecv(ops) if ops else [])

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


class PairGroup:
    """An a2a group and a p2p group that cross in this rank, as one group: rank = p2p_rank * a2a_size + a2a_rank.

                 a2a_rank 0   1          a rank reaches its row (a2a) and its column (p2p), which is all
    p2p_rank 0            0   1          that the schedule a2a+p2p needs
    p2p_rank 1            2   3
    """

    def __init__(self, a2a: Group, p2p: Group) -> None:
        self.a2a, self.p2p = a2a, p2p
        self.rank = p2p.rank * a2a.size + a2a.rank
        self.size = p2p.size * a2a.size

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        """Post each message in the group that its peer shares with this rank."""
        row_sends, column_sends = self._split(sends)
        row_recvs, column_recvs = self._split(recvs)
        return _All([self.a2a.exchange(row_sends, row_recvs), self.p2p.exchange(column_sends, column_recvs)])

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank: the rows gather, then the columns gather the rows."""
        return [v for row in self.p2p.all_gather_object(self.a2a.all_gather_object(value)) for v in row]

    def _split(self, parcels: Sequence[Parcel]) -> tuple[list[Parcel], list[Parcel]]:
        row: list[Parcel] = []
        column: list[Parcel] = []
        for parcel in parcels:
            p2p_rank, a2a_rank = divmod(parcel.peer, self.a2a.size)
            assert p2p_rank == self.p2p.rank or a2a_rank == self.a2a.rank, f"rank {parcel.peer} is in neither group"
            if p2p_rank == self.p2p.rank:
                row.append(parcel._replace(peer=a2a_rank))
            else:
                column.append(parcel._replace(peer=p2p_rank))
        return row, column


class _All:
    """Wait for all of them."""

    def __init__(self, pending: Sequence[Any]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for one in self._pending:
            one.wait()


def as_group(group: Any, cp_comm_type: str) -> Group:
    """What the user passed as `group`, as a `Group`.

    Args:
        group: for "a2a+p2p" a pair (a2a_group, p2p_group) or a 2-D DeviceMesh [p2p, a2a]; for the others one group: a
            ProcessGroup, a 1-D DeviceMesh, or anything with the members of `cp_ref.spec.Group` (a SimGroup's member).

    Raises:
        TypeError: it is none of them.
    """
    if cp_comm_type == "a2a+p2p":
        if isinstance(group, DeviceMesh) and group.ndim == 2:
            group = (group.get_group(1), group.get_group(0))
        if isinstance(group, tuple | list) and len(group) == 2:
            return PairGroup(*(_one_group(part) for part in group))
        raise TypeError(
            f"group is {group!r}; cp_comm_type 'a2a+p2p' needs a pair (a2a_group, p2p_group) or a 2-D DeviceMesh "
            "[p2p, a2a]"
        )
    return _one_group(group)


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
