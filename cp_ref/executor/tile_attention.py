"""One tile: some queries against some keys of one attention slice, forward and backward, written out.

    legend   n = query rows, m = key rows, h = query heads; every tensor has its rows first

K and V come with one row of heads for every query head (grouped heads repeated), so that nothing below knows of groups.
ALiBi, score_mod and dropout come as a `PairScores`, or None.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_ref.contract.scores import PairScores
from cp_ref.schedules.problem import ScoreOptions

__all__ = ["TileGradients", "TileResult", "tile_backward", "tile_forward", "visible_pairs"]


class TileResult(NamedTuple):
    """A partial result, normalised over the tile's own keys."""

    out: torch.Tensor  # [n, h, d_v]
    lse: torch.Tensor  # [n, h], -inf where a row sees nothing
    max_logit: torch.Tensor  # [h]


class TileGradients(NamedTuple):
    """A tile's share of the gradients."""

    dq: torch.Tensor  # [n, h, d_qk]
    dk: torch.Tensor  # [m, h, d_qk]
    dv: torch.Tensor  # [m, h, d_v]


def visible_pairs(rows: slice, columns: slice, lo: int, hi: int, device: torch.device) -> torch.Tensor:
    """Which pairs of a rectangle its diagonal band shows, bool [n, m]: lo <= j - i <= hi for row i and column j.

    >>> visible_pairs(slice(2, 4), slice(1, 4), -2**40, 0, torch.device("cpu")).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = torch.arange(columns.start, columns.stop, device=device)[None, :]
    return (lo <= j - i) & (j - i <= hi)


def tile_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    options: ScoreOptions,
    extra: PairScores | None = None,
) -> TileResult:
    """q [n, h, d_qk], k [m, h, d_qk], v [m, h, d_v], visible bool [n, m] -> the partial result. Dropout changes out
    alone.
    """
    capped, _ = _capped(q, k, options)
    scores = _masked(capped, visible, extra)
    lse = torch.logsumexp(scores, dim=-1)
    weights = _weights(scores, lse) * _dropout(q.dtype, extra)
    return TileResult(torch.einsum("nhm,mhd->nhd", weights, v), lse, scores.amax(dim=(0, 2)))


def tile_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    visible: torch.Tensor,
    options: ScoreOptions,
    extra: PairScores | None = None,
) -> TileGradients:
    """The tile's gradients, from the final lse [n, h] of its rows (over all keys, not only the tile's).

    With weights p = exp(s - lse), out = p v and a gradient dlse of lse itself:

        dv = p^T dout        dp = dout v^T        ds = p * (dp - delta)        delta = sum(dout * out) - dlse
        dq = scale * ds k    dk = scale * ds^T q  (ds times the slope of the softcap, 1 - tanh^2, where there is one)

    Dropout multiplies p by its factors in dv, and dp by the same factors; score_mod's derivative comes before the
    softcap's.
    """
    capped, slope = _capped(q, k, options)
    scores = _masked(capped, visible, extra)
    weights, dropout = _weights(scores, lse), _dropout(q.dtype, extra)
    dv = torch.einsum("nhm,nhd->mhd", weights * dropout, dout)
    dweights = torch.einsum("nhd,mhd->nhm", dout, v) * dropout
    dscores = weights * (dweights - delta[..., None])
    if extra is not None:
        dscores = extra.pulled_back(capped, dscores).masked_fill(scores == float("-inf"), 0.0)
    dscores = dscores * slope
    dq = options.scale * torch.einsum("nhm,mhd->nhd", dscores, k)
    dk = options.scale * torch.einsum("nhm,nhd->mhd", dscores, q)
    return TileGradients(dq, dk, dv)


def _capped(q: torch.Tensor, k: torch.Tensor, options: ScoreOptions) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Scores [n, h, m] after the softcap, and its slope."""
    scores = options.scale * torch.einsum("nhd,mhd->nhm", q, k)
    if options.softcap <= 0:
        return scores, 1.0
    bent = torch.tanh(scores / options.softcap)
    return options.softcap * bent, 1.0 - bent * bent


def _masked(capped: torch.Tensor, visible: torch.Tensor, extra: PairScores | None) -> torch.Tensor:
    """Scores after ALiBi and score_mod, -inf where hidden."""
    scores = capped if extra is None else extra.modified(capped)
    return scores.masked_fill(~visible[:, None, :], float("-inf"))


def _dropout(dtype: torch.dtype, extra: PairScores | None) -> torch.Tensor | float:
    """Dropout's factors of the weights [n, h, m], 0 or 1 / (1 - dropout_p); 1 without dropout."""
    factors = None if extra is None else extra.dropout(dtype)
    return 1.0 if factors is None else factors


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The weights exp(s - lse), 0 where hidden (also where lse is -inf: a row that sees nothing)."""
    return torch.exp(scores - lse[..., None]).masked_fill(scores == float("-inf"), 0.0)
