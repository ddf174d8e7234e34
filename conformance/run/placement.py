"""From global tensors to the ranks' slices and back, by the specified ownership instead of the implementation's `shard`
and `unshard`.

    lined up     [rows, ...]: one row after the other along the sequence axis; where a layout cuts the sequences of bshd
                 and sbhd differently, all rows of the first sequence, then those of the second
    lengthened   the same, with rows behind them until every slice is full
"""

from __future__ import annotations

from functools import lru_cache

import torch

from conformance.case import Case
from conformance.run.case_tensors import batch_axis, sequence_axis
from cp_ref.contract.cuts import Cut, planned_cut, planned_positions
from cp_ref.schedules.problem import Problem

__all__ = ["assemble", "global_rows", "positions", "slice_rows_of", "take_slice", "unsharded", "where"]


@lru_cache(maxsize=256)
def _cut(problem: Problem, side: str, tail: int) -> Cut:
    return planned_cut(problem, side, tail)


def global_rows(case: Case, side: str, rank: int) -> tuple[int, ...]:
    """The rows of the lengthened global tensor that a rank's local rows are, in order; its part of the tail last."""
    return _global_rows(case.problem, side, case.tail(side), rank)


@lru_cache(maxsize=256)
def _global_rows(problem: Problem, side: str, tail: int, rank: int) -> tuple[int, ...]:
    return tuple(_cut(problem, side, tail).of(rank).tolist())


def slice_rows_of(case: Case, side: str) -> int:
    """How many rows the sequence axis of every rank's slice has."""
    return _cut(case.problem, side, case.tail(side)).rows


def positions(problem: Problem, rank: int) -> list[int] | list[list[int]]:
    """The position inside its sequence of each of a rank's query rows: what `position_ids` has to say."""
    return planned_positions(problem, rank).tolist()


def take_slice(case: Case, x: torch.Tensor, side: str, rank: int, *, lse: bool = False) -> torch.Tensor:
    """A rank's slice of a global tensor; NaN, or 0 in integers, where it has no row of it. lse: x has an LSE's axes."""
    cut, axes = _cut(case.problem, side, case.tail(side)), _axes(case.problem, lse)
    rows = _lined_up(x, cut, axes)
    missing = rows.new_full(
        (cut.cp_size * cut.rows * (cut.batch or 1) - len(rows), *rows.shape[1:]),
        float("nan") if x.is_floating_point() else 0,
    )
    index = torch.tensor(global_rows(case, side, rank), dtype=torch.int64, device=x.device)
    return _in_format(torch.cat([rows, missing]).index_select(0, index), cut, axes)


def unsharded(case: Case, x: torch.Tensor, side: str) -> torch.Tensor:
    """The result of `unshard` for the slices of x. It is x, except for thd with a tail: zeros fill x up to
    the rows of all slices, or x ends before its tail.
    """
    tail = case.tail(side)
    cut = _cut(case.problem, side, tail)
    if not tail:
        return x
    if cut.rows == _cut(case.problem, side, 0).rows:  # the tail is no longer than what fills the slices up
        return x[: len(x) - tail]
    return torch.cat([x, x.new_zeros(cut.cp_size * cut.rows - len(x), *x.shape[1:])])


def assemble(case: Case, parts: list[torch.Tensor], side: str, *, lse: bool = False) -> torch.Tensor:
    """The global tensor of the ranks' local ones. Each part must have all rows of its rank."""
    p = case.problem
    cut, axes = _cut(p, side, case.tail(side)), _axes(p, lse)
    index = [row for rank in range(p.cp_size) for row in global_rows(case, side, rank)]
    order = torch.tensor(index, dtype=torch.int64, device=parts[0].device).argsort()[: cut.size * (cut.batch or 1)]
    return _in_format(torch.cat([_lined_up(part, cut, axes) for part in parts]).index_select(0, order), cut, axes)


def where(case: Case, side: str, batch: int | None, row: int) -> str:
    """A row of the global tensor in words: its sequence, position and rank. For thd, `batch` has to be None."""
    p = case.problem
    cut, starts = _cut(p, side, case.tail(side)), p.starts(side)
    lined_up = row if cut.batch is None or batch is None else starts[batch] + row
    rank = next(r for r in range(p.cp_size) if lined_up in global_rows(case, side, r))
    what = "query" if side == "q" else "key"
    if batch is None:
        if row >= starts[-1]:
            return f"tail slot {row - starts[-1]} (rank {rank})"
        batch = next(n for n in range(len(p.sequences)) if starts[n] <= row < starts[n + 1])
        row -= starts[batch]
    padding = row >= p.lengths.tokens(side)[batch]
    return f"sequence {batch} {'padding slot' if padding else what} {row} (rank {rank})"


def _axes(problem: Problem, lse: bool) -> tuple[int, int | None]:
    """The axes of tokens and of sequences."""
    batch = batch_axis(problem.qkv_format)
    return (-1, None if batch is None else 0) if lse else (sequence_axis(problem.qkv_format), batch)


def _lined_up(x: torch.Tensor, cut: Cut, axes: tuple[int, int | None]) -> torch.Tensor:
    tokens, batch = axes
    if cut.batch is None or batch is None:
        return x.movedim(tokens, 0)
    return x.movedim((batch, tokens), (0, 1)).flatten(0, 1)


def _in_format(rows: torch.Tensor, cut: Cut, axes: tuple[int, int | None]) -> torch.Tensor:
    """The inverse of `_lined_up`."""
    tokens, batch = axes
    if cut.batch is None or batch is None:
        return rows.movedim(0, tokens).contiguous()
    x = rows.unflatten(0, (cut.batch, len(rows) // cut.batch))
    return x.movedim((0, 1), (batch, tokens)).contiguous()
