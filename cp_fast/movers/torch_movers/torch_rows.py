"""A row map as tensors of row numbers, for PyTorch's operators."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_fast.movers.lengths_map import LengthsMap
from cp_fast.movers.rows import Rows
from cp_fast.movers.torch_movers.torch_asserts import assert_lengths, assert_real_lengths
from cp_ref.common.thd.row_tables import (
    half_rows,
    in_half,
    is_valid,
    locate,
    rank_order_rows,
    sequence_order_rows,
    slice_rows,
    unpadded_rows,
)

__all__ = ["Place", "Targets", "table_of", "targets_of"]


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
