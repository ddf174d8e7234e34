"""The rows of a rank's fragments in the user's tensors: packed side by side for kernels, and put back among zeros.

Few rows of padding between fragments may stay where they are, as fragments of no document. Then nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from cp_fast.linear.linear_kernels import FragmentRows
from cp_ref.spec import Problem
from cp_ref.spec.linear.document_fragments import DocumentFragments

__all__ = ["LocalRows"]

_MOST = 8  # one row of padding for so many rows in fragments costs less than copies of all


@dataclass(frozen=True, eq=False)
class LocalRows:
    """One rank's rows of one batch.

    Attributes:
        problem: the batch.
        fragments: the rank's own, in the order of their rows. Those of document -1 are padding.
        device: of the tensors.
    """

    problem: Problem
    fragments: DocumentFragments
    device: torch.device

    @cached_property
    def packed(self) -> FragmentRows:
        """The fragments, side by side."""
        sizes = self.fragments.stop - self.fragments.start
        return FragmentRows((0, *np.cumsum(sizes).tolist()), self.device)

    def with_padding(self) -> LocalRows:
        """The same with the padding between fragments as fragments of document -1, where that saves copies."""
        own = self.fragments
        ends = own.row + own.stop - own.start
        sizes = own.row - np.append(0, ends)[: len(ends)]
        n, some = self.packed.cu[-1], np.flatnonzero(sizes)
        if not len(some) or int(sizes.sum()) * _MOST > n:
            return self
        none, size = np.full(len(some), -1), sizes[some]
        padding = none, none, np.full(len(some), own.rank[0]), -size, np.zeros_like(size), own.row[some] - size
        columns = (np.concatenate(pair) for pair in zip(padding, own.columns, strict=True))
        both = DocumentFragments(*columns)
        return LocalRows(self.problem, both.take(both.row.argsort(kind="stable")), self.device)

    @cached_property
    def _padding(self) -> torch.Tensor | None:
        """The packed rows of padding, int64; None if there are none."""
        where = np.repeat(self.fragments.document < 0, self.fragments.stop - self.fragments.start)
        return torch.from_numpy(np.flatnonzero(where)).to(self.device) if where.any() else None

    @cached_property
    def _index(self) -> torch.Tensor | None:
        """The row of each packed row in the rank's buffer, int64 [n]; None where they are the same."""
        cu = np.array(self.packed.cu, dtype=np.int64)
        index = np.arange(cu[-1]) + np.repeat(self.fragments.row - cu[:-1], np.diff(cu))
        if np.array_equal(index, np.arange(cu[-1])):
            return None
        return torch.from_numpy(index).to(self.device)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """A slice of the user's as packed rows [n, ...], contiguous."""
        rows = self._as_rows(x)
        n = self.packed.cu[-1]
        if self._index is not None:
            return rows.index_select(0, self._index)
        return (rows if len(rows) == n else rows[:n]).contiguous()

    def put(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Packed rows [n, ...], a tensor of the caller's own, as a slice with the leading axes of `like`, contiguous;
        zero in padding and tail.
        """
        leading = 1 if self.problem.qkv_format == "thd" else 2
        if self._padding is not None:
            x = x.index_fill_(0, self._padding, 0)
        total, n = like.shape[:leading].numel(), len(x)
        if self._index is not None:
            x = x.new_zeros(total, *x.shape[1:]).index_copy_(0, self._index, x)
        elif total != n:
            x = torch.cat([x, x.new_zeros(total - n, *x.shape[1:])])
        if leading == 1:
            return x
        if self.problem.qkv_format == "bshd":
            return x.unflatten(0, like.shape[:2])
        return x.unflatten(0, (like.shape[1], like.shape[0])).transpose(0, 1).contiguous()

    def _as_rows(self, x: torch.Tensor) -> torch.Tensor:
        if self.problem.qkv_format == "thd":
            return x
        return (x if self.problem.qkv_format == "bshd" else x.transpose(0, 1)).flatten(0, 1)
