"""A plan with its tables on the device: every key becomes its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cp_fast.backends import VarlenBatch
from cp_fast.compile.executable_plan import ExecutablePlan, PassPlan
from cp_fast.compile.index_tables import Uploaded
from cp_fast.compile.instructions import Instruction, Launch, View, with_views
from cp_fast.compile.tiles.groups import SegmentKeys
from cp_fast.runtime.row_selection import Rows

__all__ = ["linked"]


def linked(plan: ExecutablePlan[Any], tables: Uploaded) -> ExecutablePlan[Rows]:
    """The plan with its tables on the device."""
    link = _Link(tables)
    real = tables.rows(plan.real_q_rows)
    if isinstance(real, torch.Tensor) and real.dtype != torch.bool:
        real = real.long()  # for PyTorch's own operators
    positions = None if plan.position_ids is None else tables.rows(plan.position_ids)
    forward, backward = link.of_pass(plan.forward), link.of_pass(plan.backward)
    return replace(plan, forward=forward, backward=backward, real_q_rows=real, position_ids=positions)


class _Link:
    """The tables, and the batches of segments shared by both passes."""

    def __init__(self, tables: Uploaded) -> None:
        self._tables = tables
        self._batches: dict[SegmentKeys, VarlenBatch] = {}

    def of_pass(self, plan: PassPlan[Any]) -> PassPlan[Rows]:
        return replace(plan, instructions=tuple(map(self._instruction, plan.instructions)))

    def _instruction(self, one: Instruction[Any]) -> Instruction[Rows]:
        one = with_views(one, self._view)
        return replace(one, batch=self._batch(one.batch)) if isinstance(one, Launch) else one

    def _view(self, view: View[Any]) -> View[Rows]:
        return view if view.rows is None else View(view.buffer, self._tables.rows(view.rows), view.heads)

    def _batch(self, keys: SegmentKeys) -> VarlenBatch:
        if keys not in self._batches:
            bound_q, bound_kv = keys.bounds or (None, None)
            cu_q, device_q = self._tables.lengths(keys.cu_q, bound_q)
            cu_kv, device_kv = self._tables.lengths(keys.cu_kv, bound_kv)
            self._batches[keys] = VarlenBatch(cu_q, cu_kv, keys.left, keys.right, device_q, device_kv)
        return self._batches[keys]
