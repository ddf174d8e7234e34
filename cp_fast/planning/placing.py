"""From tiles on token axes to launches on rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cp_fast.planning.batch import Batch
from cp_fast.planning.blocks import Block
from cp_fast.planning.columns import Array, Slot
from cp_fast.planning.drafts import DraftLaunch, draft_launch
from cp_fast.planning.tables import Tables
from cp_fast.planning.tiles import Placed

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
    batch: Batch, tables: Tables, placed: Sequence[Placed], q_anchor: Array, block: Block, grads: Block
) -> list[DraftLaunch]:
    """Tiles on token axes to launches on rows: key rows of the block in hand, and of the buffer of its gradients."""
    found: list[DraftLaunch] = []
    same = block is grads or _same_rows(batch, block, grads)
    for window, slots in placed:
        of_grads = None if same else _anchors(slots, grads)
        tiles = batch.loops.tiles(slots, q_anchor, _anchors(slots, block), of_grads)
        if tiles.q.total:
            found.append(draft_launch(tables, window, tiles))
    return found


def _same_rows(batch: Batch, block: Block, grads: Block) -> bool:
    """Whether both have every token in the same row."""
    return block.size == grads.size and all(map(batch.loops.same, block.anchors, grads.anchors))


def _anchors(slots: list[Slot], block: Block) -> list[Array]:
    return [block.anchors[min(s.piece, len(block.anchors) - 1)] for s in slots]
