"""A loss over the tokens of all ranks, so that gradients come out as those of one rank that has everything."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.shared.balanced_table import groups_of
from cp_fast.integrations.shared.drop_in import check_floats
from cp_ref.groups.agreement import Ranks, collective, merged
from cp_ref.schedules.values import check_data, kind_of, read_count

__all__ = ["count_tokens", "loss_for_backward", "token_mean"]

# ---- who averages gradients
#
# Over how many ranks a wrapper averages gradients.


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


# ---- the loss


def _ranks(given: dict[str, Any]) -> Ranks:
    """Those of `over`, who count; none without it."""
    over = given.get("over")
    return over if isinstance(over, ContextParallel) else groups_of(over) if "over" in given else ()


@collective(_ranks)
def token_mean(losses: torch.Tensor, counted: torch.Tensor, *, over: Any, averaged_over: Any = None) -> torch.Tensor:
    """Compute this rank's part of the mean loss of all counted tokens of the ranks. Collective, forward only.

    Args:
        losses: one a token, any shape, of a floating dtype.
        counted: the same shape, bool: which tokens count (labels != -100).
        over: whose tokens: a `ContextParallel`, or a ProcessGroup or a DeviceMesh of all ranks with tokens of this step
            (data parallel ranks too, where they share the step's mean; no tensor parallel ranks, which have the same
            tokens).
        averaged_over: as in `loss_for_backward`; None where gradients are summed over these ranks.

    Returns:
        sum(losses[counted]) / count * n, float32 or wider, where n is how many ranks gradients are averaged over; 0
        where no rank has a counted token. The ranks' values add up to n times the mean.

    Raises:
        ValueError, TypeError: an argument is wrong, here or on another rank of `over`.

    A GPU is waited for: the ranks tell each other their counts on the host.

    >>> from cp_ref import SimGroup
    >>> def one(member):
    ...     losses, counted = torch.tensor([1.0, 5.0, 9.0]), torch.tensor([[True, True, False], [True, False, False]])
    ...     return token_mean(losses, counted[member.rank], over=ContextParallel(member)).item()
    >>> SimGroup(2).run(one)  # the mean of 1, 5 and 1
    [2.0, 0.3333333432674408]
    """
    times: list[float] = []

    def read() -> int:
        check_floats("losses", losses)
        _check_counted(counted, list(losses.shape))
        times.append(times_averaged(averaged_over))
        return int(counted.sum())

    count = _sum(over, read)
    total = torch.where(counted, losses, 0.0).to(torch.promote_types(losses.dtype, torch.float32)).sum()
    return total * times[0] / max(count, 1)


@collective(_ranks)
def count_tokens(counted: torch.Tensor, *, over: Any) -> torch.Tensor:
    """Count how many tokens count on all ranks of `over` (see `token_mean`): int64, no axis. Collective."""

    def read() -> int:
        _check_counted(counted)
        return int(counted.sum())

    return torch.tensor(_sum(over, read), device=counted.device)


def loss_for_backward(part: torch.Tensor, *, averaged_over: Any) -> torch.Tensor:
    """Return the loss to call `backward` on, from this rank's part of a mean: gradients are then those of the mean.

    A part is this rank's sum of losses over the number of labels of all ranks: the loss of a model that was given what
    `shard_batch` returns. The gradients of all ranks' parts have to be added up. Wrappers average them instead, over
    the ranks of their group, so the part is multiplied by the number of these ranks. Sends nothing.

    Args:
        part: this rank's part of the loss, no axis.
        averaged_over: who averages gradients: a DistributedDataParallel module, a module that `fully_shard` was called
            on, or the ProcessGroup or DeviceMesh that such a wrapper was given, or the number of its ranks. None:
            nobody, gradients are added up. Where a wrapper has the data parallel ranks alone, gradients are to be added
            up over the context parallel ranks besides.

    Returns:
        part times the number of ranks that are averaged over.

    Raises:
        TypeError: `averaged_over` is none of these, or a module without a wrapper. ValueError: a wrapper whose parts
        are averaged over different numbers of ranks, or by a communication hook.

    >>> loss_for_backward(torch.tensor(0.5), averaged_over=4)
    tensor(2.)
    """
    if not isinstance(part, torch.Tensor) or part.ndim:
        what = f"of shape {list(part.shape)}" if isinstance(part, torch.Tensor) else kind_of(part)
        raise TypeError(f"part is {what}; it must be a tensor without axes, a rank's part of the loss")
    return part * times_averaged(averaged_over)


def _check_counted(counted: Any, shape: list[int] | None = None) -> None:
    if not isinstance(counted, torch.Tensor):
        raise TypeError(f"counted is {kind_of(counted)}; it must be a tensor of bools")
    check_data("counted", counted)
    if counted.dtype != torch.bool or (shape is not None and list(counted.shape) != shape):
        like = "" if shape is None else f" {shape}, like losses"
        raise ValueError(f"counted is {counted.dtype} {list(counted.shape)}; it must be bool{like}")


def _sum(over: Any, read: Any) -> int:
    return merged(_ranks({"over": over}), "a count of tokens", read, sum)
