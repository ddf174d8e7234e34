"""Over how many ranks a wrapper averages gradients."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from cp_ref.schedules.values import kind_of, read_count

__all__ = ["times_averaged"]


def times_averaged(averaged_over: Any) -> float:
    """The number of ranks that gradients are averaged over; see `cp_fast.integrations.loss.loss_for_backward`.

    >>> times_averaged(None), times_averaged(8)
    (1, 8)
    """
    if averaged_over is None:
        return 1
    if isinstance(averaged_over, DeviceMesh | dist.ProcessGroup):
        return averaged_over.size()
    if isinstance(averaged_over, DistributedDataParallel):
        if getattr(averaged_over, "_comm_hooks", None):
            raise ValueError(
                "averaged_over is a DistributedDataParallel module with a communication hook, which decides how "
                "gradients are reduced; give the number of ranks that it averages over"
            )
        return dist.get_world_size(averaged_over.process_group)
    if isinstance(averaged_over, torch.nn.Module):
        return _of_fully_shard(averaged_over)
    if isinstance(averaged_over, Integral):
        return read_count("averaged_over", averaged_over, at_least=1)
    raise TypeError(
        f"averaged_over is {kind_of(averaged_over)}; it must be a wrapped module, a ProcessGroup, a DeviceMesh, a "
        "number of ranks, or None"
    )


def _of_fully_shard(model: torch.nn.Module) -> float:
    """The divisor of gradients, for a module that was given to `fully_shard`."""
    from torch.distributed.fsdp import FSDPModule

    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in _parameter_groups(module)
        if group is not None
    ]
    found = {_divisor(group) for group in groups}
    if not found:
        raise TypeError(
            f"averaged_over is a {type(model).__name__} that neither DistributedDataParallel nor fully_shard wraps; "
            "give None where gradients are added up, or the group that averages them"
        )
    if len(found) > 1:
        raise ValueError(
            f"averaged_over is a {type(model).__name__} whose parts are averaged over {sorted(found)} ranks; no factor "
            "of the loss is right for all of them"
        )
    return found.pop()


def _parameter_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # of PyTorch 2.13; before, there is one group
    return list(several) if several is not None else [getattr(state, "_fsdp_param_group", None)]


def _divisor(group: Any) -> float:
    if group.gradient_divide_factor is not None:
        return group.gradient_divide_factor
    sizes = (getattr(group.mesh_info, f"{kind}_mesh_size", 1) for kind in ("shard", "replicate"))
    shards, replicas = sizes
    return shards * replicas
