"""The rows that a helper's definition reads and writes, sequence by sequence.

rows of a buffer     cu_seqlens_padded = [0, 8, 12], 14 rows: sequence 0 has rows 0-7, sequence 1 rows 8-11, the
                     tail rows 12-13
chunk c of a sequence of n rows at cp_size p      rows c * n / (2p) up to (c + 1) * n / (2p)
rank r of layout dual_chunk      chunks r and 2p - 1 - r of every sequence, then part r of the tail; for p 1, all rows
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["by_head", "half_rows", "lse_index", "rank_rows", "row_index"]


def rank_rows(lengths: list[int], tokens: int, cp_size: int, rank: int) -> list[int]:
    """The global rows of one rank's slice, layout dual_chunk.

    >>> rank_rows([0, 8, 12], 14, 2, 1)
    [2, 3, 4, 5, 9, 10, 13]
    """
    if cp_size == 1:
        return list(range(tokens))
    rows: list[int] = []
    for start, stop in pairwise(lengths):
        chunk = (stop - start) // (2 * cp_size)
        for number in (rank, 2 * cp_size - 1 - rank):
            rows += range(start + number * chunk, start + (number + 1) * chunk)
    part = (tokens - lengths[-1]) // cp_size
    return rows + list(range(lengths[-1] + rank * part, lengths[-1] + (rank + 1) * part))


def row_index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def half_rows(lengths: Tensor, half: int) -> tuple[list[int], list[int]]:
    """The rows of one half of every sequence, and the same rows in a buffer of halves alone."""
    rows, rows_of_half = [], []
    for start, stop in pairwise(lengths.tolist()):
        size = (stop - start) // 2
        rows += range(start + half * size, start + (half + 1) * size)
        rows_of_half += range(start // 2, start // 2 + size)
    return rows, rows_of_half


def lse_index(lse: Tensor, lengths: Tensor, lse_packed: bool, part: str) -> tuple[Tensor, ...]:
    """Where an LSE [h, t], or [b, h, s] seen as [h, b, s], holds some rows of every sequence.

    part: "second": the second half, in an LSE of whole sequences; "halves": all of an LSE of halves; "whole": all.
    """
    sequences, positions, rows = [], [], []
    for number, (start, stop) in enumerate(pairwise(lengths.tolist())):
        size = stop - start if part == "whole" else (stop - start) // 2
        first = size if part == "second" else 0
        begin = start // 2 if part == "halves" else start
        sequences += [number] * size
        positions += range(first, first + size)
        rows += range(begin + first, begin + first + size)
    return (row_index(rows, lse),) if lse_packed else (row_index(sequences, lse), row_index(positions, lse))


def by_head(lse: Tensor, lse_packed: bool) -> Tensor:
    """A view [h, t] or [h, b, s]."""
    return lse if lse_packed else lse.transpose(0, 1)
