"""Rows of a packed buffer: a slice if they are contiguous (no copy), else an index on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch

from cp_ref.spec import Problem, Room

__all__ = ["MOST_ROWS", "Rows", "check_row_numbers", "columns_of", "count", "is_all", "is_mask", "put_columns"]
__all__ += ["rows_of", "take"]

Rows = slice | torch.Tensor
MOST_ROWS = 2**31 - 1  # Of one buffer of a rank: row numbers and the lengths of launches are int32.


def take(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """x's rows: a view for a slice, a copy for an index."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def is_all(rows: Rows, size: int) -> bool:
    """Whether these are all `size` rows, in their order.

    >>> is_all(slice(0, 3), 3), is_all(slice(1, 3), 3), is_all(torch.arange(3), 3)
    (True, False, False)
    """
    return isinstance(rows, slice) and (rows.start, rows.stop) == (0, size)


def count(rows: Rows) -> int:
    """The number of rows.

    >>> count(slice(2, 5)), count(torch.tensor([4, 0]))
    (3, 2)
    """
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def rows_of(
    tensors: Sequence[torch.Tensor],
    rows: Rows,
    heads: tuple[int, int],
    gather: Callable[[Sequence[torch.Tensor], Rows], Sequence[torch.Tensor]],
) -> Sequence[torch.Tensor]:
    """Rows and heads of tensors by row [t, h, d]: views if possible. gather: that of `Kernels`."""
    size, count, _ = tensors[0].shape
    if heads != (0, count):
        tensors = [x[:, heads[0] : heads[1]] for x in tensors]
    return tensors if is_all(rows, size) else gather(tensors, rows)


def columns_of(tensors: Sequence[torch.Tensor], rows: Rows, heads: tuple[int, int]) -> list[torch.Tensor]:
    """Rows and heads of LSEs [h, t], with rows on the second axis; contiguous."""
    found: list[torch.Tensor] = []
    for x in tensors:
        count, size = x.shape
        if heads != (0, count):
            x = x[heads[0] : heads[1]]
        if not is_all(rows, size):
            x = x[:, rows] if isinstance(rows, slice) else x.index_select(1, rows)
        found.append(x.contiguous())
    return found


def put_columns(into: torch.Tensor, x: torch.Tensor, rows: Rows) -> None:
    """Write x [h, n] to rows of an LSE [h, t]."""
    if isinstance(rows, slice):
        into[:, rows] = x
    else:
        into.index_copy_(1, rows.long(), x)


def is_mask(rows: Rows) -> TypeGuard[torch.Tensor]:
    """Whether these are not row numbers but a mask of all rows, bool [t].

    >>> is_mask(torch.tensor([True, False])), is_mask(torch.tensor([0])), is_mask(slice(0, 1))
    (True, False, False)
    """
    return isinstance(rows, torch.Tensor) and rows.dtype == torch.bool


def check_row_numbers(problem: Problem, room: Room | None = None) -> None:
    """Refuse a problem, or room, for which a rank would hold more rows of q or of k and v than int32 numbers.

    Raises:
        ValueError: naming the lengths (or the room), and how many rows a rank would hold.
    """
    for side, total, most in (
        ("q", problem.starts_q[-1], None if room is None else room.max_tokens_q),
        ("kv", problem.starts_kv[-1], None if room is None else room.max_tokens_kv),
    ):
        gathered = side == "kv" and problem.cp_comm_type == "all_gather"
        ranks = problem.cp_size if gathered else problem.a2a_size  # The ranks that gather rows.
        what, tokens = f"max_tokens_{side} is", most
        if tokens is None:
            what, tokens = f"cu_seqlens_{side}, padding included, ends at", total
        rows = -(-tokens // problem.cp_size) * ranks
        if rows > MOST_ROWS:
            raise ValueError(
                f"{what} {tokens}: with cp_comm_type {problem.cp_comm_type!r} at cp_size {problem.cp_size} a rank would"
                f" hold {rows} rows of {side}; row numbers are int32, so it must be at most {MOST_ROWS}"
            )
