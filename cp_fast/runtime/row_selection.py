"""What a selection of rows gives: rows of tensors by row, columns of tensors by column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch

from cp_fast.movers.mover_protocol import Rows

__all__ = ["columns_of", "count", "is_all", "is_mask", "put_columns", "rows_of"]


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
    """Rows and heads of tensors by row [t, h, d]: views if possible. gather: that of `Movers`."""
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


def put_columns(
    into: torch.Tensor,
    x: torch.Tensor,
    rows: Rows,
    scatter: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Rows], None],
) -> None:
    """Write x [h, n] to rows of an LSE [h, t]. scatter: that of `Movers`, whose indices are int32."""
    if isinstance(rows, slice):
        into[:, rows] = x
    else:
        scatter([into.t()], [x.t()], rows)


def is_mask(rows: Rows) -> TypeGuard[torch.Tensor]:
    """Whether these are not row numbers but a mask of all rows, bool [t].

    >>> is_mask(torch.tensor([True, False])), is_mask(torch.tensor([0])), is_mask(slice(0, 1))
    (True, False, False)
    """
    return isinstance(rows, torch.Tensor) and rows.dtype == torch.bool
