"""Rows and bytes of a pass: of its buffers, and of the views that its instructions have of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cp_fast.compile.index_tables import Tables
from cp_fast.compile.program import Program, View
from cp_ref.schedules.problem import Problem, slice_rows
from cp_ref.schedules.schedule import side_of
from cp_ref.schedules.verify.costs import ITEM_BYTES

__all__ = ["PassBytes", "is_gathered"]


def is_gathered(view: View[Any]) -> bool:
    """Whether rows are read by an index table."""
    return not (view.rows is None or isinstance(view.rows, slice))


@dataclass(frozen=True)
class PassBytes:
    """The sizes of one pass of a problem's plan. `wide`: in the dtype of sums, not in that of the inputs."""

    problem: Problem
    plan: Program[Any]
    tables: Tables

    @property
    def item(self) -> int:
        """Bytes of a number of the inputs' dtype."""
        return ITEM_BYTES[self.problem.dtype]

    @property
    def wide_item(self) -> int:
        """Bytes of a number of the sums' dtype."""
        return max(self.item, 4)

    def row(self, kind: str, *, wide: bool = False) -> int:
        """Bytes of one row and head of all tensors of a kind, with its lse."""
        d_qk, d_v, item = self.problem.d_qk, self.problem.d_v, self.wide_item if wide else self.item
        dims = {"q": d_qk, "kv": d_qk + d_v, "do": d_v, "res": d_v, "out": d_v, "dq": d_qk, "dkv": d_qk + d_v}[kind]
        return dims * item + (self.wide_item if kind in ("res", "out") else 0)

    def rows(self, view: View[Any]) -> int:
        """The rows of a view."""
        if view.rows is not None:
            return self.tables.count(view.rows)
        spec = self.plan.buffers[view.buffer]
        if spec.rows is not None:
            return spec.rows
        batch = 1 if self.problem.qkv_format == "thd" else len(self.problem.sequences)
        return batch * slice_rows(self.problem, side_of(spec.kind))

    def bytes(self, view: View[Any], *, wide: bool = False) -> int:
        """The bytes of a view, in all parts of its buffer."""
        spec = self.plan.buffers[view.buffer]
        heads = max(spec.parts, 1) * (view.heads[1] - view.heads[0])
        return self.rows(view) * heads * self.row(spec.kind, wide=wide)

    def whole(self, number: int) -> View[Any]:
        """All of a buffer."""
        return View(number, None, self.plan.buffers[number].all_heads)

    def has_all_rows(self, view: View[Any]) -> bool:
        """Whether a view has all rows of its buffer."""
        return self.rows(view) == self.rows(self.whole(view.buffer))
