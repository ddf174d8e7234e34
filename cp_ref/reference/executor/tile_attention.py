"""One tile: some queries against some keys of one area, forward and backward, written out.

    legend   n = query rows, m = key rows, h = query heads; every tensor has its rows first

K and V come with one row of heads for every query head (grouped heads repeated), so that nothing below knows of groups.
ALiBi, score_mod and dropout come as a `PairScores`, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from cp_ref.calls.scores import PairScores, ScorePlaces, ScoreTensors
from cp_ref.schedules.problem import Problem, ScoreSpec, row_positions

__all__ = [
    "TileGradients",
    "TileResult",
    "pair_indices",
    "pair_scores",
    "row_delta",
    "tile_backward",
    "tile_forward",
    "visible_pairs",
]


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
    options: ScoreSpec,
    extra: PairScores | None = None,
) -> TileResult:
    """q [n, h, d_qk], k [m, h, d_qk], v [m, h, d_v], visible bool [n, m], or [n, h, m] -> the partial result. Dropout
    changes out alone.
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
    options: ScoreSpec,
    extra: PairScores | None = None,
) -> TileGradients:
    """The tile's gradients, from the final lse [n, h] of its rows (over all keys, not only the tile's).

    With weights p = exp(s - lse), out = p v and a gradient dlse of lse itself:

        dv = p^T dout        dp = dout v^T        ds = p * (dp - delta)        delta: see `row_delta`
        dq = scale * ds k    dk = scale * ds^T q  (ds times the slope of the softcap, 1 - tanh^2, where there is one)

    Dropout multiplies p by its factors in dv, and dp by the same factors; score_mod's derivative comes before the
    softcap's. A row that sees nothing of the tile gives it nothing, whatever its dout and delta are, NaN included.
    """
    capped, slope = _capped(q, k, options)
    scores = _masked(capped, visible, extra)
    hidden = scores == float("-inf")
    dout = dout.masked_fill(hidden.all(dim=-1)[..., None], 0.0)
    weights, dropout = _weights(scores, lse), _dropout(q.dtype, extra)
    dv = torch.einsum("nhm,nhd->mhd", weights * dropout, dout)
    dweights = torch.einsum("nhd,mhd->nhm", dout, v) * dropout
    dscores = weights * (dweights - delta[..., None])
    dscores = dscores if extra is None else extra.pulled_back(capped, dscores)
    dscores = dscores.masked_fill(hidden, 0.0) * slope
    dq = options.scale * torch.einsum("nhm,mhd->nhd", dscores, k)
    dk = options.scale * torch.einsum("nhm,nhd->mhd", dscores, q)
    return TileGradients(dq, dk, dv)


def row_delta(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor) -> torch.Tensor:
    """sum(dout * out) - dlse, by row [n, h]: dout and out [n, h, d_v], dlse [n, h]. Where out is 0, as in a row that
    sees nothing, dout adds nothing, NaN included.

    >>> row_delta(torch.tensor([[[2.0, torch.nan]]]), torch.tensor([[[3.0, 0.0]]]), torch.tensor([[1.0]]))
    tensor([[5.]])
    """
    return (dout.to(out.dtype) * out).masked_fill(out == 0, 0.0).sum(dim=-1) - dlse


def _capped(q: torch.Tensor, k: torch.Tensor, options: ScoreSpec) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Scores [n, h, m] after the softcap, and its slope."""
    scores = options.scale * torch.einsum("nhd,mhd->nhm", q, k)
    if options.softcap <= 0:
        return scores, 1.0
    bent = torch.tanh(scores / options.softcap)
    return options.softcap * bent, 1.0 - bent * bent


def _masked(capped: torch.Tensor, visible: torch.Tensor, extra: PairScores | None) -> torch.Tensor:
    """Scores after ALiBi and score_mod, -inf where hidden."""
    scores = capped if extra is None else extra.modified(capped)
    shown = visible if visible.dim() == 3 else visible[:, None, :]
    return scores.masked_fill(~shown, float("-inf"))


def _dropout(dtype: torch.dtype, extra: PairScores | None) -> torch.Tensor | float:
    """Dropout's factors of the weights [n, h, m], 0 or 1 / (1 - dropout_p); 1 without dropout."""
    factors = None if extra is None else extra.dropout(dtype)
    return 1.0 if factors is None else factors


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The weights exp(s - lse), 0 for hidden pairs. All pairs of a row with lse -inf are hidden."""
    return torch.exp(scores - lse[..., None]).masked_fill(scores == float("-inf"), 0.0)


# ---- scores that depend on more than q and k


def pair_scores(problem: Problem, inputs: ScoreTensors, tile: Sequence[int], device: torch.device) -> PairScores | None:
    """The inputs with the pairs of one tile, a row of `Tiles`; None if scores depend on q and k alone."""
    return PairScores(inputs, pair_indices(problem, tile, device)) if inputs.features else None


def pair_indices(problem: Problem, tile: Sequence[int], device: torch.device) -> ScorePlaces:
    """Sequence, head and slots of a tile's scores [n, h, m]. A tile lies in one area, and so in one sequence:
    `check_one_document` (`problems/read_problem`) refuses other areas where scores need places.

    >>> from cp_ref.schedules.problem import Sequence
    >>> p = Problem(2, (Sequence(3, 3, 4, 4), Sequence(4, 6, 4, 6)), qkv_format="thd", heads_q=4)
    >>> pairs = pair_indices(p, (1, 6, 8, 5, 8, 2, 4), torch.device("cpu"))  # q[6:8] k[5:8] h2:4
    >>> [x.flatten().tolist() for x in pairs]
    [[1], [2, 3], [2, 3], [1, 2, 3], [2]]
    """
    _, q_start, q_stop, k_start, k_stop, head_start, head_stop = tile
    sequence, q_slot = row_positions(problem, "q", np.array([q_start]))
    _, k_slot = row_positions(problem, "kv", np.array([k_start]))
    number, i, j = int(sequence[0]), int(q_slot[0]), int(k_slot[0])

    def integers(start: int, stop: int, *shape: int) -> torch.Tensor:
        return torch.arange(start, stop, dtype=torch.int32, device=device).view(*shape)

    shift = problem.lengths.len_kv[number] - problem.lengths.len_q[number]
    return ScorePlaces(
        sequence=integers(number, number + 1, 1, 1, 1),
        head=integers(head_start, head_stop, 1, -1, 1),
        q_idx=integers(i, i + q_stop - q_start, -1, 1, 1),
        kv_idx=integers(j, j + k_stop - k_start, 1, 1, -1),
        shift=integers(shift, shift + 1, 1, 1, 1),
    )
