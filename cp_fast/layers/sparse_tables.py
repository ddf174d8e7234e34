"""A rank's tables for the sparse attention of one batch: the exchanges of its rows, and the visible keys of each row.

Gathered queries lie rank by rank. Gathered keys have the order of the global buffer. So those of a document lie side by
side, and a run of visible keys is a run of gathered rows:

    two causal documents of 4 and 2 tokens, rank 0 of two, dual_chunk     the own rows are 0, 3, 4
        gathered keys       global row  0 1 2 3 4                         rows 1 and 2 arrive, row 5 nobody here sees
                            position    0 1 2 3 0
        the own rows see    [0:1] [0:4] [4:5]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from cp_fast.api.plan import Plan
from cp_fast.compile.exchange_program import ExchangedRows, RowMessages
from cp_fast.kernels.sparse.sparse_kernels import Runs, Visible
from cp_fast.layers.layers import LayerTables
from cp_fast.runtime.slices import OwnRows
from cp_ref.schedules.areas import Areas
from cp_ref.schedules.compressed import EntryProblem, entry_problem
from cp_ref.schedules.linear_schedules import ALL_HEADS
from cp_ref.schedules.planners.a2a import head_ranges
from cp_ref.schedules.planners.all_gather import plan_all_gather_rank
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import row_positions
from cp_ref.schedules.schedule import Heads, Message, Pieces, Step
from cp_ref.schedules.table import Column, Spans, ranges, runs

__all__ = [
    "INDICES_OF_HEADS",
    "KEYS",
    "KEYS_OF_HEADS",
    "QUERIES",
    "GatheredRows",
    "SparseTables",
    "intervals",
    "sparse_tables",
    "together",
]

KEYS, KEYS_OF_HEADS = "keys", "keys of heads"
QUERIES, INDICES_OF_HEADS = "queries of heads", "queries and indices of heads"


class GatheredRows(NamedTuple):
    """The queries and keys that a rank computes with, and who sees whom.

    Attributes:
        queries: the exchange of the queries and their indices; None where they stay.
        keys: the exchange of the keys.
        heads: the query heads that the rank computes with.
    """

    queries: str | None
    keys: str
    heads: Heads
    visible: Visible
    longest: int  # the most keys that a query row sees

    @property
    def runs(self) -> Runs:
        """All visible keys."""
        return Runs(self.visible.starts, self.visible.stops, self.longest)

    def queries_of(self, indices: torch.Tensor) -> str:
        """The exchange of the queries with these indices [n, 1 or h_kv, top_k]."""
        return QUERIES if indices.shape[1] == 1 else INDICES_OF_HEADS


@dataclass(frozen=True, eq=False)
class SparseTables(LayerTables):
    """A rank's tables for the sparse attention of one batch to its tokens, or to compressed keys of one rate.

    Attributes:
        of_entries: those for compressed keys, by rate.
    """

    of_entries: dict[int, SparseTables] = field(default_factory=dict[int, "SparseTables"], repr=False)

    def of_rate(self, rate: int | None) -> SparseTables:
        """Those for compressed keys of this rate; None: these."""
        if rate is None:
            return self
        if (found := self.of_entries.get(rate)) is None:
            made = SparseTables(entry_problem(self.problem, rate), self.rank, self.device)
            found = self.of_entries.setdefault(rate, made)
        return found

    @cached_property
    @torch.inference_mode(False)
    def q(self) -> OwnRows:
        """The rank's query rows."""
        return OwnRows.of(self.problem, self.problem.workload.ownership.q.of(self.rank), self.device)

    @cached_property
    @torch.inference_mode(False)
    def kv(self) -> OwnRows:
        """The rank's rows of keys."""
        ownership, problem = self.problem.workload.ownership, self.problem
        if isinstance(problem, EntryProblem):  # entries are packed in every format
            problem = replace(problem, qkv_format="thd")
        return self.q if ownership.kv is ownership.q else OwnRows.of(problem, ownership.kv.of(self.rank), self.device)

    def messages(self, name: str) -> RowMessages:
        """See `LayerTables`."""
        if name == KEYS:
            return self._keys
        if name == KEYS_OF_HEADS:
            return self._keys_of_heads
        return self._queries_of_heads(indices_of_heads=name == INDICES_OF_HEADS)

    @cached_property
    @torch.inference_mode(False)
    def by_rows(self) -> GatheredRows:
        """Own queries, all heads, and the keys that they see: as all_gather has it. Selection and the indexer's loss
        always work like this.
        """
        seen = self._visible(self.q.rows, self._keys.rows["kv"].gathered)
        return GatheredRows(None, KEYS, (0, self.problem.heads_q), *seen)

    @cached_property
    @torch.inference_mode(False)
    def by_heads(self) -> GatheredRows:
        """All queries for the rank's share of the heads, and all keys that are seen: as a2a has it."""
        queries = self._queries_of_heads(indices_of_heads=False).rows["q"]
        rows = ranges(queries.gathered.start, queries.gathered.size)
        seen = self._visible(rows, self._keys_of_heads.rows["kv"].gathered)
        return GatheredRows(QUERIES, KEYS_OF_HEADS, queries.heads, *seen)

    @property
    def of_attention(self) -> GatheredRows:
        """That of the plan's `cp_comm_type`."""
        return self.by_heads if self.problem.cp_comm_type == "a2a" else self.by_rows

    @cached_property
    def _keys(self) -> RowMessages:
        """The messages of all_gather. All heads of a row travel together, so tensors of any heads may."""
        work = self.problem.workload
        forward, backward = plan_all_gather_rank(Visibility(replace(work, a2a_size=1)), self.rank)
        there, back = _with_all_heads(forward[0]), _with_all_heads(backward[-1])
        own = work.ownership.kv.of(self.rank).spans
        rows = ExchangedRows(own, together([own, *(Spans(m.pieces.start, m.pieces.stop) for m in there.recvs)]))
        return RowMessages({"kv": rows}, (there,), {"dkv": rows}, (back,))

    @cached_property
    def _keys_of_heads(self) -> RowMessages:
        work = self.problem.workload
        seen = work.areas.keys.merged() if len(work.areas) else together([])
        travel = [work.ownership.kv.of(rank).within(*seen).spans for rank in range(work.cp_size)]
        keys = _RowsOfHeads(travel, [kv for _, kv in self._heads], self.rank)
        rows = ExchangedRows(work.ownership.kv.of(self.rank).spans, together(travel), work.heads_kv, keys.own_heads)
        once = sum(stop - start for start, stop in keys.heads) == work.heads_kv  # else gradients are sums of ranks
        mine, theirs = keys.messages("kv", 0)
        my_results, their_results = keys.messages("dkv", 0, complete=once)
        back = Step(their_results, my_results)
        return RowMessages({"kv": rows}, (Step(mine, theirs),), {"dkv": rows}, (back,))

    def _queries_of_heads(self, *, indices_of_heads: bool) -> RowMessages:
        work = self.problem.workload
        travel = [work.ownership.q.of(rank).spans for rank in range(work.cp_size)]
        queries = _RowsOfHeads(travel, [q for q, _ in self._heads], self.rank)
        of_indices = [kv if indices_of_heads else (0, 1) for _, kv in self._heads]
        indices = _RowsOfHeads(travel, of_indices, self.rank)
        where = travel[self.rank], Spans(*map(np.concatenate, zip(*travel, strict=True)))  # messages arrive in place
        rows = {"q": ExchangedRows(*where, work.heads_q, queries.own_heads)}
        rows["indices"] = ExchangedRows(*where, work.heads_kv if indices_of_heads else 1, indices.own_heads)
        (mine, theirs), (my_indices, their_indices) = queries.messages("q", 0), indices.messages("indices", 1)
        there = Step((*mine, *my_indices), (*theirs, *their_indices))
        my_results, their_results = queries.messages("out", 0, complete=True)
        return RowMessages(rows, (there,), {"out": rows["q"]}, (Step(their_results, my_results),))

    @cached_property
    def _heads(self) -> list[tuple[Heads, Heads]]:
        """Of each rank the query heads that it computes with, and their kv heads."""
        return [head_ranges(self.problem.workload, rank) for rank in range(self.problem.cp_size)]

    def _visible(self, rows: Column, keys: Spans) -> tuple[Visible, int]:
        """The gathered keys that query rows see, and the most of one; both are rows of the global buffer."""
        held = ranges(keys.start, keys.size)
        starts, stops = intervals(self.problem.workload.areas, rows)
        _, positions = row_positions(self.problem, "kv", starts)
        positions = np.where(starts < stops, positions, 0)
        place = np.searchsorted(held, starts)
        columns = (place, place + stops - starts, positions)
        seen = Visible(*(torch.from_numpy(x.astype(np.int32)).to(self.device) for x in columns))
        return seen, int((stops - starts).sum(axis=1).max(initial=0))


def sparse_tables(plan: Plan) -> SparseTables:
    """A plan's tables of sparse attention, for its batch."""
    return plan.batch.tables_of(SparseTables)


def intervals(areas: Areas, rows: Column) -> tuple[Column, Column]:
    """The keys that each query row sees, as intervals of rows of the global buffer: (starts, stops), [n, s], ascending;
    behind the last of a row equal ones. Those that meet are one.

    >>> from cp_ref.schedules.areas import areas_of_windows
    >>> areas = areas_of_windows(((0, 4, 0, 2, -1, -1), (0, 4, 3, 7, -1, 0)))   # two first keys, and a causal part
    >>> starts, stops = intervals(areas, np.array([0, 3, 9]))
    >>> starts.tolist(), stops.tolist()
    ([[0, 3], [0, 3], [0, 0]], [[2, 4], [2, 7], [0, 0]])
    """
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    first, count = runs(ordered[1:] != ordered[:-1] + 1, len(ordered))
    area, _, begin, end = areas.queries.overlaps(Spans(ordered[first], ordered[first] + count))
    row = ranges(begin, end - begin)
    area = np.repeat(area, end - begin)
    start = np.maximum(areas.k_start[area], row + areas.lo[area])
    stop = np.minimum(areas.k_stop[area], row + areas.hi[area] + 1)
    some = start < stop
    number, start, stop = order[np.searchsorted(ordered, row[some])], start[some], stop[some]

    by_row = np.lexsort((start, number))
    number, start, stop = number[by_row], start[by_row], stop[by_row]
    begins = (number[1:] != number[:-1]) | (start[1:] != stop[:-1])
    head, many = runs(begins, len(number))
    number, start, stop = number[head], start[head], stop[head + many - 1]

    place, times = runs(number[1:] != number[:-1], len(number))
    column = np.arange(len(number)) - np.repeat(place, times)
    shape = len(rows), int(times.max(initial=1))
    starts, stops = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    starts[number, column], stops[number, column] = start, stop
    return starts, stops


def _with_all_heads(step: Step) -> Step:
    """The messages of a step, with all heads of their rows as one."""

    def changed(messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(replace(m, pieces=Pieces.of(Spans(m.pieces.start, m.pieces.stop), ALL_HEADS)) for m in messages)

    return Step(changed(step.sends), changed(step.recvs))


def together(some: Sequence[Spans]) -> Spans:
    """The rows of all of these, each once, in order."""
    none = np.empty(0, dtype=np.int64)
    joined = Spans(*(np.concatenate([none, *columns]) for columns in zip((none, none), *some, strict=True)))
    return joined.merged() if len(joined) else joined


class _RowsOfHeads(NamedTuple):
    """Rows that each rank sends for the heads that others compute with.

    Attributes:
        travel: of each rank, its rows that travel.
        heads: of each rank, those that it computes with.
        rank: this one.
    """

    travel: Sequence[Spans]
    heads: Sequence[Heads]
    rank: int

    @property
    def own_heads(self) -> Heads:
        """The heads that the rank computes with."""
        return self.heads[self.rank]

    def messages(
        self, kind: str, tag: int, *, complete: bool = False
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """With each peer: those of the own rows for its heads, and those of its rows for the own heads."""
        peers = [(self.rank + n) % len(self.travel) for n in range(1, len(self.travel))]  # the next one first

        def of(pairs: Iterable[tuple[int, int, int]]) -> tuple[Message, ...]:
            return tuple(
                Message(kind, peer, tag, Pieces.of(self.travel[rows], self.heads[heads]), complete)
                for peer, rows, heads in pairs
                if len(self.travel[rows])
            )

        return of((peer, self.rank, peer) for peer in peers), of((peer, peer, self.rank) for peer in peers)
