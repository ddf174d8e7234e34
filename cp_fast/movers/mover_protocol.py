"""The kernels: one protocol of three primitives, implemented natively, in Numba CUDA and by PyTorch's operators.

    gather     rows of tensors by a row map                     gather, gather_heads
    scatter    rows into tensors by a row map, put or added     scatter_, scatter_heads_
    merge      partial results by their log-sum-exp             merge_

`row_indices` writes the table of a row map itself. Everything that attention or a helper of `cp_fast.thd` does with
rows is one call of these. `RowRule` is a row map by lengths.

Checks: only an operator checks its own arguments. A native operator checks everything that could make a kernel touch
memory outside a tensor, PyTorch's operators their own arguments. The classes in between only pass arguments on, and so
do their callers: `cp_fast.runtime` passes the compiler's rows, and the operators `torch.ops.cp_attention.*` (`ops`)
check theirs before. The host cannot read row numbers or lengths on a GPU without waiting for it. So the kernel checks
them: it touches nothing outside a tensor, and reports a broken rule by a device-side assertion that names it.

No implementation waits for the device, allocates on the host path of a captured graph, or uses another stream than
PyTorch's current one. Tensors may have any strides between tokens and heads unless said otherwise; the last axis has
stride 1.

    legend   t = rows of a whole tensor (tail included), n = rows of the part, h = heads, d = head dim
             rows = slice, or index int32 or int64 [n], distinct, on the tensors' device, or `RowRule`
             wide = float32, or float64 where an operand is float64; every sum is formed in it and rounded once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

__all__ = [
    "HELPERS",
    "KINDS",
    "Movers",
    "RowRule",
    "Rows",
    "take",
]

Rows = slice | torch.Tensor


def take(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """x's rows: a view for a slice, a copy for an index."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


# ---- rows
#
# Row maps: the index tables of the kernels, as data.
#
# A map connects the rows of a part with rows of a whole tensor. A caller gives the rows (a slice or an index), or
# lengths that a kernel computes them from, without a table in memory. `lengths` below are cumulative, with padding.
#
#     kind            row i of the part is                             rows of the part, of t
#     slice           row i of rank b's slice, cp_size a               t / a
#     rank_order      row i of all ranks' slices, cp_size a            t
#     sequence_order  row i of the inverse of that order               t
#     half            row i of half a of all sequences                 t / 2
#     in_half         row i, if it lies in half a of its sequence      t
#     valid           row i, if its sequence has so many real rows     t
#     unpad           row i with padding, to rows without              a
#
# A row of the part may have no row in the whole. A gather takes the tail behind the last sequence along; a scatter or a
# merge leaves it unchanged.


# As csrc/common/types.h numbers them.
HELPERS = ("rows", "partition_indices", "partition", "reorder", "read_half", "read_second_half_lse", "copy_valid_")
HELPERS += ("pad_sequences", "lse_correction_", "out_correction_", "grad_correction_")
KINDS = ("span", "index", "slice", "rank_order", "sequence_order", "half", "in_half", "valid", "unpad")


class RowRule(NamedTuple):
    """Rows by cumulative lengths, int32 or int64 [b + 1], contiguous, on the device of the rows.

    >>> RowRule("read_half", "half", torch.tensor([0, 8]), a=1).count(10)
    5
    """

    helper: str  # One of HELPERS, named by a device-side assertion.
    kind: str  # One of KINDS, from "slice" on.
    lengths: torch.Tensor
    real: torch.Tensor | None = None  # Real lengths, for "valid" and "unpad".
    a: int = 0
    b: int = 0

    def count(self, tokens: int) -> int:
        """Rows of the part, where the whole has `tokens`."""
        if self.kind == "slice":
            return tokens // self.a
        if self.kind == "half":
            return tokens // 2
        return self.a if self.kind == "unpad" else tokens

    def divisors(self) -> tuple[int, int]:
        """The divisor of every length, and of the tail."""
        if self.kind in ("slice", "rank_order", "sequence_order"):
            return 2 * self.a, self.a
        return 2 if self.kind in ("half", "in_half") else 1, 1


# ---- movers


class Movers(Protocol):
    """One implementation. Methods that end in an underscore change their first arguments in place.

    The tensors of one call differ in row shape and dtype only, and share one launch.
    """

    name: str  # "native", "numba" or "torch".

    def row_indices(self, rows: RowRule, tokens: int) -> torch.Tensor:
        """The row, in a tensor of `tokens` rows, of every row of the part: [n] of the lengths' dtype, -1 for none."""
        ...

    def gather(self, xs: Sequence[torch.Tensor], rows: Rows | RowRule) -> list[torch.Tensor]:
        """Each x [t, ...] of any dtype -> x[rows] [n, ...]; a view for a slice. Every row of the part has one in x."""
        ...

    def scatter_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows | RowRule, add: bool = False
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
        rows: Rows | RowRule,
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
