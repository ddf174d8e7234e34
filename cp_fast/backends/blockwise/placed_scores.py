"""The places of a block of scores: its documents, heads and positions, for ALiBi, score_mod and dropout."""

from __future__ import annotations

import torch

from cp_fast.backends.blockwise.score_blocks import ScoreBlock, size_of
from cp_fast.backends.launch_scores import LaunchScores
from cp_ref.common.scores.pair_scores import Pairs, PairScores

__all__ = ["dropped", "modify", "placed_scores", "pulled_back"]


def placed_scores(launch: LaunchScores | None, block: ScoreBlock, columns: slice) -> PairScores | None:
    """The inputs of a block's scores [H * g, R, C] with their places; None if scores depend on q and k alone."""
    if launch is None:
        return None
    at, rows = launch.positions, block.rows
    heads = range(launch.first_head + block.heads_q.start, launch.first_head + block.heads_q.stop)
    device = at.k_positions.device
    head = torch.arange(heads.start, heads.stop, dtype=torch.int32, device=device)[:, None, None]
    document, position, diagonal = (x[rows][:, None] for x in (at.q_documents, at.q_positions, at.q_diagonals))
    pairs = Pairs(document, head, position, at.k_positions[columns], diagonal - position)
    return PairScores(launch.inputs, pairs)


def modify(s: torch.Tensor, placed: PairScores | None, block: ScoreBlock) -> torch.Tensor | None:
    """ALiBi and score_mod on the scores of a block [H, g * R, C], in place. Returns what `pulled_back` needs."""
    if placed is None:
        return None
    by_head = s.view(-1, size_of(block.rows), s.shape[2])
    before = None if placed.inputs.score_mod is None else by_head.clone()
    changed = placed.modified(by_head)
    if changed is not by_head:
        by_head.copy_(changed)
    return before


def pulled_back(
    before: torch.Tensor | None, ds: torch.Tensor, placed: PairScores | None, p: torch.Tensor
) -> torch.Tensor:
    """The gradient ds [H, g * R, C] of modified scores -> that of the scores before them. p: probabilities."""
    if before is None or placed is None:
        return ds
    found = placed.pulled_back(before, ds.view(before.shape))
    return found.reshape(ds.shape).masked_fill(p == 0, 0)  # Where a pair is hidden a function may have no derivative.


def dropped(p: torch.Tensor, placed: PairScores | None, block: ScoreBlock) -> torch.Tensor | None:
    """The factors of dropout for probabilities [H, g * R, C], 0 or 1 / (1 - dropout_p); None without dropout."""
    factors = None if placed is None else placed.dropout(p.dtype)
    return None if factors is None else factors.expand(-1, size_of(block.rows), p.shape[2]).reshape(p.shape)
