"""Which row goes where, as tensors of row numbers: the arithmetic of every helper, written with PyTorch's operators.

Nothing here waits for a GPU: sizes come from shapes, and every row finds its sequence by a search in the cumulative
lengths. The tail behind the last sequence is one more run of rows, number b.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

__all__ = ["Located", "bits", "half_rows", "locate", "rank_order_rows", "sequence_order_rows", "slice_rows"]


class Located(NamedTuple):
    """For every row: its sequence, and where that begins and ends. All int64 [n]."""

    seq: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor

    @property
    def size(self) -> torch.Tensor:
        """The length of the row's sequence."""
        return self.stop - self.start


def locate(rows: torch.Tensor, lengths: torch.Tensor, total: int) -> Located:
    """The sequences of some rows of a buffer of `total` rows; number b is the tail.

    >>> located = locate(torch.tensor([0, 7, 8, 13]), torch.tensor([0, 8, 8, 12]), 14)
    >>> located.seq.tolist(), located.start.tolist(), located.stop.tolist()
    ([0, 0, 2, 3], [0, 0, 8, 12], [8, 8, 12, 14])
    """
    bounds = functional.pad(lengths.long(), (0, 1), value=total)
    seq = (torch.searchsorted(bounds[:-1], rows, right=True) - 1).clamp_(min=0)
    return Located(seq, bounds[seq], bounds[seq + 1])


def slice_rows(
    local: torch.Tensor, rank: int | torch.Tensor, lengths: torch.Tensor, total: int, cp_size: int
) -> torch.Tensor:
    """The global rows of rows of ranks' slices, layout dual_chunk."""
    located = locate(local * cp_size, lengths, total)
    offset = local - located.start // cp_size
    chunk = located.size // (2 * cp_size)
    early = located.start + rank * chunk + offset
    late = located.start + (2 * cp_size - 2 - rank) * chunk + offset  # offset counts the early chunk too
    tail = located.start + rank * (located.size // cp_size) + offset
    return torch.where(located.seq == len(lengths) - 1, tail, torch.where(offset < chunk, early, late))


def rank_order_rows(lengths: torch.Tensor, total: int, cp_size: int) -> torch.Tensor:
    """The global row of every row of CP rank order, int64 [total].

    >>> rank_order_rows(torch.tensor([0, 8, 12]), 14, 2).tolist()
    [0, 1, 6, 7, 8, 11, 12, 2, 3, 4, 5, 9, 10, 13]
    """
    row, share = torch.arange(total, device=lengths.device), max(total // cp_size, 1)
    return slice_rows(row % share, row // share, lengths, total, cp_size)


def sequence_order_rows(lengths: torch.Tensor, total: int, cp_size: int) -> torch.Tensor:
    """The row in CP rank order of every global row, int64 [total].

    >>> sequence_order_rows(torch.tensor([0, 8, 12]), 14, 2).tolist()
    [0, 1, 7, 8, 9, 10, 2, 3, 4, 11, 12, 5, 6, 13]
    """
    row, share = torch.arange(total, device=lengths.device), total // cp_size
    located = locate(row, lengths, total)
    offset = row - located.start
    chunk = (located.size // (2 * cp_size)).clamp(min=1)
    number, part = offset // chunk, (located.size // cp_size).clamp(min=1)
    late = number >= cp_size
    rank = torch.where(late, 2 * cp_size - 1 - number, number)
    row_of_slice = located.start // cp_size
    own = rank * share + row_of_slice + late * chunk + offset % chunk
    tail = offset // part * share + row_of_slice + offset % part
    return torch.where(located.seq == len(lengths) - 1, tail, own)


def half_rows(lengths: torch.Tensor, total: int, half: int) -> tuple[torch.Tensor, Located]:
    """The rows of one half of every sequence, and of the tail: int64 [total / 2], and whose they are.

    >>> half_rows(torch.tensor([0, 8, 12]), 14, 1)[0].tolist()
    [4, 5, 6, 7, 10, 11, 13]
    """
    row = torch.arange(total // 2, device=lengths.device)
    located = locate(2 * row, lengths, total)
    return located.start + half * (located.size // 2) + row - located.start // 2, located


def bits(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes: not every operator that moves knows them."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.element_size() == 1 else x
