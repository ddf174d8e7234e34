"""Partial results into accumulators, by PyTorch's operators."""

from __future__ import annotations

import torch

from cp_fast.movers.lengths_map import LengthsMap
from cp_fast.movers.rows import Rows, take
from cp_fast.movers.torch_movers.torch_asserts import assert_lengths
from cp_fast.movers.torch_movers.torch_rows import Targets
from cp_ref.contract.tensors import wide_dtype

__all__ = ["correct_", "log_add_exp", "merge_", "merge_padded_halves_", "put"]

INF = float("inf")


def put(out: torch.Tensor, x: torch.Tensor, rows: Rows, valid: torch.Tensor | None = None) -> None:
    """out[rows] = x, rounded to out's dtype, where `valid`, bool [n]."""
    if isinstance(rows, slice):
        out[rows].copy_(x)
        return
    rows, x = rows.long(), x.to(out.dtype)
    if valid is not None:
        x = torch.where(valid.view(-1, *[1] * (x.ndim - 1)), x, out.index_select(0, rows))
    out.index_copy_(0, rows, x)


def merge_(out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor, at: Targets) -> None:
    """`Kernels.merge_` of the part's rows: out_step [n, h, d], lse_step [n, h]."""
    old = take(lse.t(), at.whole)
    merged, new = _merged(take(out, at.whole), old, out_step, lse_step)
    put(out, merged, at.whole, at.valid)
    put(lse.t(), new, at.whole, at.valid)


def correct_(out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor, at: Targets) -> None:
    """`Kernels.merge_` with `final`: out_step [n, h, d] of the part's rows, both LSEs whole."""
    total, step = _lse_of(lse, at, whole=True), _lse_of(lse_step, at, whole=False)
    wide = wide_dtype(out.dtype, out_step.dtype, lse.dtype, lse_step.dtype)
    weight = torch.exp(step.to(wide) - total.to(wide))[..., None]
    share = (weight * out_step).masked_fill((step == -INF)[..., None], 0.0)
    put(out, take(out, at.whole) + share, at.whole, at.valid)


def merge_padded_halves_(lse: torch.Tensor, lse_step: torch.Tensor, rows: LengthsMap) -> None:
    """LSEs [b, h, s] of halves into those of whole sequences."""
    if not lse_step.numel():
        return
    assert_lengths(rows.helper, rows.lengths, 2, torch.iinfo(torch.int64).max)
    half = (rows.lengths.long().diff() // 2)[:, None, None]
    offset = torch.arange(lse.shape[2], device=lse.device) - rows.a * half
    valid = (offset >= 0) & (offset < half)
    step = lse_step.gather(2, offset.clamp(0, lse_step.shape[2] - 1).expand(-1, lse.shape[1], -1))
    lse.copy_(torch.where(valid, torch.logaddexp(lse, step).to(lse.dtype), lse))


def _lse_of(lse: torch.Tensor, at: Targets, *, whole: bool) -> torch.Tensor:
    """The LSE of the part's rows, [n, h], from that of the whole tensor or of the part."""
    if lse.ndim == 2:
        return take(lse.t(), at.whole if whole else at.part)
    assert at.place is not None
    position = at.place.in_whole if whole else at.place.in_part
    if not lse.numel():  # All sequences are empty: these rows are the tail.
        return lse.new_full((len(position), lse.shape[1]), -INF)
    sequence = at.place.sequence.clamp(max=lse.shape[0] - 1)
    return lse.transpose(1, 2)[sequence, position.clamp(0, lse.shape[2] - 1)]


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
    wide = wide_dtype(out.dtype, lse.dtype, out_step.dtype, lse_step.dtype)
    old, step = lse.to(wide), lse_step.to(wide)
    new = log_add_exp(old, step)
    return _weighted(out.to(wide), old, new).add_(_weighted(out_step.to(wide), step, new)), new


def _weighted(out: torch.Tensor, lse: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """out * exp(lse - new); 0 where lse is -inf, for any out."""
    return (out * torch.exp(lse - new)[..., None]).masked_fill_((lse == -INF)[..., None], 0.0)
