"""Which rows of a global tensor a rank's slice has, and at which positions they lie: what shard, unshard and
position_ids share.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any

import numpy as np

from cp_ref.spec.layout import check_divides
from cp_ref.spec.ownership import Fragments, layout_fragments
from cp_ref.spec.problem import QKV_FORMATS
from cp_ref.spec.table import Column
from cp_ref.spec.values import check_choice, check_data, read_count, read_lengths

__all__ = ["position_columns", "position_spans", "position_spans_of", "slice_axis", "slice_spans"]

Span = tuple[int, int]


def slice_axis(x: Any, qkv_format: str) -> int:
    """The sequence axis of a tensor in this format: 1 for bshd, 0 for sbhd and thd.

    Raises:
        TypeError, ValueError: x is no tensor, has too few axes, or the format does not exist.
    """
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    axis = 1 if qkv_format == "bshd" else 0
    if not str(getattr(x, "dtype", "")).startswith("torch."):
        raise TypeError(f"x is a {type(x).__name__}; it must be a tensor")
    check_data("x", x)
    if len(x.shape) <= axis:
        raise ValueError(f"x has shape {list(x.shape)}; qkv_format {qkv_format!r} has its sequence on axis {axis}")
    return axis


def slice_spans(layout: str, cp_size: int, rank: int, size: int, qkv_format: str, cu_seqlens_padded: Any) -> list[Span]:
    """The rows of the global sequence axis (of `size`) that `rank`'s slice has, in order, as half-open spans.

    Raises:
        ValueError, TypeError: the lengths do not divide, do not fit `size`, or do not belong to the format.

    >>> slice_spans("dual_chunk", 2, 0, 8, "bshd", None)
    [(0, 2), (6, 8)]
    """
    if qkv_format != "thd":
        _refuse_lengths(qkv_format, cu_seqlens_padded)
        return _spans(_fragments(layout, [size], False, cp_size, rank))
    slots = _thd_slots(cu_seqlens_padded)
    total = sum(slots)
    tail, rest = divmod(size - total, cp_size)
    if size < total or rest:
        raise ValueError(
            f"x has {size} tokens and cu_seqlens_padded ends at {total}: the tail of {size - total} must be a "
            f"non-negative multiple of cp_size = {cp_size}"
        )
    own = _spans(_fragments(layout, slots, True, cp_size, rank))
    return [*own, (total + rank * tail, total + (rank + 1) * tail)]


def position_spans(
    layout: str, cp_size: int, rank: int, qkv_format: str, seqlen: int | None, cu_seqlens_padded: Any
) -> list[Span]:
    """The positions inside their sequences of `rank`'s tokens, in order, as half-open spans.

    Raises:
        ValueError, TypeError: as `slice_spans`.

    >>> position_spans("dual_chunk", 2, 1, "sbhd", 8, None)
    [(2, 4), (4, 6)]
    """
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    if qkv_format != "thd":
        _refuse_lengths(qkv_format, cu_seqlens_padded)
        if seqlen is None:
            raise ValueError(f"seqlen is None; qkv_format {qkv_format!r} needs the global sequence length")
        slots = [read_count("seqlen", seqlen, at_least=0)]
    else:
        if seqlen is not None:
            raise ValueError(f"seqlen is {seqlen!r}, but qkv_format 'thd' takes its lengths from cu_seqlens_padded")
        slots = _thd_slots(cu_seqlens_padded)
    return position_spans_of(layout, slots, qkv_format == "thd", cp_size, rank)


def position_spans_of(layout: str, slots: Seq[int], packed: bool, cp_size: int, rank: int) -> list[Span]:
    """The positions inside their sequences of the slots that `rank` holds, for sequences of these slots."""
    first, count = position_columns(layout, slots, packed, cp_size, rank)
    return list(zip(first.tolist(), (first + count).tolist(), strict=True))


def position_columns(layout: str, slots: Seq[int], packed: bool, cp_size: int, rank: int) -> tuple[Column, Column]:
    """The same as columns: the first position of each span, and their number."""
    starts = _starts(slots)
    fragments = _fragments(layout, slots, packed, cp_size, rank).within(starts[:-1], starts[1:])
    first = starts[np.searchsorted(starts, fragments.start, side="right") - 1]  # of the sequence that it is a part of
    return fragments.start - first, fragments.stop - fragments.start


def _fragments(layout: str, slots: Seq[int], packed: bool, cp_size: int, rank: int) -> Fragments:
    check_divides(slots, layout, not packed, cp_size)
    return layout_fragments(layout, _starts(slots), packed, cp_size).of(rank)


def _starts(slots: Seq[int]) -> Column:
    return np.append(0, np.cumsum(np.array(slots, dtype=np.int64)))


def _spans(fragments: Fragments) -> list[Span]:
    return list(zip(fragments.start.tolist(), fragments.stop.tolist(), strict=True))


def _refuse_lengths(qkv_format: str, cu_seqlens_padded: Any) -> None:
    if cu_seqlens_padded is not None:
        raise ValueError(f"cu_seqlens_padded is given, but qkv_format is {qkv_format!r}; it belongs to 'thd'")


def _thd_slots(cu_seqlens_padded: Any) -> list[int]:
    cumulative = read_lengths("cu_seqlens_padded", cu_seqlens_padded)
    if cumulative is None:
        raise ValueError("cu_seqlens_padded is None; qkv_format 'thd' needs it")
    return [b - a for a, b in pairwise(cumulative)]
