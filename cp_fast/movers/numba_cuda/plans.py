"""The arguments of a mover's launch: the target of each row (see `maps`), and the tensors to move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cp_fast.movers.numba_cuda.launch import launch
from cp_fast.movers.numba_cuda.movers import move_kernel
from cp_fast.movers.numba_cuda.moves import Move, moves_of, rows_per_block, table_of, word_size
from cp_fast.runtime.row_selection import Rows

__all__ = ["gathered", "lengths_plan", "move", "row_plan"]

MOST_MOVES = 16  # In one launch: arguments are 4 KB at most.


def lengths_plan(
    lengths: torch.Tensor, tokens: int, a: int = 0, b: int = 0, other: torch.Tensor | None = None
) -> tuple[int, ...]:
    """The plan of a map that follows lengths."""
    assert lengths.is_contiguous(), "lengths are dense"
    assert other is None or other.is_contiguous(), "real lengths are dense"
    beside = (0, 0) if other is None else (other.data_ptr(), int(other.dtype == torch.int64))
    return lengths.data_ptr(), int(lengths.dtype == torch.int64), len(lengths) - 1, *beside, tokens, a, b


def row_plan(rows: Rows, tokens: int) -> tuple[str, int, tuple[int, ...]]:
    """(kind, count, plan) of rows that the caller gives."""
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(tokens)
        return "span", max(stop - start, 0), (0, 0, 0, 0, 0, tokens, start, 0)
    assert rows.is_contiguous()
    return "index", len(rows), (rows.data_ptr(), int(rows.dtype == torch.int64), 0, 0, 0, tokens, 0, 0)


def gathered(
    helper: str,
    kind: str,
    xs: Sequence[torch.Tensor],
    count: int,
    plan: tuple[int, ...],
    divisor: int = 1,
    tail_divisor: int = 1,
) -> list[torch.Tensor]:
    """Rows of each x, in new tensors."""
    outs = [x.new_empty(count, *x.shape[1:]) for x in xs]
    moves = [m for x, out in zip(xs, outs, strict=True) if out.numel() for m in moves_of(x, out)]
    move(helper, kind, False, moves, count, plan, xs[0].device, divisor, tail_divisor)
    return outs


def move(
    helper: str,
    kind: str,
    scatter: bool,
    moves: Sequence[Move],
    count: int,
    plan: tuple[int, ...],
    device: torch.device,
    divisor: int = 1,
    tail_divisor: int = 1,
) -> None:
    """Move `count` rows of every tensor, `divisor` and `tail_divisor` of the lengths in the plan."""
    if not moves or not count:
        return
    size = word_size(moves)
    kernel: Callable[..., Any] = move_kernel(helper, kind, scatter, size)
    for at in range(0, len(moves), MOST_MOVES):
        some = moves[at : at + MOST_MOVES]
        rows = rows_per_block(some)
        arguments = table_of(some, size), plan, count, divisor, tail_divisor, rows
        launch(kernel, device, -(-count // rows), *arguments, layers=len(some))
