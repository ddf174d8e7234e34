"""A diagonal band tile cut to what a kernel takes: no row and no column that sees nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch

from conformance.case import wide_dtype

__all__ = ["Crop", "crop", "out_of_nothing"]


class Crop(NamedTuple):
    """The rows and columns of a tile that see and are seen, and the same diagonal band in their coordinates."""

    rows: slice
    columns: slice
    left: int | None
    right: int | None


def crop(n: int, m: int, left: int | None, right: int | None) -> Crop | None:
    """The tile without rows that see no key and columns that no query sees; None where nothing is left.

    Row i sees column j iff i + (m - n) - left <= j <= i + (m - n) + right.

    >>> crop(4, 4, None, -2)          # row 2 sees column 0, row 3 sees columns 0 and 1
    Crop(rows=slice(2, 4, None), columns=slice(0, 2, None), left=None, right=0)
    >>> crop(2, 2, 5, -2), crop(0, 2, None, 0), crop(2, 0, 1, None)
    (None, None, None)
    """
    shift = m - n
    low = None if left is None else shift - left  # the first column is i + low
    high = None if right is None else shift + right
    if low is not None and high is not None and low > high:
        return None
    first = 0 if high is None else max(0, -high)
    stop = n if low is None else min(n, m - low)
    if stop <= first or not m:
        return None
    start = 0 if low is None else max(0, first + low)
    end = m if high is None else min(m, stop + high)
    moved = first - start
    rows, columns = stop - first, end - start
    inside = columns - rows  # the shift of the new tile
    return Crop(
        slice(first, stop),
        slice(start, end),
        None if low is None else inside - (low + moved),
        None if high is None else high + moved - inside,
    )


def out_of_nothing(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of rows that see nothing."""
    wide = wide_dtype(q.dtype)
    out = q.new_zeros(len(q), q.shape[1], v.shape[2])
    return out, q.new_full((q.shape[1], len(q)), -torch.inf, dtype=wide)
