# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false
"""How kernels of sparse attention cut a row's columns in tiles, whose widths are powers of two."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

__all__ = ["LOG2E", "Widths", "columns", "launch_device", "precision", "widths"]

LOG2E = 1.4426950408889634


class Widths(NamedTuple):
    """d columns as `count` tiles of `width`, and one of `rest` columns (0: none) behind them, in part beyond d."""

    count: int
    width: int
    rest: int


def widths(d: int, most: int) -> Widths:
    """The tiles of d columns, whose widths are powers of two from 16 to `most`.

    >>> widths(576, 512), widths(576, 128), widths(192, 512), widths(8, 64)
    (Widths(count=1, width=512, rest=64), Widths(count=4, width=128, rest=64), Widths(count=1, width=128, rest=64),\
 Widths(count=0, width=16, rest=16))
    """
    width = 16
    while 2 * width <= min(d, most):
        width *= 2
    rest = d % width
    return Widths(d // width, width, max(16, triton.next_power_of_2(rest)) if rest else 0)


def precision(dtype: torch.dtype) -> str:
    """Of products: float32 is multiplied as such, not in tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def launch_device(x: torch.Tensor) -> torch.cuda.device_of:
    """The GPU of x as the current one, for launches."""
    return torch.cuda.device_of(x)


@triton.jit
def columns(rows, keep, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """WIDTH columns from FIRST on, of the rows that begin at the pointers `rows` [b]; zero beyond D, and where MASKED
    and not `keep` [b].
    """
    o_d = FIRST + tl.arange(0, WIDTH)
    places = rows[:, None] + o_d[None]
    if FIRST + WIDTH > D:
        if MASKED:
            found = tl.load(places, mask=keep[:, None] & (o_d < D)[None], other=0.0)
        else:
            found = tl.load(places, mask=(o_d < D)[None], other=0.0)
    elif MASKED:
        found = tl.load(places, mask=keep[:, None], other=0.0)
    else:
        found = tl.load(places)
    return found
