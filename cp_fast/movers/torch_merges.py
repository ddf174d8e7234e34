"""Partial results into accumulators, by PyTorch's operators."""

from __future__ import annotations

import torch

from cp_fast.runtime.row_selection import Rows

__all__ = ["log_add_exp", "merge_", "put", "taken", "wide_dtype"]

INF = float("inf")


def wide_dtype(*operands: torch.Tensor) -> torch.dtype:
    """The dtype of sums: float32, or float64 if an operand is float64."""
    return torch.float64 if any(x.dtype == torch.float64 for x in operands) else torch.float32


def taken(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """x's rows: a view for a slice."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def put(out: torch.Tensor, x: torch.Tensor, rows: Rows) -> None:
    """out[rows] = x, rounded to out's dtype."""
    if isinstance(rows, slice):
        out[rows].copy_(x)
    else:
        out.index_copy_(0, rows.long(), x.to(out.dtype))


def merge_(out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor, rows: Rows) -> None:
    """`Kernels.merge_`."""
    old = taken(lse.t(), rows)
    merged, new = _merged(taken(out, rows), old, out_step, lse_step.t())
    put(out, merged, rows)
    put(lse.t(), new, rows)


def log_add_exp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """log(exp(a) + exp(b)) of each pair, with the same bits at any position in the tensors.

    On a processor `torch.logaddexp` rounds the last values, which fill no whole vector register, differently. On a GPU
    it does not, and is one launch.

    >>> log_add_exp(torch.tensor([0.0, -INF, -INF]), torch.tensor([0.0, 2.0, -INF]))
    tensor([0.6931, 2.0000,   -inf])
    """
    if a.is_cuda:
        return torch.logaddexp(a, b)
    apart = (a - b).abs_().nan_to_num_(0.0)  # Of two infinities.
    return torch.maximum(a, b).add_(apart.neg_().exp_().log1p_())


def _merged(
    out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted mean [n, h, d] and the LSE [n, h] of two partial results, in the wide dtype."""
    wide = wide_dtype(out, lse, out_step, lse_step)
    old, step = lse.to(wide), lse_step.to(wide)
    new = log_add_exp(old, step)
    return _weighted(out.to(wide), old, new).add_(_weighted(out_step.to(wide), step, new)), new


def _weighted(out: torch.Tensor, lse: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """out * exp(lse - new); 0 where lse is -inf, for any out."""
    return (out * torch.exp(lse - new)[..., None]).masked_fill_((lse == -INF)[..., None], 0.0)
