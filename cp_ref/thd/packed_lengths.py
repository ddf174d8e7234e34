"""Cumulative lengths of packed buffers, read and checked: all THD helpers begin with them.

A packed buffer concatenates its sequences, each with its padding, and may end with a tail of unused rows:

    cu_seqlens_padded = [0, 8, 12], 14 rows

    row         0 1 2 3 4 5 6 7 | 8 9 10 11 | 12 13
    sequence    0 0 0 0 0 0 0 0 | 1 1  1  1 |  tail

A helper computes from them which rows it reads or changes (a chunk of every sequence, its second half, its valid
tokens), with the index tables of `cp_ref.common.thd.row_tables`. It touches these rows and no others.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_ref.common.thd.checks import check_divisible
from cp_ref.spec.arguments.single_values import read_lengths

__all__ = ["end_of", "even_lengths_on", "lengths_on", "longest_of"]


def lengths_on(name: str, cu_seqlens: Any, device: torch.device) -> torch.Tensor:
    """Cumulative lengths, int32 or int64 [b + 1], as int64 on `device`, where the data lies.

    Raises:
        ValueError, TypeError: naming the argument, its value and the rule.

    >>> lengths_on("cu_seqlens", torch.tensor([0, 8, 8, 12], dtype=torch.int32), torch.device("cpu"))
    tensor([ 0,  8,  8, 12])
    """
    values = read_lengths(name, cu_seqlens)
    if values is None:
        raise ValueError(f"{name} is None; it must be an int32 or int64 tensor [b + 1]")
    if device.type == "meta":
        raise ValueError("the data is on meta; it must be on a device where tensors have values")
    return torch.tensor(values, dtype=torch.int64, device=device)


def even_lengths_on(cu_seqlens_padded: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The lengths of sequences that all have two halves. Those of the halves alone are these // 2."""
    lengths = lengths_on("cu_seqlens_padded", cu_seqlens_padded, device)
    check_divisible("cu_seqlens_padded", lengths.diff(), 2, "a half")
    return lengths


def end_of(lengths: torch.Tensor) -> int:
    """The row after the last sequence: where the tail begins."""
    return int(lengths[-1])


def longest_of(lengths: torch.Tensor) -> int:
    """The length of the longest sequence.

    >>> longest_of(torch.tensor([0, 8, 12])), longest_of(torch.tensor([0]))
    (8, 0)
    """
    return int(lengths.diff().max()) if len(lengths) > 1 else 0
