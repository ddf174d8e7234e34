"""`cp_fast.movers.base.Kernels` over the Numba kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.movers.numba_cuda.moves import moves_of
from cp_fast.movers.numba_cuda.plans import gathered, move, row_plan
from cp_fast.movers.numba_cuda.sums import add_heads_, pairs_, weigh_
from cp_fast.runtime.row_selection import Rows

__all__ = ["NumbaKernels"]


class NumbaKernels:
    """`cp_fast.movers.base.Kernels`, which says what each method does."""

    name = "numba"

    def take_rows(self, xs: Sequence[torch.Tensor], rows: Rows) -> list[torch.Tensor]:
        if isinstance(rows, slice):
            return [x[rows] for x in xs]
        return gathered("take_rows", "index", xs, len(rows), row_plan(rows, xs[0].shape[0])[2])

    def put_rows_(self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows) -> None:
        kind, count, plan = row_plan(rows, outs[0].shape[0])
        moves = [m for out, x in zip(outs, xs, strict=True) if x.numel() for m in moves_of(x, out)]
        move("put_rows_", kind, True, moves, count, plan, outs[0].device)

    def heads_to_front(self, x: torch.Tensor, rows: Rows, first_heads: Sequence[int], heads: int) -> torch.Tensor:
        kind, count, plan = row_plan(rows, x.shape[0])
        out = x.new_empty(len(first_heads), count, heads, *x.shape[2:])
        parts = zip(out, first_heads, strict=True)
        if out.numel():
            moves = [m for part, first in parts for m in moves_of(x[:, first : first + heads], part)]
            move("heads_to_front", kind, False, moves, count, plan, x.device)
        return out

    def heads_to_back_(
        self, out: torch.Tensor, x: torch.Tensor, rows: Rows, first_heads: Sequence[int], add: bool
    ) -> None:
        kind, count, plan = row_plan(rows, out.shape[0])
        if not x.numel():
            return
        if add:
            add_heads_(out, x, kind, count, plan, tuple(first_heads))
            return
        parts = zip(x, first_heads, strict=True)
        moves = [m for part, first in parts for m in moves_of(part, out[:, first : first + x.shape[2]])]
        move("heads_to_back_", kind, True, moves, count, plan, out.device)

    def merge_(
        self, out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor, rows: Rows
    ) -> None:
        kind, count, plan = row_plan(rows, out.shape[0])
        weigh_("merge_", kind, False, out, out_step, lse, lse_step, True, count, plan)

    def add_rows_(self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows) -> None:
        kind, count, plan = row_plan(rows, outs[0].shape[0])
        pairs_("add_rows_", kind, list(zip(outs, xs, strict=True)), count, plan)
