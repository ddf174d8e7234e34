"""`cp_fast.movers.mover_protocol.Kernels` over the Numba kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cp_fast.movers.lengths_map import LengthsMap
from cp_fast.movers.numba_cuda.index_kernel import indices_kernel
from cp_fast.movers.numba_cuda.launch_plans import move, plan_of
from cp_fast.movers.numba_cuda.merge_arguments import pairs_, weigh_
from cp_fast.movers.numba_cuda.move_arguments import moves_of
from cp_fast.movers.numba_cuda.move_kernels import THREADS
from cp_fast.movers.numba_cuda.numba_launch import launch
from cp_fast.movers.rows import Rows

__all__ = ["NumbaKernels"]


class NumbaKernels:
    """`cp_fast.movers.mover_protocol.Kernels`, which says what each method does."""

    name = "numba"

    def row_indices(self, rows: LengthsMap, tokens: int) -> torch.Tensor:
        plan = plan_of(rows.helper, rows, tokens, tail=True)
        out = rows.lengths.new_empty(plan.count)
        if plan.count:
            kernel = indices_kernel(plan.helper, plan.kind, out.element_size())
            launch(kernel, out.device, -(-plan.count // THREADS), out.data_ptr(), plan.numbers, plan.count)
        return out

    def gather(self, xs: Sequence[torch.Tensor], rows: Rows | LengthsMap) -> list[torch.Tensor]:
        if isinstance(rows, slice):
            return [x[rows] for x in xs]
        plan = plan_of("gather", rows, xs[0].shape[0], tail=True)
        outs = [x.new_empty(plan.count, *x.shape[1:]) for x in xs]
        moves = [m for x, out in zip(xs, outs, strict=True) if out.numel() for m in moves_of(x, out)]
        move(plan, False, moves, xs[0].device)
        return outs

    def scatter_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows | LengthsMap, add: bool = False
    ) -> None:
        if not outs:
            return
        plan, pairs = plan_of("scatter_", rows, outs[0].shape[0]), list(zip(outs, xs, strict=True))
        same = [] if add else [(out, x) for out, x in pairs if out.dtype == x.dtype]
        move(plan, True, [m for out, x in same if x.numel() for m in moves_of(x, out)], outs[0].device)
        pairs_(plan, add, pairs if add else [(out, x) for out, x in pairs if out.dtype != x.dtype])

    def gather_heads(
        self, xs: Sequence[torch.Tensor], rows: Rows, first_heads: Sequence[int], heads: Sequence[int]
    ) -> list[torch.Tensor]:
        plan, parts = plan_of("gather_heads", rows, xs[0].shape[0]), len(first_heads) // len(xs)
        outs = [x.new_empty(parts, plan.count, n, *x.shape[2:]) for x, n in zip(xs, heads, strict=True)]
        moves = [m for x, out, n in _heads(xs, outs, first_heads) for m in moves_of(x[:, n : n + out.shape[1]], out)]
        move(plan, False, moves, xs[0].device)
        return outs

    def scatter_heads_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows, first_heads: Sequence[int]
    ) -> None:
        plan = plan_of("scatter_heads_", rows, outs[0].shape[0])
        moves = [m for out, x, n in _heads(outs, xs, first_heads) for m in moves_of(x, out[:, n : n + x.shape[1]])]
        move(plan, True, moves, outs[0].device)

    def merge_(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        out_step: torch.Tensor,
        lse_step: torch.Tensor,
        rows: Rows | LengthsMap,
        final: bool = False,
    ) -> None:
        weigh_(plan_of("merge_", rows, out.shape[0]), final, out, out_step, lse, lse_step)


def _heads(
    wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], first_heads: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Each part of each tensor that is not empty: its whole, itself, its first head."""
    firsts = iter(first_heads)
    for whole, some in zip(wholes, parts, strict=True):
        for part in some:
            first = next(firsts)
            if part.numel():
                yield whole, part, first
