"""The documents and positions of a launch's rows, for scores that depend on them."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["LaunchPositions"]


class LaunchPositions(NamedTuple):
    """A number for each row of a launch, in the order in which the launch reads its rows.

    Positions count the slots of a document from its first one. In a plan updated in place the tables are as long as the
    tensors, and 0 behind the last segment.
    """

    q_documents: torch.Tensor  # int32 [n]: the number of each query's document in the batch
    q_positions: torch.Tensor  # int32 [n]: its position inside the document
    q_diagonals: torch.Tensor  # int32 [n]: its position + len_kv - len_q: the key that it is aligned to
    k_positions: torch.Tensor  # int32 [m]: the position of each key inside its own document
