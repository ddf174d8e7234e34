"""From tiles on token axes to launches on rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cp_fast.planning.batch import Array, by_sequence
from cp_fast.planning.blocks import Block
from cp_fast.planning.drafts import DraftLaunch, draft_launch
from cp_fast.planning.tables import Tables
from cp_fast.planning.tiles import Placed, Slot

__all__ = ["Place", "place_launches"]


class Place(NamedTuple):
    """Where a rank stands: its unit, the rank of its ring in another unit, the number of its first step, and where the
    rows of its unit lie: `q_anchor` of the queries, and the block of its own keys.
    """

    unit: int
    rank_of: Callable[[int], int]
    first_step: int
    q_anchor: Array
    own: Block


def place_launches(
    tables: Tables, placed: Sequence[Placed], q_anchor: Array, block: Block, grads: Block
) -> list[DraftLaunch]:
    """Tiles on token axes to launches on rows: key rows of the block in hand, and of the buffer of its gradients."""
    found: list[DraftLaunch] = []
    for window, slots in placed:
        q = by_sequence([s.q + q_anchor for s in slots])
        rows = by_sequence([s.rows for s in slots])
        columns = by_sequence([s.columns for s in slots])
        k, grad = _key_rows(slots, block), None if _same_rows(block, grads) else _key_rows(slots, grads)
        if not rows.all():
            there = np.flatnonzero(rows > 0)
            q, rows, columns, k = (x.take(there) for x in (q, rows, columns, k))
            grad = grad if grad is None else grad.take(there)
        found.append(
            draft_launch(tables, window, (q, rows), (k, columns), None if grad is None else (grad, columns), columns)
        )
    return found


def _same_rows(block: Block, grads: Block) -> bool:
    """Whether both have every token in the same row."""
    if block is grads:
        return True
    return block.size == grads.size and all(map(np.array_equal, block.anchors, grads.anchors))


def _key_rows(slots: list[Slot], block: Block) -> Array:
    return by_sequence([s.k + block.anchors[min(s.piece, len(block.anchors) - 1)] for s in slots])
