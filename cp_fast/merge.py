"""Partial results into float32 (float64) accumulators, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cp_fast.kernels.base import Kernels
from cp_fast.rows import Rows, is_mask

__all__ = ["Merged", "Summed", "add_sink"]


Tensors = tuple[torch.Tensor, ...]


class _Parts:
    """A total of partial results, some rows each. The first tensor of a total and of a part is the one that is rounded.

    The first part is just kept where it has every row, and every other one is held until `settle`, which the caller
    calls before the next launch. So a pass of one launch ends with the kernel's own result, never widened; where there
    are two, the second goes straight into the first, in `final`, the dtype that the result is rounded to next (None: it
    is computed with); and only longer rings pay for wide accumulators. `spare`: see `RankProgram.spare_rows`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        wide: torch.dtype,
        final: torch.dtype | None,
        device: torch.device,
        kernels: Kernels,
        spare: int = 0,
    ) -> None:
        self._rows, self._wide, self._final, self._kernels, self._spare = shape[0], wide, final, kernels, spare
        self._options: dict[str, Any] = {"size": (shape[0] + spare, *shape[1:]), "dtype": wide, "device": device}
        self._total: Tensors | None = None
        self._held: tuple[Tensors, Rows] | None = None

    def settle(self) -> None:
        """Put what is held into the total, in the wide dtype."""
        self._settle_in(self._wide)

    def _take(self, part: Tensors, rows: Rows) -> None:
        self.settle()
        if self._total is None and isinstance(rows, slice) and (rows.start, rows.stop) == (0, self._rows):
            self._total = part
        else:
            self._held = part, rows

    def _finish(self) -> Tensors:
        """The total: in the first part's dtype if that had every row and at most one more was taken."""
        kept = self._total is not None and self._total[0].dtype == self._final
        self._settle_in(self._final if kept and self._final is not None else self._wide)
        return self._nothing() if self._total is None else self._total

    def _settle_in(self, dtype: torch.dtype) -> None:
        if self._held is not None:
            first, *others = self._nothing() if self._total is None else self._total
            self._total = (first.to(dtype), *others)
            self._put(self._total, *self._held)
            self._held = None

    def _nothing(self) -> Tensors:
        """The total of no parts."""
        return (torch.zeros(**self._options),)

    def _put(self, total: Tensors, part: Tensors, rows: Rows) -> None:
        """Let the total gain a part, in place."""
        raise NotImplementedError


class Merged(_Parts):
    """The accumulators (out [t, h, d_v], lse [h, t]) of a forward pass."""

    def add(self, part_out: torch.Tensor, part_lse: torch.Tensor, rows: Rows) -> None:
        """Take the partial result of some rows, [n, h, d_v] in any float dtype and [h, n]; one is held at most."""
        self._take((part_out, part_lse), rows)

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse): 0 and -inf in rows that nothing was merged into."""
        out, lse = self._finish()
        return (out[: -self._spare], lse[:, : -self._spare].contiguous()) if self._spare else (out, lse)

    def _nothing(self) -> Tensors:
        (out,) = super()._nothing()
        return out, out.new_full((out.shape[1], out.shape[0]), float("-inf"))

    def _put(self, total: Tensors, part: Tensors, rows: Rows) -> None:
        (out, lse), (part_out, part_lse) = total, part
        self._kernels.merge_(out, lse, part_out, part_lse, rows)


class Summed(_Parts):
    """The sum of partial gradients [t, ...], 0 in rows that nothing was added to."""

    def add(self, part: torch.Tensor, rows: Rows) -> None:
        """total[rows] += part; the rows are distinct, so the result has the same bits every time."""
        self._take((part,), rows)

    def result(self) -> torch.Tensor:
        """The sum."""
        (total,) = self._finish()
        return total[: -self._spare] if self._spare else total

    def _put(self, total: Tensors, part: Tensors, rows: Rows) -> None:
        self._kernels.add_rows_([*total], [*part], rows)


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
