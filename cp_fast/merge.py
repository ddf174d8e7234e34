"""Partial results into float32 (float64) accumulators, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.kernels.base import Kernels
from cp_fast.rows import Rows, is_mask

__all__ = ["Merged", "Summed", "add_sink"]


class Merged:
    """The accumulators (out [t, h, d_v], lse [h, t]) of a forward pass.

    The first partial result is just kept where it has every row, and every other one is held until `settle`, which the
    caller calls before the next launch. So a pass of one launch ends with the kernel's own output, never widened; where
    there are two, the second is merged straight into the first, in `final`, the dtype that the results are rounded to
    next (None: they are computed with); and only longer rings pay for wide accumulators.
    `spare`: see `RankProgram.spare_rows`.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        wide: torch.dtype,
        final: torch.dtype | None,
        device: torch.device,
        kernels: Kernels,
        spare: int = 0,
    ) -> None:
        self._shape, self._wide, self._final = shape, wide, final
        self._device, self._kernels, self._spare = device, kernels, spare
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None
        self._held: tuple[torch.Tensor, torch.Tensor, Rows] | None = None

    def add(self, part_out: torch.Tensor, part_lse: torch.Tensor, rows: Rows) -> None:
        """Take the partial result of some rows, [n, h, d_v] in any float dtype and [h, n]; one is held at most."""
        self.settle()
        if self._out is None and _is_all(rows, self._shape[0]):
            self._out, self._lse = part_out, part_lse
        else:
            self._held = part_out, part_lse, rows

    def settle(self) -> None:
        """Merge what is held, in the wide dtype."""
        if self._held is not None:
            out, lse = self._accumulators()
            self._kernels.merge_(out, lse, *self._held)
            self._held = None

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse): 0 and -inf in rows that nothing was merged into."""
        if (
            self._held is not None
            and self._out is not None
            and self._lse is not None
            and self._out.dtype == self._final
        ):
            self._kernels.merge_(self._out, self._lse, *self._held)
            self._held = None
        self.settle()
        out, lse = self._accumulators() if self._out is None or self._lse is None else (self._out, self._lse)
        return (out[: -self._spare], lse[:, : -self._spare].contiguous()) if self._spare else (out, lse)

    def _accumulators(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._out is None or self._lse is None:
            rows, heads, dims = self._shape[0] + self._spare, *self._shape[1:]
            self._out = torch.zeros(rows, heads, dims, dtype=self._wide, device=self._device)
            self._lse = self._out.new_full((heads, rows), float("-inf"))
        self._out = self._out.to(self._wide)
        return self._out, self._lse


class Summed:
    """The sum of partial gradients [t, ...], 0 in rows that nothing was added to. As in `Merged`, the first part is
    just kept where it has every row, and a second that is the last is added to it in its own dtype.
    """

    def __init__(
        self,
        shape: Sequence[int],
        wide: torch.dtype,
        final: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        spare: int = 0,
    ) -> None:
        self._shape, self._wide, self._final = shape, wide, final
        self._device, self._kernels, self._spare = device, kernels, spare
        self._total: torch.Tensor | None = None
        self._held: tuple[torch.Tensor, Rows] | None = None

    def add(self, part: torch.Tensor, rows: Rows) -> None:
        """total[rows] += part; the rows are distinct, so the result has the same bits every time."""
        self.settle()
        if self._total is None and _is_all(rows, self._shape[0]):
            self._total = part
        else:
            self._held = part, rows

    def settle(self) -> None:
        """Add what is held, in the wide dtype."""
        if self._held is not None:
            part, rows = self._held
            self._total = self._sum().to(self._wide)
            self._kernels.add_rows_([self._total], [part], rows)
            self._held = None

    def result(self) -> torch.Tensor:
        """The sum; in the first part's dtype if that had every row and no two more were added."""
        if self._held is not None and self._total is not None and self._total.dtype == self._final:
            part, rows = self._held
            self._kernels.add_rows_([self._total], [part], rows)
            self._held = None
        self.settle()
        total = self._sum()
        return total[: -self._spare] if self._spare else total

    def _sum(self) -> torch.Tensor:
        if self._total is None:
            shape = (self._shape[0] + self._spare, *self._shape[1:])
            self._total = torch.zeros(shape, dtype=self._wide, device=self._device)
        return self._total


def _is_all(rows: Rows, count: int) -> bool:
    return isinstance(rows, slice) and (rows.start, rows.stop) == (0, count)


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
