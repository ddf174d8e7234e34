"""A rank's tables for the sparse attention of one batch: the rows that travel, their places, the visible keys of each
row, and the messages.

Gathered rows have the order of the global buffer. So those of a document lie side by side, and a run of visible keys is
a run of gathered rows:

    two causal documents of 4 and 2 tokens, rank 0 of two, dual_chunk     the own rows are 0, 3, 4
        gathered keys       global row  0 1 2 3 4                         rows 1 and 2 arrive, row 5 nobody here sees
                            position    0 1 2 3 0
        the own rows see    [0:1] [0:4] [4:5]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from cp_fast.api.plan import Plan
from cp_fast.kernels.sparse.sparse_kernels import Visible
from cp_fast.runtime.prepared_exchange import Exchanges
from cp_fast.runtime.slices import OwnRows, Rows, rows_of, taken
from cp_ref.groups.group import Group, Parcel
from cp_ref.schedules.areas import Areas
from cp_ref.schedules.ownership import Fragments
from cp_ref.schedules.planners.a2a import head_ranges
from cp_ref.schedules.planners.all_gather import plan_all_gather_rank
from cp_ref.schedules.planners.ring_members import RingMembers
from cp_ref.schedules.problem import Problem, row_positions
from cp_ref.schedules.schedule import Heads, Message
from cp_ref.schedules.table import Column, Spans, ranges, runs

__all__ = [
    "GatheredRows",
    "KeyExchange",
    "RowsOfHeads",
    "SparseTables",
    "Travel",
    "intervals",
    "sparse_tables",
]


class Travel(NamedTuple):
    """The rows that travel between this rank and the others, and the places of all that are gathered.

    Attributes:
        size: gathered rows.
        own: where the own rows lie among them.
        sends: by peer, the own rows that go to it.
        recvs: by peer, how many rows come from it, and where they lie.
    """

    size: int
    own: Rows
    sends: tuple[tuple[int, int, Rows], ...]  # peer, how many, which
    recvs: tuple[tuple[int, int, Rows], ...]

    @property
    def stays(self) -> bool:
        """Whether the gathered rows are the own ones, as they lie."""
        return not self.sends and not self.recvs and isinstance(self.own, slice)


class GatheredRows(NamedTuple):
    """The queries and keys that a rank computes with, and who sees whom.

    Attributes:
        q: the queries' way; None where they stay.
        heads: of each rank: its query heads and its kv heads; all of them where the queries stay.
    """

    q: Travel | None
    kv: Travel
    visible: Visible
    heads: tuple[tuple[Heads, Heads], ...]


@dataclass(frozen=True, eq=False)
class SparseTables:
    """A rank's tables for the sparse attention of one batch, made when it is first called.

    Attributes:
        exchanges: of its messages.
    """

    problem: Problem
    rank: int
    device: torch.device
    exchanges: Exchanges = field(default_factory=Exchanges, repr=False)

    @cached_property
    @torch.inference_mode(False)
    def q(self) -> OwnRows:
        """The rank's query rows."""
        return OwnRows.of(self.problem, self.problem.workload.ownership.q.of(self.rank), self.device)

    @cached_property
    @torch.inference_mode(False)
    def kv(self) -> OwnRows:
        """The rank's rows of keys."""
        ownership = self.problem.workload.ownership
        return (
            self.q if ownership.kv is ownership.q else OwnRows.of(self.problem, ownership.kv.of(self.rank), self.device)
        )

    @cached_property
    @torch.inference_mode(False)
    def by_rows(self) -> GatheredRows:
        """Own queries, all heads, and the keys that they see: as all_gather has it. Selection and the indexer's loss
        always work like this.
        """
        members = RingMembers(replace(self.problem.workload, a2a_size=1))
        forward, _ = plan_all_gather_rank(members, self.rank)
        sends, recvs = ({m.peer: _global_rows(m) for m in some} for some in (forward[0].sends, forward[0].recvs))
        held, travel = _travel(self.kv.rows, sends, recvs, self.device)
        everything = (0, self.problem.heads_q), (0, self.problem.heads_kv)
        return GatheredRows(None, travel, self._visible(self.q.rows, held), (everything,) * self.problem.cp_size)

    @cached_property
    @torch.inference_mode(False)
    def by_heads(self) -> GatheredRows:
        """All queries for the rank's share of the heads, and all keys that are seen: as a2a has it."""
        work = self.problem.workload
        others = [rank for rank in range(work.cp_size) if rank != self.rank]
        queries = {rank: _fragment_rows(work.ownership.q.of(rank)) for rank in others}
        rows, q = _travel(self.q.rows, dict.fromkeys(others, np.sort(self.q.rows)), queries, self.device)

        seen = work.areas.keys.merged() if len(work.areas) else Spans(*(np.empty(0, dtype=np.int64),) * 2)
        keys = {rank: _fragment_rows(work.ownership.kv.of(rank).within(*seen)) for rank in range(work.cp_size)}
        mine = keys.pop(self.rank)
        held, kv = _travel(self.kv.rows, dict.fromkeys(others, mine), keys, self.device)
        heads = tuple(head_ranges(work, rank) for rank in range(work.cp_size))
        return GatheredRows(q, kv, self._visible(rows, held), heads)

    @property
    def of_attention(self) -> GatheredRows:
        """That of the plan's `cp_comm_type`."""
        return self.by_heads if self.problem.cp_comm_type == "a2a" else self.by_rows

    def _visible(self, rows: Column, held: Column) -> Visible:
        """The gathered keys that query rows see; both are rows of the global buffer."""
        starts, stops = intervals(self.problem.workload.areas, rows)
        _, positions = row_positions(self.problem, "kv", starts)
        positions = np.where(starts < stops, positions, 0)
        place = np.searchsorted(held, starts)
        columns = (place, place + stops - starts, positions)
        return Visible(*(torch.from_numpy(x.astype(np.int32)).to(self.device) for x in columns))


def sparse_tables(plan: Plan) -> SparseTables:
    """A plan's tables of sparse attention, for its batch."""
    return plan.compiled.tables_of(SparseTables)


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


def _travel(
    own: Column, sends: Mapping[int, Column], recvs: Mapping[int, Column], device: torch.device
) -> tuple[Column, Travel]:
    """The gathered rows, sorted, and their way. All columns are global rows; those of peers are sorted."""
    held = np.sort(np.concatenate([own, *recvs.values()]))
    order = np.argsort(own, kind="stable")

    def numbers(rows: Column) -> Rows:
        """Of own rows."""
        return rows_of(order[np.searchsorted(own, rows, sorter=order)], device)

    def places(rows: Column) -> Rows:
        return rows_of(np.searchsorted(held, rows), device)

    out = tuple((peer, len(rows), numbers(rows)) for peer, rows in sorted(sends.items()) if len(rows))
    back = tuple((peer, len(rows), places(rows)) for peer, rows in sorted(recvs.items()) if len(rows))
    return held, Travel(len(held), places(own), out, back)


def _fragment_rows(fragments: Fragments) -> Column:
    """The global rows of fragments, sorted."""
    return np.sort(ranges(fragments.start, fragments.stop - fragments.start))


def _global_rows(message: Message) -> Column:
    """The global rows of a message, sorted."""
    pieces = message.pieces
    return ranges(pieces.start, pieces.stop - pieces.start)


# ---- messages
#
# Rows are gathered where they are needed, and their results are brought back.
#
# gather      own rows [n, h, d] of this rank  ->  all rows that it computes with, for its heads [size, its heads, d]
# bring back  results for these                ->  the sum of all ranks' results for the own rows, all heads [n, h, d]


class RowsOfHeads(NamedTuple):
    """A tensor of rows [n, h, ...], and the heads of it that each rank computes with."""

    rows: torch.Tensor
    heads: Sequence[Heads]


class KeyExchange:
    """The messages of one call on this rank."""

    def __init__(self, group: Group, tables: SparseTables) -> None:
        self._group, self._tables, self._rank = group, tables, tables.rank

    def gather(self, where: str, travel: Travel, *tensors: RowsOfHeads) -> list[torch.Tensor]:
        """The rows that this rank computes with, of each tensor [size, its heads, ...]. `where`: for errors."""
        if travel.stays:
            return [_of(x.rows, x.heads[self._rank]) for x in tensors]
        sends, recvs = list[Parcel](), list[Parcel]()
        found, arriving = list[torch.Tensor](), list[tuple[torch.Tensor, Rows, torch.Tensor]]()
        for number, (rows, heads) in enumerate(tensors):
            mine = _of(rows, heads[self._rank])
            whole = mine.new_empty(travel.size, *mine.shape[1:])
            whole[travel.own] = mine
            found.append(whole)
            for peer, _, some in travel.sends:
                sends.append(Parcel(peer, number, taken(_of(rows, heads[peer]), some).contiguous()))
            for peer, count, places in travel.recvs:
                part = whole[places] if isinstance(places, slice) else mine.new_empty(count, *mine.shape[1:])
                recvs.append(Parcel(peer, number, part))
                if not isinstance(places, slice):
                    arriving.append((whole, places, part))
        self._exchange(where, sends, recvs)
        for whole, places, part in arriving:
            whole[places] = part
        return found

    def bring_back(self, where: str, travel: Travel, n: int, total: int, *tensors: RowsOfHeads) -> list[torch.Tensor]:
        """The sums of all ranks' results for the own rows, of each tensor [n, h, ...], added in the order of the ranks.

        tensors: results for gathered rows [size, its heads, ...], and the heads of each rank; all of them together are
            heads 0 to `total`.
        """
        if travel.stays and len({x.heads[self._rank] for x in tensors} | {(0, total)}) == 1:
            return [x.rows for x in tensors]
        sends, recvs = list[Parcel](), list[Parcel]()
        found, adds = list[torch.Tensor](), list[tuple[int, torch.Tensor, Rows, Heads, torch.Tensor]]()
        for number, (rows, heads) in enumerate(tensors):
            whole = rows.new_zeros(n, total, *rows.shape[2:])
            found.append(whole)
            mine = taken(rows, travel.own)
            adds.append((self._rank, whole, slice(None), heads[self._rank], mine))
            for peer, _, places in travel.recvs:
                sends.append(Parcel(peer, number, taken(rows, places).contiguous()))
            for peer, count, some in travel.sends:
                first, last = heads[peer]
                part = rows.new_empty(count, last - first, *rows.shape[2:])
                recvs.append(Parcel(peer, number, part))
                adds.append((peer, whole, some, heads[peer], part))
        self._exchange(where, sends, recvs)
        for _, whole, some, (first, last), part in sorted(adds, key=lambda add: add[0]):
            whole[some, first:last] += part  # no row is twice in one message
        return found

    def _exchange(self, where: str, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        sends, recvs = ([x for x in some if x.tensor.numel()] for some in (sends, recvs))
        if not sends and not recvs:
            return
        self._tables.exchanges.post(self._group, where, sends, recvs).wait()


def _of(rows: torch.Tensor, heads: Heads) -> torch.Tensor:
    first, last = heads
    return rows if (first, last) == (0, rows.shape[1]) else rows[:, first:last]
