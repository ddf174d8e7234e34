"""The kernels: one protocol of three primitives, implemented natively, in Numba CUDA and by PyTorch's operators.

    gather     rows of tensors by a row map                     gather, gather_heads
    scatter    rows into tensors by a row map, put or added     scatter_, scatter_heads_
    merge      partial results by their log-sum-exp             merge_

`row_indices` writes the table of a row map itself. Everything that attention or a helper of `cp_fast.thd` does with
rows is one call of these. `lengths_map` has the maps by lengths.

Checks: only an operator checks its own arguments. A native operator checks everything that could make a kernel touch
memory outside a tensor, PyTorch's operators their own arguments. The classes in between only pass arguments on, and so
do their callers: `cp_fast.runtime` passes the compiler's rows, and the operators `torch.ops.cp_attention.*` (`ops`)
check theirs before. The host cannot read row numbers or lengths on a GPU without waiting for it. So the kernel checks
them: it touches nothing outside a tensor, and reports a broken rule by a device-side assertion that names it.

No implementation waits for the device, allocates on the host path of a captured graph, or uses another stream than
PyTorch's current one. Tensors may have any strides between tokens and heads unless said otherwise; the last axis has
stride 1.

    legend   t = rows of a whole tensor (tail included), n = rows of the part, h = heads, d = head dim
             rows = slice, or index int32 or int64 [n], distinct, on the tensors' device, or `LengthsMap`
             wide = float32, or float64 where an operand is float64; every sum is formed in it and rounded once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from cp_fast.movers.lengths_map import LengthsMap
from cp_fast.movers.rows import Rows

__all__ = ["Kernels"]


class Kernels(Protocol):
    """One implementation. Methods that end in an underscore change their first arguments in place.

    The tensors of one call differ in row shape and dtype only, and share one launch.
    """

    name: str  # "native", "numba" or "torch".

    def row_indices(self, rows: LengthsMap, tokens: int) -> torch.Tensor:
        """The row, in a tensor of `tokens` rows, of every row of the part: [n] of the lengths' dtype, -1 for none."""
        ...

    def gather(self, xs: Sequence[torch.Tensor], rows: Rows | LengthsMap) -> list[torch.Tensor]:
        """Each x [t, ...] of any dtype -> x[rows] [n, ...]; a view for a slice. Every row of the part has one in x."""
        ...

    def scatter_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows | LengthsMap, add: bool = False
    ) -> None:
        """out[rows] = x, or += x: x [n, ...], out [t, ...]. Bit by bit where a put has one dtype; else both are of
        float dtypes.
        """
        ...

    def gather_heads(
        self, xs: Sequence[torch.Tensor], rows: Rows, first_heads: Sequence[int], heads: Sequence[int]
    ) -> list[torch.Tensor]:
        """Gather each x [t, h, ...] into [p, n, heads, ...]: the rows to send in an all-to-all, gathered and transposed
        in one pass.

        Args:
            first_heads: p numbers for each x, one tensor after the other. Of x these are f: its result has [i] =
                x[rows, f[i] : f[i] + heads]. Head ranges may overlap (replicated K/V heads).
            heads: of each x's result.
        """
        ...

    def scatter_heads_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows, first_heads: Sequence[int]
    ) -> None:
        """The inverse: out[rows, f[i] : f[i] + heads] = x[i] for each x [p, n, heads, ...]. The head ranges of an out
        are distinct. Nothing else of it is written.
        """
        ...

    def merge_(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        out_step: torch.Tensor,
        lse_step: torch.Tensor,
        rows: Rows | LengthsMap,
        final: bool = False,
    ) -> None:
        """Merge a partial result into normalised accumulators, both in one pass over out.

            new = log(exp(lse) + exp(lse_step))
            out = out * exp(lse - new) + out_step * exp(lse_step - new)
            lse = new

        The tensors out [t, h, d] and out_step [n, h, d] have any float dtypes. They are computed with in float32
        (float64) and rounded once; d may be 0. The LSEs, lse [h, t] and lse_step [h, n], are float32 or float64, or
        with a map by lengths both padded, [b, h, s]. A step row with lse -inf changes nothing, for any out_step. An
        accumulator row with lse -inf counts as 0 (it may hold NaN). If both are -inf, out becomes 0.

        final: lse is that of all parts together and stays: out += exp(lse_step - lse) * out_step.
        """
        ...
