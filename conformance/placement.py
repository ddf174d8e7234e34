"""From the ranks' slices to the global tensor, by the specified ownership instead of the implementation's `unshard`."""

from __future__ import annotations

from functools import lru_cache

import torch

from conformance.case import Case
from cp_ref.spec import Problem, ranges

__all__ = ["assemble", "global_rows", "positions", "take_slice", "where"]


@lru_cache(maxsize=256)
def global_rows(problem: Problem, side: str, tail: int, rank: int) -> tuple[int, ...]:
    """The rows, along the global tensor's sequence axis, of a rank's local rows in order; its part of the tail last.

    In bshd and sbhd that axis is one sequence's slots; in thd it is the packed buffer.
    """
    starts = problem.starts_q if side == "q" else problem.starts_kv
    own = problem.slots.side(side).of(rank)
    if problem.qkv_format != "thd":
        own = own.take(own.start < starts[1])
    rows: list[int] = ranges(own.start, own.stop - own.start).tolist()
    part, total = tail // problem.cp_size, starts[-1]
    return (*rows, *range(total + rank * part, total + (rank + 1) * part)) if tail else tuple(rows)


def positions(problem: Problem, side: str, rank: int) -> list[int]:
    """The position inside its sequence of each of a rank's rows, tail left out: what `position_ids` has to say."""
    rows = global_rows(problem, side, 0, rank)
    if problem.qkv_format != "thd":
        return list(rows)
    starts = problem.starts_q if side == "q" else problem.starts_kv
    return [row - max(start for start in starts if start <= row) for row in rows]


def take_slice(problem: Problem, x: torch.Tensor, side: str, tail: int, rank: int) -> torch.Tensor:
    """A rank's slice of a global tensor, for implementations that have no `shard`."""
    axis = 1 if problem.qkv_format == "bshd" else 0
    rows = torch.tensor(global_rows(problem, side, tail, rank), dtype=torch.int64, device=x.device)
    return x.index_select(axis, rows)


def assemble(case: Case, parts: list[torch.Tensor], side: str, axis: int) -> torch.Tensor:
    """The global tensor of the ranks' local ones; `axis` counts tokens. Each part must have all rows of its rank."""
    p, tail = case.problem, case.tail_q if side == "q" else case.tail_kv
    index = [row for rank in range(p.cp_size) for row in global_rows(p, side, tail, rank)]
    order = torch.tensor(index, dtype=torch.int64, device=parts[0].device).argsort()
    return torch.cat(parts, dim=axis).index_select(axis, order)


def where(case: Case, side: str, batch: int | None, row: int) -> str:
    """A row of the global tensor in words: its sequence, position and rank. `batch` is None in thd."""
    p, tail = case.problem, case.tail_q if side == "q" else case.tail_kv
    rank = next(r for r in range(p.cp_size) if row in global_rows(p, side, tail, r))
    what = "query" if side == "q" else "key"
    if batch is None:
        starts = p.starts_q if side == "q" else p.starts_kv
        if row >= starts[-1]:
            return f"tail slot {row - starts[-1]} (rank {rank})"
        batch = next(n for n in range(len(p.sequences)) if starts[n] <= row < starts[n + 1])
        row -= starts[batch]
    padding = row >= getattr(p.sequences[batch], f"len_{side}")
    return f"sequence {batch} {'padding slot' if padding else what} {row} (rank {rank})"
