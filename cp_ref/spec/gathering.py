"""What the ranks compare before they gather slices: the arguments of `unshard`."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from cp_ref.spec.group import read_together
from cp_ref.spec.slices import slice_axis, slice_spans

__all__ = ["gathered_spans"]

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Gathering:
    """What all ranks must have in common, in the form that `agree` takes."""

    x: tuple[tuple[int, ...], str]
    qkv_format: str
    layout: str
    cu_seqlens_padded: tuple[int, ...] | None

    @property
    def fingerprint(self) -> bytes:
        """32 bytes of the text."""
        return blake2b(str(self).encode()).digest()[:32]


def gathered_spans(cp: Any, x: Any, qkv_format: str, cu_seqlens_padded: Any) -> tuple[int, list[Spans]]:
    """The sequence axis, and the rows of the global axis that each rank's slice fills. Collective: all ranks get them,
    or all raise.

    Args:
        cp: a ContextParallel. The others: as in `unshard`.

    Raises:
        ValueError, TypeError: an argument is wrong, here or on another rank, or not the same on all of them.
    """

    def read() -> tuple[int, list[Spans], Gathering]:
        axis = slice_axis(x, qkv_format)
        size = x.shape[axis] * cp.size
        spans = [slice_spans(cp.layout, cp.size, r, size, qkv_format, cu_seqlens_padded) for r in range(cp.size)]
        lengths = None if cu_seqlens_padded is None else tuple(cu_seqlens_padded.tolist())
        return axis, spans, Gathering((tuple(x.shape), str(x.dtype)), qkv_format, cp.layout, lengths)

    axis, spans, _ = read_together(cp.comm, read, lambda found: found[2])
    return axis, spans
