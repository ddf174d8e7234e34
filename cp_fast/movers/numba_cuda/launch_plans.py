"""The arguments of a mover's launch: the target of each row (see `row_maps_on_gpu`), and the tensors to move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cp_fast.movers.lengths_map import LengthsMap
from cp_fast.movers.numba_cuda.move_arguments import Move, rows_per_block, table_of, word_size
from cp_fast.movers.numba_cuda.move_kernels import move_kernel
from cp_fast.movers.numba_cuda.numba_launch import launch
from cp_fast.movers.rows import Rows

__all__ = ["Plan", "move", "plan_of"]

MOST_MOVES = 16  # In one launch: arguments are 4 KB at most.


class Plan(NamedTuple):
    """A row map as kernels take it: `kind` for the compiler, 8 `numbers` for the launch (see `row_maps_on_gpu`)."""

    helper: str
    kind: str
    count: int  # rows of the part
    numbers: tuple[int, ...]


def plan_of(helper: str, rows: Rows | LengthsMap, tokens: int, tail: bool = False) -> Plan:
    """`rows` of a tensor of `tokens` rows; whether its tail goes along. `helper`: the name for rows that are given."""
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(tokens)
        return Plan(helper, "span", max(stop - start, 0), (0, 0, 0, 0, 0, tokens, start, 0))
    if isinstance(rows, torch.Tensor):
        return Plan(helper, "index", len(rows), (*_array(rows), 0, 0, 0, tokens, 0, 0))
    real = (0, 0) if rows.real is None else _array(rows.real)
    b = int(tail) if rows.kind == "half" else rows.b
    numbers = *_array(rows.lengths), len(rows.lengths) - 1, *real, tokens, rows.a, b
    return Plan(rows.helper, rows.kind, rows.count(tokens), numbers)


def _array(x: torch.Tensor) -> tuple[int, int]:
    """The address of integers, and 1 if they have 64 bits."""
    assert x.is_contiguous(), "lengths and row numbers are dense"
    return x.data_ptr(), int(x.dtype == torch.int64)


def move(plan: Plan, scatter: bool, moves: Sequence[Move], device: torch.device) -> None:
    """Move the rows of every tensor."""
    if not moves or not plan.count:
        return
    size = word_size(moves)
    kernel: Callable[..., Any] = move_kernel(plan.helper, plan.kind, scatter, size)
    for at in range(0, len(moves), MOST_MOVES):
        some = moves[at : at + MOST_MOVES]
        rows = rows_per_block(max(one.heads * one.piece for one in some))
        arguments = table_of(some, size), plan.numbers, plan.count, rows
        launch(kernel, device, -(-plan.count // rows), *arguments, layers=len(some))
