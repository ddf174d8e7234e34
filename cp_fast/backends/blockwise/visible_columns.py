"""Which columns of a segment a block of its rows sees: the diagonal band of `VarlenBatch`, cut into blocks.

With lq rows and lk columns, shift = lk - lq is what the bottom-right alignment adds to a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

__all__ = ["ColumnBlock", "MaskCache", "mask_cache", "visible_columns"]

MaskCache = Callable[[int, int, int, int | None, int | None], torch.Tensor]
"""(rows, columns, offset, left, right) -> bool [rows, columns], True where hidden."""


class ColumnBlock(NamedTuple):
    """A block of columns, and what of it the rows do not see."""

    start: int
    stop: int
    hidden: torch.Tensor | None  # bool [rows, stop - start], True where hidden; None where every row sees every column


def visible_columns(
    first: int, last: int, lq: int, lk: int, left: int | None, right: int | None, width: int, masks: MaskCache
) -> list[ColumnBlock]:
    """The blocks of at most `width` columns that rows first:last of a segment see, none where they see nothing.

    >>> [(c.start, c.stop, c.hidden is None) for c in visible_columns(4, 6, 6, 6, 3, 0, 2, mask_cache("cpu"))]
    [(1, 3, False), (3, 5, True), (5, 6, False)]
    """
    shift = lk - lq
    start = 0 if left is None else max(0, first + shift - left)
    stop = lk if right is None else min(lk, last + shift + right)
    blocks: list[ColumnBlock] = []
    for a in range(start, stop, width):
        b = min(a + width, stop)
        cut_right = right is not None and b - 1 > first + shift + right
        cut_left = left is not None and a < last - 1 + shift - left
        hidden = masks(last - first, b - a, first + shift - a, left, right) if cut_left or cut_right else None
        blocks.append(ColumnBlock(a, b, hidden))
    return blocks


def mask_cache(device: torch.device | str) -> MaskCache:
    """MaskCache on a device, the last few of them kept: blocks along a diagonal share theirs, and so do all heads.

    For one launch: on a GPU a mask kept for longer would have to be known to every stream, and to outlive a capture.

    >>> mask_cache("cpu")(2, 3, 0, None, 0)
    tensor([[False,  True,  True],
            [False, False,  True]])
    """

    @lru_cache(maxsize=16)
    def hidden(rows: int, columns: int, offset: int, left: int | None, right: int | None) -> torch.Tensor:
        distance = torch.arange(columns, device=device)[None, :] - (torch.arange(rows, device=device)[:, None] + offset)
        if left is None:
            return distance > (0 if right is None else right)
        return distance < -left if right is None else (distance < -left) | (distance > right)

    return hidden
