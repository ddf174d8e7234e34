"""Whose tokens count: the ranks that share a step, as a group, a mesh or a context says them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_fast.api.fast_context import ContextParallel
from cp_ref.contract.group import Group
from cp_ref.contract.process_groups import as_group

__all__ = ["check_holds", "groups_of"]


def groups_of(over: Any) -> list[Group]:
    """This rank's groups: one, or of a mesh one for each dimension.

    Raises:
        TypeError: `over` is nothing of the kind. ValueError: this process is no member of it.
    """
    if isinstance(over, ContextParallel):
        return [over.comm]
    if isinstance(over, DeviceMesh) and over.ndim > 1:
        if over.get_coordinate() is None:
            raise ValueError(f"over is {over!r}, which this process (rank {dist.get_rank()}) is no member of")
        return [as_group(over.get_group(dim), "p2p") for dim in range(over.ndim)]
    if not isinstance(over, DeviceMesh | dist.ProcessGroup):
        raise TypeError(
            f"over is a {type(over).__name__}; it must be a ContextParallel, a ProcessGroup or a DeviceMesh"
        )
    return [as_group(over, "p2p")]


def check_holds(over: Any, groups: Sequence[Group], cp: ContextParallel) -> None:
    """Raise ValueError unless all ranks of a context are among those of `over`, if there is one; groups: its groups."""
    if over is None:
        return
    mine = _ranks([getattr(cp.comm, name) for name in ("a2a", "p2p") if hasattr(cp.comm, name)] or [cp.comm])
    theirs = set(over.mesh.flatten().tolist()) if isinstance(over, DeviceMesh) else _ranks(groups)
    if missing := sorted(mine - theirs):
        raise ValueError(
            f"over has global ranks {sorted(theirs)}, but not {missing}; it must have all ranks of cp, whose tokens "
            "are parts of the same sequences"
        )


def _ranks(groups: Sequence[Group]) -> set[int]:
    """The global ranks of process groups; none of simulated groups."""
    return {rank for group in groups for rank in getattr(group, "ranks", ())}
