"""A plan with its tables on the device: every key becomes its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cp_fast.backends import VarlenBatch
from cp_fast.backends.backend_protocol import Places
from cp_fast.compile.executable_plan import ExecutablePlan, PassPlan
from cp_fast.compile.index_tables import Uploaded
from cp_fast.compile.instructions import Instruction, Launch, View, with_views
from cp_fast.compile.tiles.groups import SegmentKeys
from cp_fast.movers.rows import Rows

__all__ = ["linked"]


def linked(plan: ExecutablePlan[Any], tables: Uploaded) -> ExecutablePlan[Rows]:
    """The plan with its tables on the device."""
    batches: dict[SegmentKeys, VarlenBatch] = {}  # Shared by both passes.

    def view(one: View[Any]) -> View[Rows]:
        return one if one.rows is None else View(one.buffer, tables.rows(one.rows), one.heads)

    def batch(keys: SegmentKeys) -> VarlenBatch:
        if keys not in batches:
            bound_q, bound_kv = keys.bounds or (None, None)
            cu_q, device_q = tables.lengths(keys.cu_q, bound_q)
            cu_kv, device_kv = tables.lengths(keys.cu_kv, bound_kv)
            batch = VarlenBatch(cu_q, cu_kv, keys.left, keys.right, device_q, device_kv)
            if keys.places is not None:
                (host_q, of_q), (_, rows), (host_kv, of_kv), (_, columns) = map(tables.lengths, keys.places)
                batch = replace(batch, places=Places(host_q[:-1], host_kv[:-1], of_q, rows, of_kv, columns))
            batches[keys] = batch
        return batches[keys]

    def instruction(one: Instruction[Any]) -> Instruction[Rows]:
        one = with_views(one, view)
        return replace(one, batch=batch(one.batch)) if isinstance(one, Launch) else one

    def of_pass(one: PassPlan[Any]) -> PassPlan[Rows]:
        return replace(one, instructions=tuple(map(instruction, one.instructions)))

    real = tables.rows(plan.real_q_rows)
    if isinstance(real, torch.Tensor) and real.dtype != torch.bool:
        real = real.long()  # for PyTorch's own operators
    positions = None if plan.position_ids is None else tables.rows(plan.position_ids)
    forward, backward = of_pass(plan.forward), of_pass(plan.backward)
    return replace(plan, forward=forward, backward=backward, real_q_rows=real, position_ids=positions)
