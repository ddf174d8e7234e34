"""The messages of states: maps packed in one tensor, a row for each slot, sent and received in the steps of a schedule.

A row is [M, B] of all heads, flat. What is sent is a view of rows, or a copy where they do not lie together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cp_fast.linear.affine_maps import Maps
from cp_fast.linear.state_tables import StateTables, Transfer
from cp_ref.common.groups.process_groups import during
from cp_ref.spec import Group, Parcel, Pending

__all__ = ["MapExchange"]


class MapExchange:
    """The maps of one pass: posted when made, complete after `wait`.

    own: the maps of the chosen fragments.
    """

    def __init__(self, tables: StateTables, own: Maps, group: Group, where: str) -> None:
        self._tables, self._group, self._where = tables, group, where
        self._shapes = own.m.shape[1:], own.b.shape[1:]
        self._pending: tuple[Pending, list[torch.Tensor]] | None = None
        self._done = 0
        if not tables.steps:  # nothing travels: no rows
            self._maps: Maps | None = own
            return
        self._maps = None
        size_m, size_b = (shape.numel() for shape in self._shapes)
        self._rows = own.b.new_empty(tables.slots, size_m + size_b)
        c = len(own.b)
        torch.cat([own.m.reshape(c, size_m), own.b.reshape(c, size_b)], dim=1, out=self._rows[:c])
        self._post()

    def _post(self) -> None:
        sends, recvs = self._tables.steps[self._done]
        given = [self._of(send) for send in sends]
        out = [Parcel(send.peer, send.tag, x) for send, x in zip(sends, given, strict=True)]
        back = [Parcel(recv.peer, recv.tag, self._of(recv)) for recv in recvs]
        with during(self._where):
            self._pending = self._group.exchange(out, back), given
        self._done += 1

    def _of(self, transfer: Transfer) -> torch.Tensor:
        if transfer.scattered is not None:
            return self._rows.index_select(0, transfer.scattered)
        return self._rows[transfer.first : transfer.first + transfer.count]

    def wait(self, meanwhile: Callable[[], None] | None = None) -> Maps:
        """The maps by slot, after all steps. meanwhile: work to do while the first messages travel."""
        if meanwhile is not None:
            meanwhile()
        while self._pending is not None:
            with during(self._where):
                self._pending[0].wait()
            self._pending = None
            if self._done < len(self._tables.steps):
                self._post()
        if self._maps is None:
            m, b = self._rows.split([shape.numel() for shape in self._shapes], dim=1)
            self._maps = Maps(m.unflatten(1, self._shapes[0]), b.unflatten(1, self._shapes[1]))
        return self._maps
