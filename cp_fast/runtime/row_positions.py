"""The documents and positions of the rows of a plan's launches, for scores that depend on them.

A launch has rows from anywhere, keys in any order, and several documents. So it gets tables with an entry for each of
its rows, in the order in which it reads them. The host computes a few numbers for each span of rows, and uploads them
at once; the device expands them. Launches with the same rows share a table.

    documents of 4 and 3 tokens; a launch with rows 5 to 6, and then 0 to 2
    global row   5 6 0 1 2
    document     1 1 0 0 0
    position     1 2 0 1 2
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cp_fast.backends.launch_positions import LaunchPositions
from cp_fast.compile.executable_plan import ExecutablePlan
from cp_fast.compile.index_tables import spread
from cp_fast.compile.instructions import Launch
from cp_fast.compile.row_maps import Spans
from cp_fast.runtime.row_selection import Rows
from cp_ref.spec import Problem, joined

__all__ = ["Documents", "RowPositions"]

Side = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # documents, positions, diagonals: int32 [rows]


class Documents:
    """Where the documents of one side, "q" or "kv", lie in the global buffer.

    >>> from cp_ref.spec import Sequence
    >>> documents = Documents(Problem(2, (Sequence(4, 4, 4, 4), Sequence(3, 5, 4, 8))), "q")
    >>> documents.pieces(Spans(np.array([5, 0]), np.array([7, 6]))).tolist()
    [[2, 1, 1, 3], [4, 0, 0, 0], [2, 1, 0, 2]]
    """

    def __init__(self, problem: Problem, side: str) -> None:
        starts = np.array(problem.starts_q if side == "q" else problem.starts_kv, dtype=np.int64)
        self._number = np.flatnonzero(starts[1:] > starts[:-1])
        self._start, self._stop = starts[self._number], starts[self._number + 1]
        len_q, len_kv = (np.array(x, dtype=np.int64) for x in (problem.lengths.len_q, problem.lengths.len_kv))
        self._shift = (len_kv - len_q)[self._number]

    def pieces(self, spans: Spans) -> np.ndarray:
        """The spans in pieces of one document each, in their order. Int64 [pieces, 4]: the number of rows, the
        document, and the position and the diagonal of the first row.
        """
        span, here = joined(spans.start, spans.stop, self._start, self._stop)
        first, last = np.maximum(spans.start[span], self._start[here]), np.minimum(spans.stop[span], self._stop[here])
        position = first - self._start[here]
        return np.stack([last - first, self._number[here], position, position + self._shift[here]], axis=1)


class RowPositions:
    """The tables of all launches of a plan. They are made when one is asked for, and then kept.

    Args:
        problem: the problem that the kernels see (`Packing.packed_problem`).
    """

    def __init__(self, instructions: ExecutablePlan[Rows], problem: Problem, device: torch.device) -> None:
        self._launches: list[Launch[Rows]] = [*instructions.forward.of(Launch), *instructions.backward.of(Launch)]
        self._problem, self._device = problem, device
        self._tables: dict[int, LaunchPositions] = {}  # By the launch's id.

    def of(self, launch: Launch[Rows]) -> LaunchPositions:
        """The tables of a launch of the plan."""
        if not self._tables:
            self._tables = dict(zip(map(id, self._launches), self._made(), strict=True))
        return self._tables[id(launch)]

    def updated(self, instructions: ExecutablePlan[Rows], problem: Problem) -> RowPositions:
        """Those of the next batch of a plan that is updated in place: in the same memory, if there are any."""
        later = RowPositions(instructions, problem, self._device)
        if self._tables:
            for old, new in zip(map(self.of, self._launches), later._made(), strict=True):
                for table, values in zip(old, new, strict=True):
                    table.copy_(values)
            later._tables = dict(zip(map(id, later._launches), map(self.of, self._launches), strict=True))
        return later

    def _made(self) -> list[LaunchPositions]:
        """The tables of each launch."""
        q = self._side("q", [(one.q_rows, _padded(one, one.batch.max_q)) for one in self._launches])
        kv = self._side("kv", [(one.kv_rows, _padded(one, one.batch.max_kv)) for one in self._launches])
        return [LaunchPositions(*queries, keys[1]) for queries, keys in zip(q, kv, strict=True)]

    def _side(self, side: str, rows: Sequence[tuple[Spans, int]]) -> list[Side]:
        """The tables of one side, of each launch. Rows: its spans, and the size of its tables in a plan that is updated
        in place (in which no table is shared, as the next batch may have different rows where these are equal); else 0.
        """
        documents = Documents(self._problem, side)
        keys = [(id(spans), n * bool(size)) for n, (spans, size) in enumerate(rows)]
        each = dict(zip(keys, rows, strict=True))
        pieces = [documents.pieces(spans) for spans, _ in each.values()]
        host = torch.from_numpy(np.concatenate([np.zeros((0, 4), dtype=np.int64), *pieces]).astype(np.int32))
        host = host.pin_memory() if self._device.type == "cuda" else host
        parts = host.to(self._device, non_blocking=True).split([len(some) for some in pieces])
        made = [_expanded(part, spans.total, size) for part, (spans, size) in zip(parts, each.values(), strict=True)]
        tables = dict(zip(each, made, strict=True))
        return [tables[key] for key in keys]


def _padded(launch: Launch[Rows], rows: int) -> int:
    """The size of a launch's tables in a plan that is updated in place; else 0."""
    return rows if launch.batch.updated_in_place else 0


def _expanded(pieces: torch.Tensor, total: int, size: int) -> Side:
    """Pieces as tables with a number for each row, followed by zeros up to `size`."""
    count, document, position, diagonal = pieces.unbind(1)
    found = (document, position, diagonal)
    if total:
        each = torch.repeat_interleave(document, count, output_size=total)
        found = each, spread(count, position, total), spread(count, diagonal, total)
    if not size:
        return found
    tables = torch.zeros(3, size, dtype=torch.int32, device=pieces.device)
    for table, values in zip(tables, found, strict=True):
        table[:total] = values
    return tables[0], tables[1], tables[2]
