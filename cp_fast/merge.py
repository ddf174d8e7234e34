"""Partial results into totals, which are in float32 (float64) where more than two partial results meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cp_fast.kernels.base import Kernels
from cp_fast.rows import Rows, is_all, is_mask, put_columns

__all__ = ["Part", "Total", "TotalShape", "add_sink"]

Tensors = tuple[torch.Tensor, ...]


class Part(NamedTuple):
    """A partial result: by row [n, h, ...] and, of outs, lse [h, n]; for rows `into` and `heads` of a total."""

    rows: Tensors
    lse: torch.Tensor | None
    into: Rows
    heads: slice

    def views(self, part: Part) -> Part:
        """The heads of a total that a part goes into."""
        if part.heads == self.heads:
            return self
        lse = None if self.lse is None else self.lse[part.heads]
        return Part(tuple(x[:, part.heads] for x in self.rows), lse, self.into, part.heads)


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


class Total:
    """Partial results of some rows each, merged by lse (outs) or added up (gradients).

    The first part that has every row is just kept, and what comes later is held until `settle`. So a pass of one launch
    ends with the kernel's own result, never widened; where there are two, the second goes straight into the first, in
    `final`, the dtype that the result is rounded to next; and only longer rings pay for wide totals.
    """

    def __init__(self, shape: TotalShape, kernels: Kernels) -> None:
        self._shape, self._kernels = shape, kernels
        self._total: Part | None = None
        self._held: list[Part] = []

    @property
    def held(self) -> int:
        """How many parts are held."""
        return len(self._held)

    def add(self, part: Part) -> None:
        """Take a partial result; the rows of each are distinct, so the sum has the same bits every time."""
        self._held.append(part)

    def settle(self, dtype: torch.dtype | None = None) -> None:
        """Put what is held into the total, in the wide dtype or this one."""
        parts, self._held = self._held, []
        if not parts:
            return
        if self._total is None:
            self._total = self._first(parts)
        for part in parts:
            narrow = all(x.dtype == dtype for x in self._total.rows)
            if not narrow:
                self._total = self._total._replace(rows=tuple(x.to(self._shape.wide) for x in self._total.rows))
            self._put(self._total.views(part), part)

    def finish(self) -> Part:
        """The total of all parts: in the first part's dtype if that had every row and at most one more came."""
        if self._total is None and self.held == 2:
            self._total = self._whole(self._held, self._shape.final)
        narrow = self.held == 1 and all(x.dtype == self._shape.final for x in (self._total.rows if self._total else ()))
        self.settle(self._shape.final if narrow else None)
        total = self._nothing() if self._total is None else self._total
        if not self._shape.spare:
            return total
        size = self._shape.size
        lse = None if total.lse is None else total.lse[:, :size].contiguous()
        return Part(tuple(x[:size] for x in total.rows), lse, slice(0, size), total.heads)

    def _first(self, parts: list[Part]) -> Part:
        """The part that the total begins with, taken out of `parts`: wide rows of messages rather than a kernel's."""
        if (chosen := self._whole(parts, self._shape.wide) or self._whole(parts, None)) is not None:
            return chosen
        if len(parts) > 1:
            return self._nothing()
        part = parts.pop()
        total = self._nothing([x.dtype for x in part.rows])
        here = total.views(part)
        self._kernels.put_rows_(here.rows, part.rows, part.into)
        if here.lse is not None and part.lse is not None:
            put_columns(here.lse, part.lse, part.into)
        return total

    def _whole(self, parts: list[Part], dtype: torch.dtype | None) -> Part | None:
        """A part that has every row, in this dtype (any, for None), taken out of `parts`; None if there is none."""
        size, heads = self._shape.size + self._shape.spare, slice(0, self._shape.behind[0][0])
        for n, part in enumerate(parts):
            fits = dtype is None or all(x.dtype == dtype for x in part.rows)
            if fits and is_all(part.into, size) and part.heads == heads:
                return parts.pop(n)
        return None

    def _nothing(self, dtypes: Sequence[torch.dtype] | None = None) -> Part:
        """The total of no parts: in the wide dtype, or in these, one a tensor."""
        s, size = self._shape, self._shape.size + self._shape.spare
        wide = [s.wide] * len(s.behind)
        rows = tuple(
            torch.zeros(size, *behind, dtype=dtype, device=s.device)
            for behind, dtype in zip(s.behind, dtypes or wide, strict=True)
        )
        shape = (s.behind[0][0], size)
        lse = torch.full(shape, float("-inf"), dtype=s.wide, device=s.device) if s.outs else None
        return Part(rows, lse, slice(0, size), slice(0, shape[0]))

    def _put(self, total: Part, part: Part) -> None:
        if total.lse is not None and part.lse is not None:
            self._kernels.merge_(total.rows[0], total.lse, part.rows[0], part.lse, part.into)
        else:
            self._kernels.add_rows_([*total.rows], [*part.rows], part.into)


def add_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor, rows: Rows) -> None:
    """Let the denominator of these rows gain exp(sink[h]); once, when all tiles are merged. A row that saw nothing
    has lse = sink. Of a mask of all rows, the others keep what they have.
    """
    gain = sink.to(lse.dtype)[:, None]
    if is_mask(rows):
        gain, rows = torch.where(rows, gain, float("-inf")), slice(None)
    old = lse[:, rows]
    new = torch.logaddexp(old, gain)
    weight = torch.exp(old - new).masked_fill(old == float("-inf"), 0.0).t().unsqueeze(-1)
    if isinstance(rows, slice):
        out[rows].mul_(weight)
        old.copy_(new)
    else:
        out.index_copy_(0, rows, out.index_select(0, rows).mul_(weight))
        lse.index_copy_(1, rows, new)
