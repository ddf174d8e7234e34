"""The device's side of a plan that is updated in place: one buffer of tables, written over by one copy."""

from __future__ import annotations

import torch

from cp_fast.planning.compile import DraftProgram, link_program
from cp_fast.planning.fit import fit
from cp_fast.planning.padded import PaddedTables
from cp_fast.planning.shape import Shape
from cp_fast.program import RankProgram

__all__ = ["FixedProgram"]


class FixedProgram:
    """The tables of a plan on the device, and the shape that they were made for."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._buffer: torch.Tensor | None = None

    def draft(self, draft: DraftProgram) -> tuple[DraftProgram, torch.Tensor]:
        """A batch's program in the plan's shape, and its tables as they are to lie on the device. For a GPU they are in
        pinned memory, a new one each time, which PyTorch keeps until the copy from it is done.

        Raises:
            ValueError: the batch does not fit.
        """
        fitted = fit(draft, self._shape)
        assert isinstance(fitted.tables, PaddedTables)
        return fitted, fitted.tables.on_host(pinned=self._device.type == "cuda")

    def overwrite(self, fitted: DraftProgram, tables: torch.Tensor) -> RankProgram:
        """Write what `draft` made to the device; the program that reads it there."""
        if self._buffer is None:
            self._buffer = torch.empty(tables.shape, dtype=tables.dtype, device=self._device)
        assert isinstance(fitted.tables, PaddedTables)
        assert self._buffer.shape == tables.shape
        self._buffer.copy_(tables, non_blocking=True)
        return link_program(fitted, fitted.tables.on_device(self._buffer))
