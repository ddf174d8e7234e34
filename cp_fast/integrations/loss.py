"""A loss over the tokens of all ranks, so that gradients come out as those of one rank that has everything."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from cp_fast.context import ContextParallel
from cp_ref.common.collectives import all_reduce_sum

__all__ = ["count_tokens", "token_mean"]


def token_mean(losses: torch.Tensor, counted: torch.Tensor, *, over: Any, averaged_over: int = 1) -> torch.Tensor:
    """This rank's part of the mean loss of all counted tokens of the ranks. Collective, forward only.

    Args:
        losses: one a token, any shape.
        counted: the same shape, bool: which tokens count (labels != -100).
        over: whose tokens: a `ContextParallel`, or a ProcessGroup that holds all ranks with tokens of this step (data
            parallel ranks too, where they share the step's mean).
        averaged_over: 1 where gradients are summed over these ranks; where a wrapper (DDP, FSDP) averages them, the
            number of ranks that it averages over.

    Returns:
        sum(losses[counted]) / count * averaged_over, float32 or wider; 0 where no rank has a counted token. The ranks'
        values add up to the mean (times averaged_over).

    >>> from cp_ref import SimGroup
    >>> def one(member):
    ...     losses, counted = torch.tensor([1.0, 5.0, 9.0]), torch.tensor([[True, True, False], [True, False, False]])
    ...     return token_mean(losses, counted[member.rank], over=ContextParallel(member)).item()
    >>> SimGroup(2).run(one)  # the mean of 1, 5 and 1
    [2.0, 0.3333333432674408]
    """
    if counted.dtype != torch.bool or counted.shape != losses.shape:
        raise ValueError(
            f"counted is {counted.dtype} {list(counted.shape)}; it must be bool {list(losses.shape)}, like losses"
        )
    total = torch.where(counted, losses, 0.0).to(torch.promote_types(losses.dtype, torch.float32)).sum()
    return total * averaged_over / count_tokens(counted, over=over).clamp(min=1)


def count_tokens(counted: torch.Tensor, *, over: Any) -> torch.Tensor:
    """How many tokens count on all ranks of `over` (see `token_mean`): int64, no axis. Collective."""
    count = counted.detach().sum()
    if isinstance(over, ContextParallel):
        return all_reduce_sum(over.comm, count)
    if not isinstance(over, dist.ProcessGroup):
        raise TypeError(f"over is a {type(over).__name__}; it must be a ContextParallel or a ProcessGroup")
    dist.all_reduce(count, group=over)
    return count
