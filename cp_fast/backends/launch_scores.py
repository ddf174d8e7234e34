"""The places of a launch's rows and heads, for ALiBi, score_mod and dropout."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_ref.common.scores.score_inputs import ScoreInputs

__all__ = ["LaunchPositions", "LaunchScores"]


class LaunchPositions(NamedTuple):
    """A number for each row of a launch, in the order in which the launch reads its rows.

    Positions count the slots of a document from its first one. All rows of a segment are of one document. In a plan
    updated in place the tables are as long as the tensors, and 0 behind the last segment.

    Most launches have consecutive positions in each segment. They have a shorter table too, of which a kernel may make
    use: `segment_places`. `aligned`: whether it is there, and all its positions are multiples of 16.
    """

    q_documents: torch.Tensor  # int32 [n]: the number of each query's document in the batch.
    q_positions: torch.Tensor  # int32 [n]: its position inside the document.
    q_diagonals: torch.Tensor  # int32 [n]: its position + len_kv - len_q: the key that it is aligned to.
    k_positions: torch.Tensor  # int32 [m]: the position of each key.
    segment_places: torch.Tensor | None = None  # int32 [4, segments]: document, first q position, diagonal, k position.
    aligned: bool = False


class LaunchScores(NamedTuple):
    """The inputs of a call's scores, and where the rows and heads of one launch are."""

    positions: LaunchPositions
    first_head: int  # The number of the launch's first query head, of all query heads.
    inputs: ScoreInputs  # Of the call: slopes of all heads.
