"""Rows of packed buffers: all THD helpers build on this.

A packed buffer concatenates its sequences, each with its padding, and may end with a tail of unused rows:

    cu_seqlens_padded = [0, 8, 12], 14 rows

    row         0 1 2 3 4 5 6 7 | 8 9 10 11 | 12 13
    sequence    0 0 0 0 0 0 0 0 | 1 1  1  1 |  tail

A helper names one run of consecutive rows in every sequence (a chunk, its second half, its valid tokens), and reads or
changes these rows and no others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cp_ref.common.thd.checks import check_divisible
from cp_ref.spec.arguments.single_values import read_lengths

__all__ = ["Runs", "as_list", "check_leaf", "read_halves", "read_runs"]


class Runs(NamedTuple):
    """One run of consecutive rows in every sequence: rows starts[s] to starts[s] + sizes[s] - 1 of sequence s."""

    starts: torch.Tensor  # int64 [b]
    sizes: torch.Tensor  # int64 [b]

    def rows(self) -> torch.Tensor:
        """The rows of all runs, run after run, int64 [n].

        >>> Runs(torch.tensor([0, 8]), torch.tensor([3, 2])).rows().tolist()
        [0, 1, 2, 8, 9]
        """
        rows_before = self.sizes.cumsum(0) - self.sizes  # of the runs before this one
        shift = torch.repeat_interleave(self.starts - rows_before, self.sizes)
        return shift + torch.arange(len(shift), device=shift.device)

    def end(self) -> int:
        """The row after the last run: where the tail begins."""
        return int(self.starts[-1] + self.sizes[-1]) if len(self.sizes) else 0

    def longest(self) -> int:
        """The size of the longest run."""
        return int(self.sizes.max()) if len(self.sizes) else 0

    def halved(self) -> Runs:
        """The same sequences in a buffer that has only one half of each."""
        return Runs(self.starts // 2, self.sizes // 2)

    def half(self, number: int) -> Runs:
        """The first (0) or second (1) half of every run.

        >>> Runs(torch.tensor([0, 8]), torch.tensor([8, 4])).half(1).rows().tolist()
        [4, 5, 6, 7, 10, 11]
        """
        return Runs(self.starts + number * (self.sizes // 2), self.sizes // 2)


def read_runs(name: str, cu_seqlens: Any, device: torch.device) -> Runs:
    """Cumulative lengths, int32 or int64 [b + 1], as one run a sequence of data on `device`.

    Raises:
        ValueError, TypeError: naming the argument, its value and the rule.

    >>> read_runs("cu_seqlens", torch.tensor([0, 8, 8, 12]), torch.device("cpu")).sizes.tolist()
    [8, 0, 4]
    """
    values = read_lengths(name, cu_seqlens)
    if values is None:
        raise ValueError(f"{name} is None; it must be an int32 or int64 tensor [b + 1]")
    if device.type == "meta":
        raise ValueError("the data is on meta; it must be on a device where tensors have values")
    cumulative = torch.tensor(values, dtype=torch.int64, device=device)
    return Runs(cumulative[:-1], cumulative.diff())


def as_list(x: Any) -> list[int]:
    """An integer tensor [n] as a list; torch leaves the type of `tolist` open.

    >>> as_list(torch.tensor([8, 4]))
    [8, 4]
    """
    return x.tolist()


def read_halves(cu_seqlens_padded: torch.Tensor, device: torch.device) -> Runs:
    """The sequences of `cu_seqlens_padded`, which all have two halves."""
    sequences = read_runs("cu_seqlens_padded", cu_seqlens_padded, device)
    check_divisible("cu_seqlens_padded", sequences.sizes, 2, "a half")
    return sequences


def check_leaf(name: str, x: torch.Tensor) -> None:
    """Raise where autograd does not let x be changed in place."""
    if torch.is_grad_enabled() and x.requires_grad and x.is_leaf:
        raise ValueError(f"{name} requires grad and is a leaf; it is changed in place, so do it under torch.no_grad()")
