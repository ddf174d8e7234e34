"""The rows of a user's slice, packed as linear and sparse layers compute with them, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cp_fast.movers.mover_protocol import Rows
from cp_ref.batches.tensors import lse_from_packed, lse_to_packed, to_format, to_packed
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.table import Column, ranges

__all__ = ["OwnRows", "rows_of", "taken"]


@dataclass(frozen=True, eq=False)
class OwnRows:
    """A rank's tokens of one side, side by side in the order of its buffer, without padding and tail.

    Attributes:
        rows: the row of each in the global buffer, [n].
        places: the row of each in the rank's buffer: a slice, or int64 numbers on the device.
    """

    problem: Problem
    rows: Column
    places: Rows

    @staticmethod
    def of(problem: Problem, fragments: Any, device: torch.device) -> OwnRows:
        """Those of one rank's fragments, of its buffer or of documents."""
        size = fragments.stop - fragments.start
        return OwnRows(problem, ranges(fragments.start, size), rows_of(ranges(fragments.row, size), device))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """A slice of the user's as rows [n, ...], a view if they lie side by side; the last axis is contiguous."""
        rows = taken(to_packed(x, self.problem.qkv_format), self.places)
        return rows if rows.shape[-1] <= 1 or rows.stride(-1) == 1 else rows.contiguous()

    def put(self, x: torch.Tensor, like: torch.Tensor, other: float = 0) -> torch.Tensor:
        """Rows [n, ...] as a slice of the user's, with the leading axes of `like`; `other` in padding and tail."""
        leading = 1 if self.problem.qkv_format == "thd" else 2
        total = like.shape[:leading].numel()
        return to_format(self._whole(x, total, other), self.problem.qkv_format, len(self.problem.sequences))

    def take_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """An lse of the user's as rows [n, h], contiguous."""
        return taken(lse_to_packed(lse, self.problem.qkv_format), self.places).contiguous()

    def put_lse(self, lse: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Rows [n, h] as an lse of the user's, -inf in padding and tail. like: of q's format."""
        leading = 1 if self.problem.qkv_format == "thd" else 2
        whole = self._whole(lse, like.shape[:leading].numel(), float("-inf"))
        return lse_from_packed(whole, self.problem.qkv_format, len(self.problem.sequences))

    def _whole(self, x: torch.Tensor, total: int, other: float) -> torch.Tensor:
        """All rows of the rank's buffer, given those of its tokens."""
        if total == x.shape[0] and isinstance(self.places, slice):
            return x
        whole = x.new_full((total, *x.shape[1:]), other)
        if not isinstance(self.places, slice):
            return whole.index_copy_(0, self.places, x)
        whole[self.places] = x
        return whole


def rows_of(numbers: Column, device: torch.device) -> Rows:
    """Rows of a tensor by their numbers: a slice where they follow one another."""
    if not len(numbers):
        return slice(0, 0)
    if bool((np.diff(numbers) == 1).all()):
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64)).to(device)


def taken(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Rows of a tensor: itself or a view where they are a slice."""
    if not isinstance(rows, slice):
        return x.index_select(0, rows)
    return x if rows.start == 0 and rows.stop == x.shape[0] else x[rows]
