"""The messages of sparse attention: rows are gathered where they are needed, and their results are brought back.

gather      own rows [n, h, d] of this rank  ->  all rows that it computes with, for its heads [size, its heads, d]
bring back  results for these                ->  the sum of all ranks' results for the own rows, all heads [n, h, d]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan, messages_of
from cp_fast.sparse.sparse_tables import Rows, SparsePlan, Travel
from cp_ref.contract.group import Parcel
from cp_ref.schedules.schedule import Heads

__all__ = ["KeyExchange", "Sent"]


class Sent(NamedTuple):
    """A tensor of rows [n, h, ...], and the heads of it that each rank computes with."""

    rows: torch.Tensor
    heads: Sequence[Heads]


class KeyExchange:
    """The messages of one call on this rank."""

    def __init__(self, owner: Plan, cp: ContextParallel, plan: SparsePlan) -> None:
        self._group = messages_of(owner, cp.comm)
        self._plan, self._rank = plan, plan.rank

    def gather(self, where: str, travel: Travel, *tensors: Sent) -> list[torch.Tensor]:
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
                sends.append(Parcel(peer, number, _taken(_of(rows, heads[peer]), some)))
            for peer, count, places in travel.recvs:
                part = whole[places] if isinstance(places, slice) else mine.new_empty(count, *mine.shape[1:])
                recvs.append(Parcel(peer, number, part))
                if not isinstance(places, slice):
                    arriving.append((whole, places, part))
        self._exchange(where, sends, recvs)
        for whole, places, part in arriving:
            whole[places] = part
        return found

    def bring_back(self, where: str, travel: Travel, n: int, total: int, *tensors: Sent) -> list[torch.Tensor]:
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
            adds.append((self._rank, whole, slice(None), heads[self._rank], _taken(rows, travel.own)))
            for peer, _, places in travel.recvs:
                sends.append(Parcel(peer, number, _taken(rows, places)))
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
        self._plan.exchanges.post(self._group, where, sends, recvs).wait()


def _of(rows: torch.Tensor, heads: Heads) -> torch.Tensor:
    first, last = heads
    return rows if (first, last) == (0, rows.shape[1]) else rows[:, first:last]


def _taken(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    return (x[rows] if isinstance(rows, slice) else x.index_select(0, rows)).contiguous()
