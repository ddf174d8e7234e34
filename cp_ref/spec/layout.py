"""The lengths that a layout takes; the tables themselves are made in `ownership.py`."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import gcd

__all__ = ["check_divides", "divisor"]


def divisor(layout: str, cp_size: int) -> int:
    """The number that a length has to divide by: 2 * cp_size for dual_chunk, cp_size for contiguous."""
    return 2 * cp_size if layout == "dual_chunk" else cp_size


def check_divides(slots: Seq[int], layout: str, per_sequence: bool, cp_size: int) -> None:
    """Raise ValueError where a length cannot be cut evenly; the arguments are those of `ownership`."""
    unit = divisor(layout, cp_size)
    if layout == "dual_chunk":
        if gcd(*slots) % unit:  # of all of them at once
            seq, length = next((n, length) for n, length in enumerate(slots) if length % unit)
            raise ValueError(
                f"sequence {seq} has length {length}, padding included, but layout 'dual_chunk' at cp_size {cp_size} "
                f"needs a multiple of 2 * cp_size = {unit}"
            )
        return
    parts = [(f"sequence {n}", length) for n, length in enumerate(slots)] if per_sequence else []
    for what, length in parts or [("the packed buffer", sum(slots))]:
        if length % unit:
            raise ValueError(
                f"{what} has length {length}, padding included, but layout 'contiguous' at cp_size {cp_size} "
                f"needs a multiple of cp_size = {unit}"
            )
