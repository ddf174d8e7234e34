"""Which rows of a global tensor a rank's slice has, and at which positions they lie: what shard, unshard and
position_ids share.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from cp_ref.spec.layout import Fragment, ownership
from cp_ref.spec.problem import QKV_FORMATS
from cp_ref.spec.values import check_choice, check_data, read_count, read_lengths

__all__ = ["position_spans", "slice_axis", "slice_spans", "spans_of"]

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
        return [(f.start, f.stop) for f in ownership([size], layout, True, cp_size, rank)]
    slots = _thd_slots(cu_seqlens_padded)
    total = sum(slots)
    tail, rest = divmod(size - total, cp_size)
    if size < total or rest:
        raise ValueError(
            f"x has {size} tokens and cu_seqlens_padded ends at {total}: the tail of {size - total} must be a "
            f"non-negative multiple of cp_size = {cp_size}"
        )
    starts = [0]
    for length in slots:
        starts.append(starts[-1] + length)
    own = [(starts[f.seq] + f.start, starts[f.seq] + f.stop) for f in ownership(slots, layout, False, cp_size, rank)]
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
    return spans_of(ownership(slots, layout, qkv_format != "thd", cp_size, rank))


def spans_of(fragments: tuple[Fragment, ...]) -> list[Span]:
    """The fragments' positions."""
    return [(f.start, f.stop) for f in fragments]


def _refuse_lengths(qkv_format: str, cu_seqlens_padded: Any) -> None:
    if cu_seqlens_padded is not None:
        raise ValueError(f"cu_seqlens_padded is given, but qkv_format is {qkv_format!r}; it belongs to 'thd'")


def _thd_slots(cu_seqlens_padded: Any) -> list[int]:
    cumulative = read_lengths("cu_seqlens_padded", cu_seqlens_padded)
    if cumulative is None:
        raise ValueError("cu_seqlens_padded is None; qkv_format 'thd' needs it")
    return [b - a for a, b in pairwise(cumulative)]
