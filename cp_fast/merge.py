"""Partial results into float32 (float64) accumulators, in place."""

from __future__ import annotations

import torch

from cp_fast.rows import Rows

__all__ = ["add_rows", "add_sink", "merge_rows"]


def merge_rows(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor, rows: Rows
) -> None:
    """Merge a partial result into rows of (out, lse).

    out [t, h, d_v] and lse [h, t]: accumulators, 0 and -inf where nothing was merged yet. part_out [n, h, d_v] in any
    float dtype and part_lse [h, n], finite: every row of a tile sees a key. With w = exp(part_lse - new lse), out + w *
    (part_out - out) is the
    weighted mean in one pass over out: the old weight is 1 - w. Where lse was -inf, w is 1.
    """
    old = lse[:, rows]
    new = torch.logaddexp(old, part_lse)
    weight = torch.exp(part_lse - new).t().unsqueeze(-1)
    part = part_out.to(out.dtype)
    if isinstance(rows, slice):
        out[rows].lerp_(part, weight)
        old.copy_(new)
    else:
        out.index_copy_(0, rows, torch.lerp(out.index_select(0, rows), part, weight))
        lse.index_copy_(1, rows, new)


def add_rows(total: torch.Tensor, part: torch.Tensor, rows: Rows) -> None:
    """total[rows] += part, in total's dtype; the rows are distinct, so the result has the same bits every time."""
    if isinstance(rows, slice):
        total[rows].add_(part)
    else:
        total.index_copy_(0, rows, total.index_select(0, rows).add_(part))


def add_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor, rows: Rows) -> None:
    """Let the denominator of these rows gain exp(sink[h]); once, when all tiles are merged. A row that saw nothing
    has lse = sink.
    """
    old = lse[:, rows]
    new = torch.logaddexp(old, sink.to(lse.dtype)[:, None])
    weight = torch.exp(old - new).masked_fill(old == float("-inf"), 0.0).t().unsqueeze(-1)
    if isinstance(rows, slice):
        out[rows].mul_(weight)
        old.copy_(new)
    else:
        out.index_copy_(0, rows, out.index_select(0, rows).mul_(weight))
        lse.index_copy_(1, rows, new)
