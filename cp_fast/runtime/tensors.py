"""The tensors of buffers: their shapes, their allocation, and views of their rows and heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from cp_fast.backends import LaunchOptions
from cp_fast.compile.program import BufferSpec
from cp_ref.contract.group import Group, Pending
from cp_ref.contract.scores import ScoreTensors
from cp_ref.contract.tensors import wide_dtype

__all__ = ["Allocation", "Operation", "Shapes", "State", "Tensors"]


class Tensors(NamedTuple):
    """The tensors of a buffer: by row [n, h, d] (stacked: [parts, n, h, d]), by column [h, n] (stacked: one a part)."""

    rows: Sequence[torch.Tensor]
    columns: Sequence[torch.Tensor]


class State:
    """One call of a pass: the tensors of its buffers, and the messages in flight."""

    __slots__ = ("arrived", "buffers", "gathered", "group", "inputs", "max_logit", "options", "pending")

    def __init__(self, buffers: int, group: Group, options: LaunchOptions, inputs: ScoreTensors | None = None) -> None:
        self.buffers: list[Any] = [None] * buffers  # Tensors, or None before and after their use.
        self.gathered: dict[int, tuple[Any, Tensors]] = {}  # the last rows gathered from each own buffer
        self.pending: Pending | None = None
        self.arrived: list[tuple[torch.Tensor, torch.Tensor]] = []  # Columns to be filled once messages arrive.
        self.max_logit: list[tuple[int, torch.Tensor | None]] = []  # First head, and the logit of a launch.
        self.group, self.options = group, options
        self.inputs = inputs  # Of scores that depend on the places of their rows and heads.


Operation = Callable[[State], None]


@lru_cache
def _new_empty(dtype: torch.dtype, device: torch.device) -> Callable[[Sequence[int]], torch.Tensor]:
    """A function that allocates tensors of a shape, as `torch.empty` does, which reads a dtype and a device each time.

    >>> _new_empty(torch.float16, torch.device("cpu"))((2, 3)).shape
    torch.Size([2, 3])
    """
    return torch.empty(0, dtype=dtype, device=device).new_empty


class Allocation(NamedTuple):
    """The shapes and dtypes of a buffer's tensors."""

    rows: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    wide: torch.dtype
    device: torch.device

    def empty(self, dtypes: Sequence[torch.dtype] = ()) -> Tensors:
        """Tensors with any values. `dtypes`: one for each tensor by row."""
        rows, columns, dtype, wide, device = self
        each = zip(rows, dtypes or [dtype] * len(rows), strict=True)
        return Tensors(
            [_new_empty(dtype, device)(shape) for shape, dtype in each],
            [_new_empty(wide, device)(shape) for shape in columns] if columns else (),
        )

    def nothing(self, dtypes: Sequence[torch.dtype] = ()) -> Tensors:
        """The result of no pairs: zeros, and an lse of -inf. `dtypes`: one for each tensor by row."""
        dtypes = dtypes or [self.dtype] * len(self.rows)
        return Tensors(
            [
                torch.zeros(shape, dtype=dtype, device=self.device)
                for shape, dtype in zip(self.rows, dtypes, strict=True)
            ],
            [torch.full(shape, float("-inf"), dtype=self.wide, device=self.device) for shape in self.columns],
        )


@dataclass(frozen=True)
class Shapes:
    """The sizes shared by all calls of one shape.

    Attributes:
        sizes: rows of the rank's q, and of its k and v.
        dims: by kind, the head dimensions of the tensors by row.
        spare_rows: see `Programs`.
        has_dlse: whether the gradient of out comes with one of lse.
    """

    sizes: tuple[int, int]
    dims: dict[str, tuple[int, ...]]
    spare_rows: int
    dtype: torch.dtype
    device: torch.device
    has_dlse: bool

    def rows(self, spec: BufferSpec) -> int:
        """The rows of a buffer, spare ones included."""
        written = spec.role in ("operand", "sum", "result") and not spec.parts
        rows = self.own_rows(spec) if spec.rows is None else spec.rows
        return rows + written * self.spare_rows

    def own_rows(self, spec: BufferSpec) -> int:
        """The rows of the rank's own tensors of this kind."""
        return self.sizes[spec.kind in ("kv", "dkv")]

    def allocation(self, spec: BufferSpec, rows: int | None = None, *, stacked: bool = True) -> Allocation:
        """The allocation of a buffer, or of a message with this many of its rows, of one part if it is stacked."""
        n, heads = self.rows(spec) if rows is None else rows, spec.all_heads[1]
        parts = (spec.parts,) if spec.parts and stacked else ()
        by_row = tuple((*parts, n, heads, d) for d in self.dims[spec.kind])
        has_column = spec.kind in ("res", "out") or (spec.kind == "do" and self.has_dlse)
        wide = wide_dtype(self.dtype)
        dtype = wide if spec.dtype == "wide" else self.dtype
        return Allocation(by_row, ((heads, n),) * (has_column * (parts or (1,))[0]), dtype, wide, self.device)
