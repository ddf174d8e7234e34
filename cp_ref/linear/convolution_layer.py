"""`causal_conv1d`: each channel convolved along documents that are spread over ranks.

The schedule is one of attention with a short window, and its tiles are played by the same executor: a tile adds the
part of the rows k of x to the rows q of the result. In the backward pass it adds to the gradients of these rows, which
go back to their owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from cp_ref.api.packed_formats import to_format, to_packed
from cp_ref.api.reference_context import ContextParallel
from cp_ref.api.reference_plan import Plan, backward_pass
from cp_ref.common.autocast import autocast, no_autocast
from cp_ref.common.declared import implements
from cp_ref.common.derivatives import refuse_transforms
from cp_ref.common.linear import linear_calls
from cp_ref.common.linear.linear_checks import ConvolutionCall, agree_on_layer, read_convolution
from cp_ref.common.wide_dtype import wide_dtype
from cp_ref.executor.play_schedule import run_rank_schedule
from cp_ref.executor.rank_tensors import World
from cp_ref.spec import check_context, halo_workload

__all__ = ["causal_conv1d"]

ALL = slice(0, 1)  # channels travel together, as one head


@implements(linear_calls.causal_conv1d)
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    cp: ContextParallel,
    plan: Plan,
    activation: str | None,
) -> torch.Tensor:
    refuse_transforms()
    check_context(cp, ContextParallel)
    x = autocast(x)
    call = agree_on_layer(cp, plan, lambda: read_convolution(cp, plan, Plan, x, weight, bias, activation))
    with no_autocast(x.device):
        return cast(Any, _Convolution).apply(plan, cp, call, x, weight, bias)


def taps(tile: Sequence[int], kernel_size: int) -> Iterator[tuple[int, slice, slice]]:
    """The products of a tile: (column of weight, rows of the result, rows of x), for rows that are in the tile.

    >>> for tap in taps((0, 4, 8, 2, 4, 0, 1), 3): print(*tap)        # results 4:8 of x 2:4
    0 slice(4, 6, None) slice(2, 4, None)
    1 slice(4, 5, None) slice(3, 4, None)
    """
    _, q_start, q_stop, k_start, k_stop, *_ = tile
    for j in range(kernel_size):
        back = kernel_size - 1 - j
        start, stop = max(q_start, k_start + back), min(q_stop, k_stop + back)
        if start < stop:
            yield j, slice(start, stop), slice(start - back, stop - back)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        cp: ContextParallel,
        call: ConvolutionCall,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        problem, wide = plan.problem, wide_dtype(x.dtype)
        packed, factors = to_packed(x, problem.qkv_format), weight.to(wide)
        world = World(halo_workload(problem, call.kernel_size), cp.rank, x.device)
        world.put_own("kv", packed[:, None])
        sums = torch.zeros_like(world.tensors["kv"][0][:, 0], dtype=wide)  # [t of all ranks, channels]

        def compute(tile: Sequence[int]) -> None:
            for j, rows, columns in taps(tile, call.kernel_size):
                sums[rows] += factors[:, j] * world.tensors["kv"][0][columns, 0].to(wide)

        run_rank_schedule("forward", plan.halo(call.kernel_size).forward[cp.rank], world, cp.comm, compute)
        if bias is not None:
            sums += bias.to(wide)
        out = torch.zeros_like(packed, dtype=wide)
        for here, there in world.own_rows("kv"):
            out[here] = sums[there] if call.activation is None else sums[there] * torch.sigmoid(sums[there])
        ctx.save_for_backward(x, weight, bias, world.tensors["kv"][0], sums)
        ctx.plan, ctx.problem, ctx.cp, ctx.call = plan, problem, cp, call
        return to_format(out.to(x.dtype), problem.qkv_format, len(problem.sequences))

    @staticmethod
    @backward_pass
    def backward(ctx: Any, dout: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, cp, call, problem = ctx.plan, ctx.cp, ctx.call, ctx.problem
        x, weight, bias, x_all, sums = ctx.saved_tensors
        wide = sums.dtype
        factors = weight.to(wide)
        world = World(halo_workload(problem, call.kernel_size), cp.rank, x.device)
        world.tensors["kv"] = (x_all,)
        world.start_result("dkv", ((1, call.channels), wide, 0.0))
        dsums = torch.zeros_like(sums)
        packed = to_packed(dout, problem.qkv_format).to(wide)
        for here, there in world.own_rows("kv"):
            gate = torch.sigmoid(sums[there])
            slope = torch.ones_like(gate) if call.activation is None else gate * (1 + sums[there] * (1 - gate))
            dsums[there] = packed[here] * slope
        dfactors = torch.zeros_like(factors)

        def compute(tile: Sequence[int]) -> None:
            for j, rows, columns in taps(tile, call.kernel_size):
                dfactors[:, j] += (dsums[rows] * x_all[columns, 0].to(wide)).sum(dim=0)
                world.add("dkv", columns, ALL, (factors[:, j] * dsums[rows])[:, None])

        run_rank_schedule("backward", plan.halo(call.kernel_size).backward[cp.rank], world, cp.comm, compute)
        dx = torch.zeros(len(packed), 1, call.channels, dtype=wide, device=x.device)
        world.own("dkv", dx)
        dx = to_format(dx[:, 0].to(x.dtype), problem.qkv_format, len(problem.sequences))
        dbias = None if bias is None else dsums.sum(dim=0).to(bias.dtype)
        return None, None, None, dx, dfactors.to(weight.dtype), dbias
