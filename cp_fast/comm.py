"""Communication: torch.distributed behind the small interface of `cp_ref.spec.Group`, and the collectives built on
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_ref.spec import Feature, Group, Parcel, Unsupported

__all__ = ["ProcessMember", "all_reduce", "all_to_all", "as_group"]


class ProcessMember:
    """This process's place in a torch.distributed group, over NCCL or gloo.

    NCCL runs an exchange on a stream of its own: it begins when what the current stream has so far is done, and `wait`
    makes the current stream wait for it, not the host. So kernels launched between the two overlap with it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._global = dist.get_process_group_ranks(group)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> _Works:
        """Post all messages as one batch, so that NCCL runs them in one kernel and no order of ranks can block."""
        ops = [dist.P2POp(dist.isend, p.tensor, self._global[p.peer], self._group, p.tag) for p in sends]
        ops += [dist.P2POp(dist.irecv, p.tensor, self._global[p.peer], self._group, p.tag) for p in recvs]
        return _Works(dist.batch_isend_irecv(ops) if ops else [])

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Reads from the device on NCCL: for plans, not for the hot path."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


class _Works:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


def as_group(group: Any) -> Group:
    """What the user passed as `group`, as a `Group`.

    Raises:
        TypeError: it is no ProcessGroup, no 1-D DeviceMesh, and has not the members of `cp_ref.spec.Group`.
        Unsupported: it is a pair of groups, which only "a2a+p2p" takes.
    """
    if isinstance(group, tuple | list) or (isinstance(group, DeviceMesh) and group.ndim == 2):
        raise Unsupported("a pair of groups", {"cp_fast": {Feature.A2A_P2P}}, "cp_ref has it")
    if isinstance(group, Group):
        return group
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return ProcessMember(group)
    raise TypeError(
        f"group is {group!r}; it must be a torch.distributed ProcessGroup, a 1-D DeviceMesh or one member of a SimGroup"
    )


def all_to_all(group: Group, parts: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give `parts[r]` to rank r; return what each rank gave, where `like[r]` has the shape and dtype of rank r's
    part.
    """
    peers = [r for r in range(group.size) if r != group.rank]
    boxes = [
        x if r == group.rank else torch.empty_like(x, memory_format=torch.contiguous_format) for r, x in enumerate(like)
    ]
    boxes[group.rank] = parts[group.rank]
    sends = [Parcel(r, 0, parts[r].contiguous()) for r in peers]
    group.exchange(sends, [Parcel(r, 0, boxes[r]) for r in peers]).wait()
    return boxes


def all_reduce(group: Group, x: torch.Tensor, combine: Any) -> torch.Tensor:
    """Combine the ranks' tensors (small: h_q values) in rank order, so that the result has the same bits on every
    rank.
    """
    return reduce(combine, all_to_all(group, [x] * group.size, [x] * group.size))
