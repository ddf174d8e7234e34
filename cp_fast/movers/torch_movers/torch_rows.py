"""A row map as tensors of row numbers, for PyTorch's operators: which row of a packed buffer each row of a part is, by
arithmetic on cumulative lengths.

Native and Numba kernels compute the same rows on the fly, with a search in the lengths for every block; `cp_ref.thd`
lists them in loops over the sequences, and shares nothing with this file. Nothing here waits for a GPU: sizes come from
shapes, and every row finds its sequence by a search in the cumulative lengths. The tail behind the last sequence is one
more run of rows, number b.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from cp_fast.movers.lengths_map import LengthsMap
from cp_fast.movers.rows import Rows
from cp_fast.movers.torch_movers.torch_asserts import assert_lengths, assert_real_lengths

__all__ = [
    "Located",
    "Place",
    "Targets",
    "locate",
    "rank_lengths",
    "rank_order_rows",
    "sequence_order_rows",
    "table_of",
    "targets_of",
]


class Place(NamedTuple):
    """A row's place in its sequence, for an LSE [b, h, s]: int64 [n]."""

    sequence: torch.Tensor
    in_whole: torch.Tensor
    in_part: torch.Tensor


class Targets(NamedTuple):
    """Rows of a part, and the rows of the whole that they go to, which are distinct. On a GPU nobody waits for the
    number of rows that have a target: the others are masked, and written with what they hold.
    """

    part: Rows
    whole: Rows
    valid: torch.Tensor | None = None  # bool [n]; None for all
    place: Place | None = None


def table_of(rows: LengthsMap, tokens: int) -> torch.Tensor:
    """The row of every row of the part, int64 [n]; -1 for none."""
    lengths, count = rows.lengths, rows.count(tokens)
    divisor, tail_divisor = rows.divisors()
    assert_lengths(rows.helper, lengths, divisor, count if rows.kind == "unpad" else tokens, tail_divisor)
    if rows.kind == "slice":
        return slice_rows(torch.arange(count, device=lengths.device), rows.b, lengths, tokens, rows.a)
    if rows.kind == "rank_order":
        return rank_order_rows(lengths, tokens, rows.a)
    if rows.kind == "sequence_order":
        return sequence_order_rows(lengths, tokens, rows.a)
    if rows.kind == "half":
        return half_rows(lengths, tokens, rows.a)[0]
    assert rows.kind == "unpad"
    assert rows.real is not None
    assert_lengths(rows.helper, rows.real, 1, tokens)
    assert_real_lengths(rows.helper, rows.real, lengths)
    return unpadded_rows(lengths, rows.real, tokens, count)


def targets_of(rows: Rows | LengthsMap, tokens: int) -> Targets:
    """Where a scatter or a merge writes."""
    if not isinstance(rows, LengthsMap):
        return Targets(slice(None), rows)
    lengths = rows.lengths
    assert_lengths(rows.helper, lengths, rows.divisors()[0], tokens, from_zero=rows.kind != "valid")
    part = torch.arange(rows.count(tokens), device=lengths.device)
    if rows.kind == "half":
        whole, located = half_rows(lengths, tokens, rows.a)
        valid, part_start = located.seq < len(lengths) - 1, located.start // 2
    elif rows.kind == "in_half":
        whole, located = part, locate(part, lengths, tokens)
        valid, part_start = in_half(lengths, tokens, rows.a), located.start
    else:
        assert rows.real is not None
        assert_real_lengths(rows.helper, rows.real, lengths)
        valid, located = is_valid(lengths, rows.real, tokens)
        whole, part_start = part, located.start
    place = Place(located.seq, whole - located.start, part - part_start)
    if lengths.device.type != "cpu":
        return Targets(slice(None), whole, valid, place)
    return Targets(part[valid], whole[valid], None, Place(*(x[valid] for x in place)))


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
    """The global rows of rows of ranks' slices, layout dual_chunk.

    >>> slice_rows(torch.arange(7), 0, torch.tensor([0, 8, 12]), 14, 2).tolist()  # two chunks of each, and a tail
    [0, 1, 6, 7, 8, 11, 12]
    """
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
    """The rows of one half of every sequence, and of the tail: int64 [total / 2], and where their sequences lie.

    >>> half_rows(torch.tensor([0, 8, 12]), 14, 1)[0].tolist()
    [4, 5, 6, 7, 10, 11, 13]
    """
    row = torch.arange(total // 2, device=lengths.device)
    located = locate(2 * row, lengths, total)
    return located.start + half * (located.size // 2) + row - located.start // 2, located


def in_half(lengths: torch.Tensor, total: int, half: int) -> torch.Tensor:
    """Whether a row lies in this half of its sequence: bool [total], False in the tail.

    >>> in_half(torch.tensor([0, 4, 6]), 7, 1).int().tolist()
    [0, 0, 1, 1, 0, 1, 0]
    """
    row = torch.arange(total, device=lengths.device)
    located = locate(row, lengths, total)
    late = row - located.start >= located.size // 2
    return (late if half else ~late) & (located.seq < len(lengths) - 1)


def is_valid(lengths: torch.Tensor, real_lengths: torch.Tensor, total: int) -> tuple[torch.Tensor, Located]:
    """Whether a row is one of its sequence's first, real rows: bool [total], False in the tail; and its sequence.

    >>> is_valid(torch.tensor([1, 4, 6]), torch.tensor([0, 2, 3]), 7)[0].int().tolist()
    [0, 1, 1, 0, 1, 0, 0]
    """
    row = torch.arange(total, device=lengths.device)
    located = locate(row, lengths, total)
    offset = row - located.start
    real = functional.pad(real_lengths.long().diff(), (0, 1))  # The tail has none.
    return (offset >= 0) & (offset < real[located.seq]), located


def unpadded_rows(lengths: torch.Tensor, real_lengths: torch.Tensor, total: int, padded: int) -> torch.Tensor:
    """The row without padding of every row of a padded buffer of `padded` rows, int64; -1 for padding. The tail follows
    the last sequence in both, where `total` rows end without padding.

    >>> unpadded_rows(torch.tensor([0, 4, 6]), torch.tensor([0, 3, 4]), 5, 8).tolist()
    [0, 1, 2, -1, 3, -1, 4, -1]
    """
    row = torch.arange(padded, device=lengths.device)
    located = locate(row, lengths, padded)
    bounds = functional.pad(real_lengths.long(), (0, 1), value=total)
    source = bounds[located.seq] + row - located.start
    return torch.where(source < bounds[located.seq + 1], source, -1)


def rank_lengths(
    real_lengths: torch.Tensor, lengths: torch.Tensor, cp_size: int, cp_rank: int, first_half: bool, second_half: bool
) -> torch.Tensor:
    """Cumulative numbers of real rows in a rank's early and/or late chunks, [b + 1] of real_lengths' dtype.

    >>> rank_lengths(torch.tensor([0, 5]), torch.tensor([0, 8]), 2, 1, True, True).tolist()
    [0, 3]
    """
    real, chunk = real_lengths.long().diff(), lengths.long().diff() // (2 * cp_size)
    held = torch.zeros_like(real_lengths, dtype=torch.int64)
    for number, counted in ((cp_rank, first_half), (2 * cp_size - 1 - cp_rank, second_half)):
        if counted:
            held[1:] += torch.minimum((real - number * chunk).clamp_(min=0), chunk)
    return held.cumsum(0).to(real_lengths.dtype)
