"""What one rank does, step by step, in numbers that no machine has priced yet. Standard library and numpy.

Launches are those that a schedule's tiles are lowered to (`planning.launches`). The rest follows from its messages:

    travels    operands in the input's dtype; results too where they are complete or one launch's own, else in float32
    is moved   what is sent is packed; complete results are unpacked; exchanged operands are put beside the own ones
    is added   every partial result for rows that have one: read, and added to a sum that is read and written
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cp_fast.compile.index_tables import one_range
from cp_fast.compile.row_maps import RowMap
from cp_fast.compile.row_maps import Spans as RowSpans
from cp_fast.compile.tiles.launches import LaunchTable, launch_tables
from cp_fast.compile.tiles.windows import WindowRule, band_tiles, own_window
from cp_ref.spec import OPERANDS, UNBOUNDED, Column, Message, Problem, Step, Tiles, make_program
from cp_ref.spec.areas import pairs
from cp_ref.spec.units import merged

__all__ = [
    "Launch",
    "LaunchCounts",
    "RankCounts",
    "StepCounts",
    "count_alone",
    "count_rank",
    "item_bytes",
    "launches_of",
]

_LARGE = 2048  # query rows from which a tile of a packed batch keeps its own window, see `cp_fast.plan`
_ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_TENSORS = {"q": 1, "kv": 2, "do": 1, "out": 2, "dq": 1, "dkv": 2}

Heads = tuple[int, int]
Spans = tuple[Column, Column]
_NOTHING: Spans = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)


class LaunchCounts(NamedTuple):
    """One kernel launch: query heads, kv heads, query rows, key rows, and visible pairs of a head."""

    heads: int
    heads_kv: int
    rows: int
    keys: int
    pairs: int


class StepCounts(NamedTuple):
    """One step: launches; bytes by peer, both ways; of those received the bytes of operands; bytes that stay until the
    end of the backward pass, as heads are exchanged; bytes of own rows that are gathered for launches; tensors that are
    posted; bytes that the GPU reads and writes to pack, gather and add up.
    """

    launches: tuple[LaunchCounts, ...]
    sent: dict[int, int]
    received: dict[int, int]
    operands: int
    kept: int
    gathered: int
    tensors: int
    moved: int


@dataclass(frozen=True)
class RankCounts:
    """Both passes of one rank."""

    forward: tuple[StepCounts, ...]
    backward: tuple[StepCounts, ...]


def item_bytes(problem: Problem) -> tuple[int, int]:
    """Bytes of a number in the problem's dtype, and in the dtype that results are added up in."""
    item = _ITEM[problem.dtype]
    return item, max(item, 4)


def count_alone(problem: Problem) -> LaunchCounts:
    """The whole problem as one launch on one GPU.

    >>> from cp_ref.spec import Sequence
    >>> count_alone(Problem(1, (Sequence(4, 4, 4, 4), Sequence(2, 2, 2, 2)), heads_q=8))
    LaunchCounts(heads=8, heads_kv=1, rows=6, keys=6, pairs=13)
    """
    areas = problem.workload.areas
    rows, keys = _union((areas.q_start, areas.q_stop)), _union((areas.k_start, areas.k_stop))
    return LaunchCounts(problem.heads_q, problem.heads_kv, _size(rows), _size(keys), problem.pairs)


def count_rank(problem: Problem, rank: int, stages: tuple[int, ...] | None = None) -> RankCounts:
    """Both passes of one rank, in the schedule that the planner makes of a problem; `stages`: see `make_program`.

    >>> from cp_ref.spec import Sequence
    >>> ring = Problem(2, (Sequence(8, 8, 8, 8),), heads_q=2, d_qk=4, d_v=4, dtype="bfloat16")
    >>> for step in count_rank(ring, 0).forward:
    ...     print(step.launches, step.received)
    (LaunchCounts(heads=2, heads_kv=1, rows=4, keys=4, pairs=10),) {1: 64}
    (LaunchCounts(heads=2, heads_kv=1, rows=2, keys=4, pairs=8),) {}
    """
    forward, backward = make_program(problem, rank, stages)
    launches, found = _Launches.of_rank(problem, rank), []
    for program, results in ((forward, ("out",)), (backward, ("dq", "dkv"))):
        one = _Pass(problem, rank, launches, results)
        found.append(tuple(one.step(step) for step in program))
    return RankCounts(*found)


class Launch(NamedTuple):
    """A launch: its counts, its heads, and its rows."""

    counts: LaunchCounts
    heads: Heads
    kv_heads: Heads
    table: LaunchTable


def launches_of(problem: Problem, rank: int) -> list[Launch]:
    """All launches of one rank's forward pass, whose backward pass has the same ones."""
    launches, (forward, _) = _Launches.of_rank(problem, rank), make_program(problem, rank)
    return [launch for step in forward if len(step.tiles) for launch in launches.of(step.tiles)]


@dataclass
class _Launches:
    """The launches of tiles; both passes of the usual schedule compute the same ones. `own`: where the rank's queries
    lie in its buffer; None where heads are exchanged, which puts all rows in order.
    """

    problem: Problem
    own: RowMap | None
    _known: dict[int, tuple[Tiles, list[Launch]]] = field(default_factory=dict)

    @staticmethod
    def of_rank(problem: Problem, rank: int) -> _Launches:
        """Those of one rank's tiles."""
        own = problem.workload.ownership.q.of(rank)
        return _Launches(problem, RowMap.of(own) if problem.a2a_size == 1 else None)

    def of(self, tiles: Tiles) -> list[Launch]:
        """The launches of a step's tiles."""
        if id(tiles) not in self._known:
            self._known[id(tiles)] = tiles, self._made(tiles)
        return self._known[id(tiles)][1]

    def _made(self, tiles: Tiles) -> list[Launch]:
        problem, found = self.problem, list[Launch]()
        rule = WindowRule(own_window(problem), _LARGE if problem.qkv_format == "thd" else 0)
        for heads in sorted({*zip(tiles.head_start.tolist(), tiles.head_stop.tolist(), strict=True)}):
            some = tiles.take((tiles.head_start == heads[0]) & (tiles.head_stop == heads[1]))
            banded = band_tiles(problem.workload.areas, some)
            kv_heads = heads[0] // problem.group_size, -(-heads[1] // problem.group_size)
            for table in launch_tables(banded, rule):
                sizes = int(table.lengths_q.sum()), int(table.lengths_k.sum()), _visible(table)
                counts = LaunchCounts(heads[1] - heads[0], kv_heads[1] - kv_heads[0], *sizes)
                found.append(Launch(counts, heads, kv_heads, table))
        return found


def _visible(table: LaunchTable) -> int:
    """The visible pairs of a launch's segments, whose windows are aligned to the last row and the last key."""
    q, k = table.lengths_q, table.lengths_k
    lo = np.full_like(q, -UNBOUNDED) if table.left is None else k - q - table.left
    hi = np.full_like(q, UNBOUNDED) if table.right is None else k - q + table.right
    return int(pairs(np.zeros_like(q), q, np.zeros_like(k), k, lo, hi).sum())


@dataclass
class _Pass:
    """Counts one pass. `results`: the kinds that its launches yield; `have`: rows that have a result, by kind and
    heads; `arrived`: key rows whose gradients have come from others.
    """

    problem: Problem
    rank: int
    launches: _Launches
    results: tuple[str, ...]
    have: dict[tuple[str, Heads], Spans] = field(default_factory=dict)
    arrived: Spans = _NOTHING

    def step(self, step: Step) -> StepCounts:
        """The next step."""
        sums = any(m.kind == "dkv" and _overlap(_spans(m), self.arrived) for m in step.sends)  # passed on, added to
        sent, received = defaultdict[int, int](int), defaultdict[int, int](int)
        size_of_group = self.problem.a2a_size
        moved = operands = kept = 0
        for message in step.sends:
            size = self._bytes(message, sums)
            sent[message.peer] += size
            moved += 2 * size
            kept += size * (message.kind == "out" and message.complete)
        launches = self.launches.of(step.tiles) if len(step.tiles) else []
        gathered = sum(map(self._gathered, launches))
        moved += 2 * gathered
        for launch in launches:
            for kind in self.results:
                keys = kind == "dkv"
                heads = launch.kv_heads if keys else launch.heads
                rows = launch.table.k if keys else launch.table.q
                moved += self._added(kind, heads, (rows.start, rows.stop))
        for message in step.recvs:
            size = self._bytes(message, sums)
            received[message.peer] += size
            if message.kind in OPERANDS and message.peer // size_of_group == self.rank // size_of_group:
                joined = size * size_of_group // (size_of_group - 1)  # put beside the own rows of these heads
                moved += 2 * joined
                kept += joined if message.kind != "do" else 2 * joined + size  # and with dout the out of these rows
            elif message.kind in OPERANDS:
                operands += size
            elif message.complete:
                moved += 2 * size
            else:
                heads = int(message.pieces.head_start[0]), int(message.pieces.head_stop[0])
                moved += self._added(message.kind, heads, _spans(message))
                if message.kind == "dkv":
                    self.arrived = _union(self.arrived, _spans(message))
        tensors = sum(_TENSORS[message.kind] for message in (*step.sends, *step.recvs))
        counts = tuple(x.counts for x in launches)
        return StepCounts(counts, dict(sent), dict(received), operands, kept, gathered, tensors, moved)

    def _gathered(self, launch: Launch) -> int:
        """Bytes of the launch's queries, in the backward pass of dout and out too, if they lie apart in the buffer."""
        own = self.launches.own
        if own is None:
            return 0
        located = own.locate(RowSpans(launch.table.q.start, launch.table.q.stop))
        if one_range(located.row, located.count):
            return 0
        problem = self.problem
        dims = problem.d_qk + (2 * problem.d_v if "dq" in self.results else 0)
        return launch.counts.rows * launch.counts.heads * dims * item_bytes(problem)[0]

    def _bytes(self, message: Message, sums: bool) -> int:
        """What travels: the gradients of one launch as it rounded them, sums wide."""
        problem, (item, wide) = self.problem, item_bytes(self.problem)
        result = item if message.complete or (message.kind == "dkv" and not sums) else wide
        row = {
            "q": problem.d_qk * item,
            "kv": (problem.d_qk + problem.d_v) * item,
            "do": problem.d_v * item,
            "out": problem.d_v * result + wide,
            "dq": problem.d_qk * result,
            "dkv": (problem.d_qk + problem.d_v) * result,
        }[message.kind]
        pieces = message.pieces
        return row * int(((pieces.stop - pieces.start) * (pieces.head_stop - pieces.head_start)).sum())

    def _added(self, kind: str, heads: Heads, spans: Spans) -> int:
        """Bytes that are read and written to add a partial result where rows have one already."""
        before = self.have.get((kind, heads), _NOTHING)
        self.have[kind, heads] = after = _union(before, spans)
        rows = _size(before) + _size(spans) - _size(after)
        item, wide = item_bytes(self.problem)
        dims = {"out": self.problem.d_v, "dq": self.problem.d_qk, "dkv": self.problem.d_qk + self.problem.d_v}[kind]
        return rows * (heads[1] - heads[0]) * dims * (item + 2 * wide)


def _spans(message: Message) -> Spans:
    return message.pieces.start, message.pieces.stop


def _size(spans: Spans) -> int:
    return int((spans[1] - spans[0]).sum())


def _union(one: Spans, other: Spans = _NOTHING) -> Spans:
    """The rows of both, as few spans.

    >>> _size(_union((np.array([0, 4]), np.array([3, 8])), (np.array([2]), np.array([5]))))
    8
    """
    return merged(np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]]))


def _overlap(one: Spans, other: Spans) -> bool:
    return _size(_union(one, other)) < _size(one) + _size(other)
