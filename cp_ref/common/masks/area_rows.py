"""The rows of a table of attention slices, and readers of makers' arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from cp_ref.spec import AttentionSliceRow, check_data, read_count

__all__ = ["FULL", "Lengths", "causal", "listed", "numbers", "tensor", "upper"]

FULL = (-1, -1)  # a window that hides nothing
MOST_ROWS = 2**18  # of a mask: planning takes 15 s for each 100,000 of them
Lengths = torch.Tensor | Sequence[int]


def causal(start: int, stop: int) -> AttentionSliceRow:
    """Rows that see each other up to themselves."""
    return (start, stop, start, stop, -1, 0)


def upper(start: int, stop: int) -> AttentionSliceRow:
    """The attention slice that makes a causal square dense: for each row, the keys after it.

    >>> tensor([causal(0, 3), upper(0, 3)]).tolist()
    [[0, 3, 0, 3, -1, 0], [0, 2, 1, 3, 0, -1]]
    """
    return (start, stop - 1, start + 1, stop, 0, -1)


def tensor(rows: Iterable[AttentionSliceRow]) -> torch.Tensor:
    """The attention slices, int64 [n, 6], without those that have no row or no column.

    Raises:
        ValueError: there are more than `MOST_ROWS` rows, empty ones counted. No more are computed.
    """
    some = list(islice(rows, MOST_ROWS + 1))
    if len(some) > MOST_ROWS:
        raise ValueError(f"the arguments make areas of more than {MOST_ROWS} rows, the most that a mask can have")
    kept = [row for row in some if row[0] < row[1] and row[2] < row[3]]
    return torch.tensor(kept, dtype=torch.int64, device="cpu").reshape(-1, 6)


def listed(x: Any) -> Any:
    """A tensor as lists; anything else unchanged."""
    return x.tolist() if hasattr(x, "tolist") else x


def numbers(name: str, values: Any, at_least: int = 0) -> list[int]:
    """Integers from a list, a tuple or a tensor of one axis.

    Raises:
        TypeError, ValueError: naming the first that is wrong.
    """
    if isinstance(values, torch.Tensor):
        check_data(name, values)
    if not isinstance(values, list | tuple) and getattr(values, "ndim", 0) != 1:
        raise TypeError(f"{name} is {values!r}; it must be a list of integers, or a tensor")
    found: Sequence[Any] = listed(values)
    return [read_count(f"{name}[{n}]", value, at_least=at_least) for n, value in enumerate(found)]
