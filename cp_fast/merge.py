"""Partial results into totals, which are in float32 (float64) where more than two partial results meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cp_fast.kernels.base import Kernels
from cp_fast.kernels.torch_merges import log_add_exp
from cp_fast.rows import Rows, is_all, is_mask, put_columns

__all__ = ["Merged", "Part", "Place", "Total", "TotalShape", "add_sink"]

Tensors = Sequence[torch.Tensor]


class Place(NamedTuple):
    """Where a partial result goes in a total. `whole`: it has every row and head, in order."""

    into: Rows
    heads: slice
    whole: bool


class Part(NamedTuple):
    """A partial result: by row [n, h, ...] and, of outs, lse [h, n]."""

    rows: Tensors
    lse: torch.Tensor | None
    place: Place


class Merged(NamedTuple):
    """A total: by row [size, h, ...] and, of outs, lse [h, size]."""

    rows: Tensors
    lse: torch.Tensor | None


@dataclass(frozen=True)
class TotalShape:
    """A total of `size` rows: the shapes behind them, by tensor (all begin with the heads); what it is computed and
    finally rounded to; whether it is of outs, which have an lse. `spare`: see `Program.spare_rows`.
    """

    size: int
    behind: tuple[tuple[int, ...], ...]
    wide: torch.dtype
    final: torch.dtype | None  # None: it is computed with before it is rounded
    device: torch.device
    outs: bool
    spare: int = 0

    def place(self, into: Rows, heads: slice) -> Place:
        """The place of these rows and heads."""
        whole = is_all(into, self.size + self.spare) and heads == slice(0, self.behind[0][0])
        return Place(into, heads, whole)


class Total:
    """Partial results of some rows each, merged by lse (outs) or added up (gradients).

    The first part that has every row is just kept, and what comes later is held until `settle`. So a pass of one launch
    ends with the kernel's own result, never widened; where there are two, the second goes straight into the first, in
    `final`, the dtype that the result is rounded to next; and only longer rings pay for wide totals.
    """

    def __init__(self, shape: TotalShape, kernels: Kernels) -> None:
        self._shape, self._kernels = shape, kernels
        self._total: Merged | None = None
        self.held: list[Part] = []  # parts that wait to be added

    def add(self, part: Part) -> None:
        """Take a partial result; the rows of each are distinct, so the sum has the same bits every time."""
        self.held.append(part)

    def settle(self, dtype: torch.dtype | None = None) -> None:
        """Put what is held into the total, in the wide dtype or this one."""
        parts = self.held
        if not parts:
            return
        self.held = []
        total = self._first(parts) if self._total is None else self._total
        if parts and not _are(total.rows, dtype):
            total = Merged(tuple(x.to(self._shape.wide) for x in total.rows), total.lse)
        self._total = total
        for part in parts:
            self._put(self._heads_of(total, part.place), part)

    def finish(self) -> Merged:
        """The total of all parts: in the first part's dtype if that had every row and at most one more came."""
        shape = self._shape
        if self._total is None and len(self.held) == 2:
            self._total = self._whole(self.held, shape.final)
        narrow = len(self.held) == 1 and (self._total is None or _are(self._total.rows, shape.final))
        self.settle(shape.final if narrow else None)
        total = self._nothing() if self._total is None else self._total
        if not shape.spare:
            return total
        lse = None if total.lse is None else total.lse[:, : shape.size].contiguous()
        return Merged(tuple(x[: shape.size] for x in total.rows), lse)

    def _first(self, parts: list[Part]) -> Merged:
        """What the total begins with, taken out of `parts`: wide rows of messages rather than a kernel's."""
        if (chosen := self._whole(parts, self._shape.wide) or self._whole(parts, None)) is not None:
            return chosen
        if len(parts) > 1:
            return self._nothing()
        part = parts.pop()
        total = self._nothing([x.dtype for x in part.rows])
        here = self._heads_of(total, part.place)
        self._kernels.put_rows_(here.rows, part.rows, part.place.into)
        if here.lse is not None and part.lse is not None:
            put_columns(here.lse, part.lse, part.place.into)
        return total

    def _whole(self, parts: list[Part], dtype: torch.dtype | None) -> Merged | None:
        """A part that has every row, in this dtype (any, for None), taken out of `parts`; None if there is none."""
        for n, part in enumerate(parts):
            if part.place.whole and (dtype is None or _are(part.rows, dtype)):
                del parts[n]
                return Merged(part.rows, part.lse)
        return None

    def _heads_of(self, total: Merged, place: Place) -> Merged:
        """The heads of a total that a part goes into."""
        if place.whole or place.heads == slice(0, self._shape.behind[0][0]):
            return total
        lse = None if total.lse is None else total.lse[place.heads]
        return Merged(tuple(x[:, place.heads] for x in total.rows), lse)

    def _nothing(self, dtypes: Sequence[torch.dtype] | None = None) -> Merged:
        """The total of no parts: in the wide dtype, or in these, one a tensor."""
        s, size = self._shape, self._shape.size + self._shape.spare
        wide = [s.wide] * len(s.behind)
        rows = tuple(
            torch.zeros(size, *behind, dtype=dtype, device=s.device)
            for behind, dtype in zip(s.behind, dtypes or wide, strict=True)
        )
        shape = (s.behind[0][0], size)
        return Merged(rows, torch.full(shape, float("-inf"), dtype=s.wide, device=s.device) if s.outs else None)

    def _put(self, total: Merged, part: Part) -> None:
        if total.lse is not None and part.lse is not None:
            self._kernels.merge_(total.rows[0], total.lse, part.rows[0], part.lse, part.place.into)
        else:
            self._kernels.add_rows_(total.rows, part.rows, part.place.into)


def _are(tensors: Tensors, dtype: torch.dtype | None) -> bool:
    """Whether all tensors, one or two, have this dtype."""
    return tensors[0].dtype == dtype == tensors[-1].dtype


def add_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor, rows: Rows) -> None:
    """Let the denominator of these rows gain exp(sink[h]); once, when all tiles are merged. A row that saw nothing
    has lse = sink. Of a mask of all rows, the others keep what they have.
    """
    gain = sink.to(lse.dtype)[:, None]
    if is_mask(rows):
        gain, rows = torch.where(rows, gain, float("-inf")), slice(None)
    old = lse[:, rows]
    new = log_add_exp(old, gain)
    weight = torch.exp(old - new).masked_fill(old == float("-inf"), 0.0).t().unsqueeze(-1)
    if isinstance(rows, slice):
        out[rows].mul_(weight)
        old.copy_(new)
    else:
        out.index_copy_(0, rows, out.index_select(0, rows).mul_(weight))
        lse.index_copy_(1, rows, new)
