"""The kernels by PyTorch's operators: any device, no compiler, some passes over memory more than the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.movers import torch_merges
from cp_fast.movers.torch_rows import bits
from cp_fast.runtime.row_selection import Rows

__all__ = ["TorchKernels"]


class TorchKernels:
    """`cp_fast.movers.base.Kernels`, which says what each method does."""

    name = "torch"

    def take_rows(self, xs: Sequence[torch.Tensor], rows: Rows) -> list[torch.Tensor]:
        if isinstance(rows, slice):
            return [x[rows] for x in xs]
        return [bits(x).index_select(0, rows).view(x.dtype) for x in xs]

    def put_rows_(self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows) -> None:
        for out, x in zip(outs, xs, strict=True):
            if isinstance(rows, slice):
                out[rows].copy_(x)
            else:
                bits(out).index_copy_(0, rows.long(), bits(x))

    def heads_to_front(self, x: torch.Tensor, rows: Rows, first_heads: Sequence[int], heads: int) -> torch.Tensor:
        moved = bits(x)
        count = len(moved[rows]) if isinstance(rows, slice) else len(rows)
        result = moved.new_empty(len(first_heads), count, heads, *x.shape[2:])
        for box, first in zip(result, first_heads, strict=True):
            part = moved[:, first : first + heads]
            box.copy_(part[rows] if isinstance(rows, slice) else part.index_select(0, rows))
        return result.view(x.dtype)

    def heads_to_back_(
        self, out: torch.Tensor, x: torch.Tensor, rows: Rows, first_heads: Sequence[int], add: bool
    ) -> None:
        heads = x.shape[2]
        if add:
            wide = torch_merges.wide_dtype(out, x)
            whole = torch_merges.taken(out, rows).to(wide)
            for part, first in zip(x, first_heads, strict=True):
                whole[:, first : first + heads] += part
            torch_merges.put(out, whole, rows)
            return
        for part, first in zip(bits(x), first_heads, strict=True):
            self.put_rows_([bits(out)[:, first : first + heads]], [part], rows)

    def merge_(
        self, out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor, rows: Rows
    ) -> None:
        torch_merges.merge_(out, lse, out_step, lse_step, rows)

    def add_rows_(self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows) -> None:
        for out, x in zip(outs, xs, strict=True):
            wide = torch_merges.wide_dtype(out, x)
            if isinstance(rows, slice) and out.dtype == wide:
                out[rows].add_(x)
            else:
                torch_merges.put(out, torch_merges.taken(out, rows).to(wide).add(x), rows)
