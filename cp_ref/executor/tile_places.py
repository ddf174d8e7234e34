"""Where the pairs of a tile are: their document, heads and positions, for scores that depend on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cp_ref.contract.score_inputs import ScoreInputs
from cp_ref.contract.scores import Pairs, PairScores
from cp_ref.schedules.problem import Problem, row_positions

__all__ = ["pair_scores", "tile_places"]


def pair_scores(problem: Problem, inputs: ScoreInputs, tile: Sequence[int], device: torch.device) -> PairScores | None:
    """The inputs with the pairs of one tile, a row of `Tiles`; None if scores depend on q and k alone."""
    return PairScores(inputs, tile_places(problem, tile, device)) if inputs.features else None


def tile_places(problem: Problem, tile: Sequence[int], device: torch.device) -> Pairs:
    """The places of a tile's scores [n, h, m]. A tile lies in one attention slice, and so in one document.

    >>> from cp_ref.schedules.problem import Sequence
    >>> p = Problem(2, (Sequence(3, 3, 4, 4), Sequence(4, 6, 4, 6)), qkv_format="thd", heads_q=4)
    >>> pairs = tile_places(p, (1, 6, 8, 5, 8, 2, 4), torch.device("cpu"))  # q[6:8] k[5:8] h2:4
    >>> [x.flatten().tolist() for x in pairs]
    [[1], [2, 3], [2, 3], [1, 2, 3], [2]]
    """
    _, q_start, q_stop, k_start, k_stop, head_start, head_stop = tile
    document, q_slot = row_positions(problem, "q", np.array([q_start]))
    _, k_slot = row_positions(problem, "kv", np.array([k_start]))
    number, i, j = int(document[0]), int(q_slot[0]), int(k_slot[0])

    def integers(start: int, stop: int, *shape: int) -> torch.Tensor:
        return torch.arange(start, stop, dtype=torch.int32, device=device).view(*shape)

    shift = problem.lengths.len_kv[number] - problem.lengths.len_q[number]
    return Pairs(
        document=integers(number, number + 1, 1, 1, 1),
        head=integers(head_start, head_stop, 1, -1, 1),
        q_idx=integers(i, i + q_stop - q_start, -1, 1, 1),
        kv_idx=integers(j, j + k_stop - k_start, 1, 1, -1),
        shift=integers(shift, shift + 1, 1, 1, 1),
    )
