"""The device side of a plan updated in place: one buffer of tables, overwritten by one copy."""

from __future__ import annotations

from typing import Any

import torch

from cp_fast.compile.executable_plan import ExecutablePlan
from cp_fast.compile.in_place.fit import fit
from cp_fast.compile.in_place.padded_tables import PaddedTables
from cp_fast.compile.in_place.shape import Shape
from cp_fast.compile.link import linked
from cp_fast.compile.lowering.lower_schedule import Draft
from cp_fast.movers.rows import Rows
from cp_ref.schedules.problem import Problem

__all__ = ["Fitted", "FixedTables"]

Fitted = tuple[ExecutablePlan[Any], PaddedTables, torch.Tensor]


class FixedTables:
    """The tables of a plan on the device, and their shape."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._buffer: torch.Tensor | None = None
        self._taken = False

    def take(self) -> None:
        """Mark the tables as used by the calling plan. Two plans cannot share them: an update of one would change both.

        Raises:
            TypeError: they are another plan's.
        """
        if self._taken:
            raise TypeError(
                "a cp_fast.Plan that is updated in place cannot be copied, as both would have the same tables; make "
                "another one by make_plan"
            )
        self._taken = True

    def fitted(self, draft: Draft, problem: Problem) -> Fitted:
        """A batch's plan in the plan's shape, and its tables in their device layout. For a GPU they are in new pinned
        memory each time, which PyTorch keeps until the copy from it is done.

        Raises:
            ValueError: the batch does not fit.
        """
        plan, tables = fit(draft, problem, self._shape)
        return plan, tables, tables.on_host(pinned=self._device.type == "cuda")

    def overwrite(self, fitted: Fitted) -> ExecutablePlan[Rows]:
        """Write the result of `fitted` to the device; returns the plan that reads it there."""
        plan, tables, host = fitted
        if self._buffer is None:
            self._buffer = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        assert self._buffer.shape == host.shape
        self._buffer.copy_(host, non_blocking=True)
        return linked(plan, tables.on_device(self._buffer))
