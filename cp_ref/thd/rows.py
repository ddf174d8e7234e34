"""Rows of packed buffers: the one idea that every THD helper is made of.

A packed buffer has its sequences one behind the other, each with its padding, and perhaps a tail of unused rows:

    cu_seqlens_padded = [0, 8, 12], 14 rows

    row         0 1 2 3 4 5 6 7 | 8 9 10 11 | 12 13
    sequence    0 0 0 0 0 0 0 0 | 1 1  1  1 |  tail

A helper names one run of consecutive rows in every sequence (a chunk, its second half, its valid tokens), and reads or
changes these rows and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch

from cp_ref.spec.values import check_data, check_flag, read_lengths

__all__ = [
    "FLOATS",
    "MOST_ROWS",
    "Runs",
    "Tensors",
    "as_list",
    "check_count",
    "check_divisible",
    "check_flag",
    "check_tensor",
    "check_written",
    "each",
    "read_runs",
    "token_axis",
]

MOST = 2**31 - 1
MOST_ROWS = 2**48 - 1  # more than any memory has
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Tensors = TypeVar("Tensors", torch.Tensor, tuple[torch.Tensor, ...])


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
        """The row behind the last run: where the tail begins."""
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
    """Cumulative lengths, int32 or int64 [b + 1], as one run a sequence.

    Raises:
        ValueError, TypeError: naming the argument, its value and the rule.

    >>> read_runs("cu_seqlens", torch.tensor([0, 8, 8, 12]), torch.device("cpu")).sizes.tolist()
    [8, 0, 4]
    """
    values = read_lengths(name, cu_seqlens)
    if values is None:
        raise ValueError(f"{name} is None; it must be an int32 or int64 tensor [b + 1]")
    cumulative = torch.tensor(values, dtype=torch.int64, device=device)
    return Runs(cumulative[:-1], cumulative.diff())


def as_list(x: Any) -> list[int]:
    """An integer tensor [n] as a list; torch leaves the type of `tolist` open.

    >>> as_list(torch.tensor([8, 4]))
    [8, 4]
    """
    return x.tolist()


def check_divisible(name: str, sequences: Runs, divisor: int, why: str) -> None:
    """Raise unless every sequence's length divides."""
    for number, length in enumerate(as_list(sequences.sizes)):
        if length % divisor:
            raise ValueError(
                f"{name} gives sequence {number} the length {length}, padding included, but {why} needs a multiple of "
                f"{divisor}"
            )


def token_axis(name: str, x: Any) -> int:
    """The token axis: 0 of [t, ...], and 1 of [2, t, h, d], K and V (or their gradients) in one tensor.

    >>> token_axis("x", torch.empty(8, 4, 16)), token_axis("x", torch.empty(2, 8, 4, 16))
    (0, 1)
    """
    check_tensor(name, x)
    if x.ndim in (1, 2, 3):
        return 0
    if x.ndim == 4 and x.shape[0] == 2:
        return 1
    raise ValueError(f"{name} has shape {list(x.shape)}; it must be [t], [t, d], [t, h, d] or [2, t, h, d]")


def each(x: Tensors, move: Callable[[torch.Tensor], torch.Tensor], kv_axis: bool = False) -> Tensors:
    """A helper's result for a tensor, or for each of a tuple (K and V), which have the same tokens.

    >>> each((torch.tensor([1, 2]), torch.tensor([3, 4])), lambda x: x.flip(0))
    (tensor([2, 1]), tensor([4, 3]))
    """
    if not isinstance(x, tuple):
        check_tensor("x", x)
        return move(x)
    for number, one in enumerate(x):
        check_tensor(f"x[{number}]", one)
    if any(one.ndim == 0 for one in x) or len({_tokens(one, kv_axis) for one in x}) != 1:
        shapes = [list(one.shape) for one in x]
        raise ValueError(f"x has shapes {shapes}; the tensors of a tuple must have the same axis of the same tokens")
    return cast("Tensors", tuple(move(one) for one in x))


def _tokens(x: torch.Tensor, kv_axis: bool) -> tuple[int, int]:
    axis = 1 if kv_axis and x.ndim == 4 else 0
    return axis, x.shape[axis]


def check_tensor(name: str, x: Any, *, floats_only: bool = False) -> None:
    """Raise unless x is a tensor; of an ordinary floating-point dtype, where it takes part in arithmetic."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor")
    check_data(name, x)
    if floats_only and x.dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be float16, bfloat16, float32 or float64")


def check_written(name: str, x: torch.Tensor) -> None:
    """Raise where x cannot be changed in place: elements share memory, or it is a leaf that autograd tracks."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(
            f"{name} has shape {list(x.shape)} and strides {list(x.stride())}; it is written, so no stride may be 0"
        )
    if torch.is_grad_enabled() and x.requires_grad and x.is_leaf:
        raise ValueError(f"{name} requires grad and is a leaf; it is changed in place, so do it under torch.no_grad()")


def check_count(name: str, value: Any, at_least: int, below: int | None = None, at_most: int = MOST) -> None:
    """Raise unless `value` is an integer, at_least <= value < below (or <= at_most)."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be an integer")
    if value < at_least or (below is not None and value >= below):
        rule = f"at least {at_least}" if below is None else f"from {at_least} to {below - 1}"
        raise ValueError(f"{name} is {value}; it must be {rule}")
    if value > at_most:
        raise ValueError(f"{name} is {value}; it must be at most {at_most}")
