"""The sequences and positions of the rows of a plan's launches, for scores that depend on them.

A launch has rows from anywhere, keys in any order, and several sequences. So it gets tables with an entry for each of
its rows, in the order in which it reads them. The host computes a few numbers for each span of rows, and uploads those
of all launches at once; the device expands them. Launches with the same rows share a table.

    sequences of 4 and 3 tokens; a launch with rows 5 to 6, and then 0 to 2
    global row   5 6 0 1 2
    sequence     1 1 0 0 0
    position     1 2 0 1 2
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cp_fast.compile.index_tables import spread
from cp_fast.compile.program import Launch, Programs
from cp_fast.kernels.attention.backend_protocol import LaunchPositions
from cp_fast.movers.mover_protocol import Rows
from cp_ref.schedules.problem import Problem, row_positions
from cp_ref.schedules.table import Spans

__all__ = ["RowPositions", "segment_places", "span_places"]

Side = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # sequences, positions, diagonals: int32 [rows]
_ALIGNED = 16  # Rows of a block for which a kernel draws random numbers together.


class RowPositions:
    """The tables of all launches of a plan. They are made when one is asked for, and then kept.

    Args:
        problem: the problem that the kernels see (`Packing.packed_problem`).
    """

    def __init__(self, programs: Programs[Rows], problem: Problem, device: torch.device) -> None:
        self._launches: list[Launch[Rows]] = [*programs.forward.of(Launch), *programs.backward.of(Launch)]
        self._problem, self._device = problem, device
        self._tables: dict[int, LaunchPositions] = {}  # By the launch's id.

    def of(self, launch: Launch[Rows]) -> LaunchPositions:
        """The tables of a launch of the plan."""
        if not self._tables:
            self.make()
        return self._tables[id(launch)]

    def make(self) -> None:
        """Make the tables of all launches."""
        self._tables = dict(zip(map(id, self._launches), self._new_tables(), strict=True))

    def updated(self, programs: Programs[Rows], problem: Problem) -> RowPositions:
        """Those of the next batch of a plan that is updated in place: in the same memory, if there are any."""
        later = RowPositions(programs, problem, self._device)
        if self._tables:
            same = list(map(self.of, self._launches))
            for old, new in zip(same, later._new_tables(), strict=True):
                for table, values in zip(old[:4], new[:4], strict=True):
                    table.copy_(values)
            later._tables = dict(zip(map(id, later._launches), same, strict=True))
        return later

    def _new_tables(self) -> list[LaunchPositions]:
        """The tables of each launch."""
        q = self._places("q", [one.q_rows for one in self._launches])
        kv = self._places("kv", [one.kv_rows for one in self._launches])
        segments = [segment_places(*three) for three in zip(self._launches, q, kv, strict=True)]
        of_segments = self._uploaded([np.zeros((4, 0), np.int32) if x is None else x for x in segments])
        of_q, of_kv = self._side(q, "max_q"), self._side(kv, "max_kv")
        return [
            LaunchPositions(*queries, keys[1], None if x is None else table, _is_aligned(x))
            for queries, keys, x, table in zip(of_q, of_kv, segments, of_segments, strict=True)
        ]

    def _places(self, side: str, rows: Sequence[Spans]) -> list[np.ndarray]:
        """See `span_places`, for each of these; the same ones for the same spans."""
        found = {id(spans): span_places(self._problem, side, spans) for spans in {id(x): x for x in rows}.values()}
        return [found[id(spans)] for spans in rows]

    def _side(self, places: Sequence[np.ndarray], longest: str) -> list[Side]:
        """The tables of one side, of each launch. In a plan that is updated in place they are as long as the tensors,
        and no two launches share one: the next batch may have other rows where these are equal.
        """
        sizes = [getattr(x.batch, longest) if x.batch.updated_in_place else 0 for x in self._launches]
        keys = [(id(some), n * bool(size)) for n, (some, size) in enumerate(zip(places, sizes, strict=True))]
        host = dict(zip(keys, zip(places, sizes, strict=True), strict=True))
        device = self._uploaded([some for some, _ in host.values()])
        made = [_expanded(x, int(some[0].sum()), size) for x, (some, size) in zip(device, host.values(), strict=True)]
        tables = dict(zip(host, made, strict=True))
        return [tables[key] for key in keys]

    def _uploaded(self, some: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Arrays int32 [4, n] on the device, by one copy."""
        host = torch.from_numpy(np.concatenate([np.zeros((4, 0), np.int32), *some], axis=1))
        host = host.pin_memory() if self._device.type == "cuda" else host
        return list(host.to(self._device, non_blocking=True).split([x.shape[1] for x in some], dim=1))


def span_places(problem: Problem, side: str, spans: Spans) -> np.ndarray:
    """Int32 [4, n]: the number of rows of each span, its sequence, and the position and diagonal of its first row. A
    span that has rows of several sequences is cut where each begins.

    >>> from cp_ref.schedules.problem import Sequence
    >>> problem = Problem(2, (Sequence(4, 4, 4, 4), Sequence(3, 5, 4, 8)))
    >>> span_places(problem, "q", Spans(np.array([5, 0]), np.array([7, 3]))).T.tolist()
    [[2, 1, 1, 3], [3, 0, 0, 0]]
    >>> span_places(problem, "q", Spans(np.array([2]), np.array([7]))).T.tolist()
    [[2, 0, 2, 2], [3, 1, 0, 2]]
    """
    first = np.unique(np.asarray(problem.starts(side)[:-1], np.int64))
    _, _, *pieces = spans.overlaps(Spans(first, np.append(first[1:], np.iinfo(np.int64).max)))
    spans = Spans(*pieces)
    sequence, position = row_positions(problem, side, spans.start)
    shift = np.subtract(problem.lengths.len_kv, problem.lengths.len_q)[sequence]
    return np.stack([spans.size, sequence, position, position + shift]).astype(np.int32)


def segment_places(launch: Launch[Rows], q: np.ndarray, kv: np.ndarray) -> np.ndarray | None:
    """Int32 [4, segments]: the sequence of each segment, the position and the diagonal of its first query, and the
    position of its first key. None unless the positions of each segment's queries, and of its keys, are consecutive,
    and the segments lie one after the other.

    Args:
        q, kv: the result of `span_places` for its rows.
    """
    if launch.batch.updated_in_place or launch.batch.starts is not None:
        return None
    found: list[np.ndarray] = []
    for (count, sequence, position, diagonal), cumulative in ((q, launch.batch.cu_q), (kv, launch.batch.cu_kv)):
        begin = np.cumsum(count) - count
        first = np.searchsorted(begin, np.asarray(cumulative)[:-1])
        follows = np.append(False, position[1:] == position[:-1] + count[:-1])
        follows[first] = True
        if not follows.all():
            return None
        found += [sequence[first], position[first], diagonal[first]]
    return np.stack([*found[:3], found[4]])


def _is_aligned(places: np.ndarray | None) -> bool:
    return places is not None and not (places[1:] % _ALIGNED).any()


def _expanded(places: torch.Tensor, total: int, size: int) -> Side:
    """The places of spans as tables with a number for each row, followed by zeros up to `size`."""
    count, sequence, position, diagonal = (x.contiguous() for x in places)
    found = (sequence, position, diagonal)
    if total:
        each = torch.repeat_interleave(sequence, count, output_size=total)
        found = each, spread(count, position, total), spread(count, diagonal, total)
    if not size:
        return found
    tables = torch.zeros(3, size, dtype=torch.int32, device=places.device)
    for table, values in zip(tables, found, strict=True):
        table[:total] = values
    return tables[0], tables[1], tables[2]
