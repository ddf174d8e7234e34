"""Which columns of a segment a block of its rows sees: the band of `Segments`, cut into blocks.

With lq rows and lk columns, shift = lk - lq is what the bottom-right alignment adds to a row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

__all__ = ["Columns", "visible_columns"]


class Columns(NamedTuple):
    """A block of columns, and what of it the rows do not see."""

    start: int
    stop: int
    hidden: torch.Tensor | None  # bool [rows, stop - start], True where hidden; None where every row sees every column


def visible_columns(
    first: int, last: int, lq: int, lk: int, left: int | None, right: int | None, width: int
) -> list[Columns]:
    """The blocks of at most `width` columns that rows first:last of a segment see, none where they see nothing.

    >>> [(c.start, c.stop, c.hidden is None) for c in visible_columns(4, 6, 6, 6, 3, 0, 2)]
    [(1, 3, False), (3, 5, True), (5, 6, False)]
    """
    shift = lk - lq
    start = 0 if left is None else max(0, first + shift - left)
    stop = lk if right is None else min(lk, last + shift + right)
    blocks: list[Columns] = []
    for a in range(start, stop, width):
        b = min(a + width, stop)
        cut_right = right is not None and b - 1 > first + shift + right
        cut_left = left is not None and a < last - 1 + shift - left
        hidden = _hidden(last - first, b - a, first + shift - a, left, right) if cut_left or cut_right else None
        blocks.append(Columns(a, b, hidden))
    return blocks


@lru_cache(maxsize=16)  # blocks along a diagonal share their mask, and so do all heads
def _hidden(rows: int, columns: int, offset: int, left: int | None, right: int | None) -> torch.Tensor:
    """Bool [rows, columns], True where column j lies outside [i + offset - left, i + offset + right]."""
    with torch.inference_mode(False):  # it outlives the call that made it
        distance = torch.arange(columns, device="cpu")[None, :] - (torch.arange(rows, device="cpu")[:, None] + offset)
        if left is None:
            return distance > (0 if right is None else right)
        return distance < -left if right is None else (distance < -left) | (distance > right)
