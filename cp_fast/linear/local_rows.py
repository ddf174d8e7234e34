"""The rows of a rank's fragments in the user's tensors: packed side by side for kernels, and put back among zeros."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from cp_fast.linear.linear_kernels import FragmentRows
from cp_ref.spec import Problem
from cp_ref.spec.linear.document_fragments import DocumentFragments

__all__ = ["LocalRows"]


@dataclass(frozen=True, eq=False)
class LocalRows:
    """One rank's rows of one batch.

    Attributes:
        problem: the batch.
        fragments: the rank's own, in the order of their rows.
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
        """Packed rows [n, ...] as a slice with the leading axes of `like`, contiguous; zero in padding and tail."""
        leading = 1 if self.problem.qkv_format == "thd" else 2
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
