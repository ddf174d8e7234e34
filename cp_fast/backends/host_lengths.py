"""Cumulative lengths of a launch on the host: a tuple in use, stored as the array that planning made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import overload

import numpy as np

__all__ = ["Cumulative", "longest"]


class Cumulative(Sequence[int]):
    """Cumulative lengths [n + 1]. The Python numbers are made when a backend first needs all of them. Most never do,
    and a plan has hundreds of launches of thousands of sequences.

    `bound`: the upper bound of all lengths, if they will be replaced by others; it then counts as the longest.

    >>> cu = Cumulative(np.array([0, 3, 5]))
    >>> cu == (0, 3, 5), cu[-1], cu[0:2], len(cu), cu.longest, Cumulative(np.array([0, 3, 5]), bound=8).longest
    (True, 5, (0, 3), 3, 3, 8)
    """

    def __init__(self, values: np.ndarray, bound: int | None = None) -> None:
        self.values = values
        self.bound = bound

    @cached_property
    def longest(self) -> int:
        """The largest difference of neighbours, 0 without any; or the bound."""
        return int(np.diff(self.values).max(initial=0)) if self.bound is None else self.bound

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        return tuple(self.values.tolist())

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self.values[index].tolist()) if isinstance(index, slice) else int(self.values[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __eq__(self, other: object) -> bool:
        return self._numbers == (other._numbers if isinstance(other, Cumulative) else other)

    def __hash__(self) -> int:
        return hash(self._numbers)  # equal to a tuple, so its hash too

    def __repr__(self) -> str:
        return repr(self._numbers)


def longest(cumulative: Sequence[int]) -> int:
    """The longest of the lengths.

    >>> longest((0, 3, 5))
    3
    """
    if isinstance(cumulative, Cumulative):
        return cumulative.longest
    return max((b - a for a, b in pairwise(cumulative)), default=0)
