"""The kernels by PyTorch's operators: any device, no compiler, some passes over memory more than the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.movers.lengths_map import LengthsMap
from cp_fast.movers.rows import Rows, take
from cp_fast.movers.torch_movers import torch_merges
from cp_fast.movers.torch_movers.torch_merges import put
from cp_fast.movers.torch_movers.torch_rows import table_of, targets_of
from cp_ref.contract.tensors import as_integers, wide_dtype

__all__ = ["TorchKernels", "load"]


class TorchKernels:
    """`cp_fast.movers.mover_protocol.Kernels`, which says what each method does."""

    name = "torch"

    def row_indices(self, rows: LengthsMap, tokens: int) -> torch.Tensor:
        return table_of(rows, tokens).to(rows.lengths.dtype)

    def gather(self, xs: Sequence[torch.Tensor], rows: Rows | LengthsMap) -> list[torch.Tensor]:
        if isinstance(rows, slice):
            return [x[rows] for x in xs]
        index = table_of(rows, xs[0].shape[0]) if isinstance(rows, LengthsMap) else rows
        return [as_integers(x).index_select(0, index).view(x.dtype) for x in xs]

    def scatter_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows | LengthsMap, add: bool = False
    ) -> None:
        if not outs:
            return
        at = targets_of(rows, outs[0].shape[0])
        for out, x in zip(outs, xs, strict=True):
            wide = wide_dtype(out.dtype, x.dtype)
            if add and isinstance(at.whole, slice) and out.dtype == wide:
                out[at.whole].add_(x)
            elif add:
                put(out, take(out, at.whole).to(wide).add(take(x, at.part)), at.whole, at.valid)
            else:
                same = out.dtype == x.dtype
                put(as_integers(out) if same else out, take(as_integers(x) if same else x, at.part), at.whole, at.valid)

    def gather_heads(
        self, xs: Sequence[torch.Tensor], rows: Rows, first_heads: Sequence[int], heads: Sequence[int]
    ) -> list[torch.Tensor]:
        found, parts = list[torch.Tensor](), len(first_heads) // len(xs)
        for number, (x, size) in enumerate(zip(xs, heads, strict=True)):
            moved = as_integers(x)
            count = len(moved[rows]) if isinstance(rows, slice) else len(rows)
            result = moved.new_empty(parts, count, size, *x.shape[2:])
            for box, first in zip(result, first_heads[number * parts :], strict=False):
                box.copy_(take(moved[:, first : first + size], rows))
            found.append(result.view(x.dtype))
        return found

    def scatter_heads_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows, first_heads: Sequence[int]
    ) -> None:
        ranges = iter(first_heads)
        for out, x in zip(outs, xs, strict=True):
            for part, first in zip(as_integers(x), ranges, strict=False):
                self.scatter_([as_integers(out)[:, first : first + x.shape[2]]], [part], rows)

    def merge_(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        out_step: torch.Tensor,
        lse_step: torch.Tensor,
        rows: Rows | LengthsMap,
        final: bool = False,
    ) -> None:
        if lse.ndim == 3 and not final:
            assert isinstance(rows, LengthsMap)
            assert not out.numel(), "with a padded LSE only LSEs are merged"
            torch_merges.merge_padded_halves_(lse, lse_step, rows)
            return
        at = targets_of(rows, out.shape[0])
        step = take(out_step, at.part)
        if final:
            torch_merges.correct_(out, lse, step, lse_step, at)
        else:
            torch_merges.merge_(out, lse, step, take(lse_step.t(), at.part), at)


def load(device: str) -> TorchKernels:
    """The kernels for a device type: one for all."""
    return TorchKernels()
