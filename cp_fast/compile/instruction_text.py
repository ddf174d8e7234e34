"""An executable plan as text: a line for each buffer that matters and for each instruction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cp_fast.compile.executable_plan import PassPlan
from cp_fast.compile.instructions import Accumulate, BufferSpec, Copy, Free, Instruction, Launch, Recv, Send, View, Wait

__all__ = ["lines_of"]


def lines_of(plan: PassPlan[Any]) -> Iterator[str]:
    """The instructions of one pass, a line each, by step. A line that a compiler pass made ends with its name."""
    yield plan.direction
    step = -1
    for number, one in enumerate(plan.instructions):
        if one.step != step:
            step = one.step
            yield f"  step {step}"
        line = f"  {number:3d} {_instruction(plan.buffers, one)}"
        yield line if one.made_by == "lower" else f"{line:<74} ; {one.made_by}"


def _instruction(buffers: Sequence[BufferSpec], one: Instruction[Any]) -> str:
    if isinstance(one, Send):
        part = "" if one.part is None else f" part {one.part}"
        return f"send        {_view(buffers, one.source)}{part} -> rank {one.peer}, tag {one.tag}"
    if isinstance(one, Recv):
        rows = "" if one.rows is None else " " + " ".join(map(_rows, one.rows))
        part = "" if one.part is None else f" part {one.part}"
        return f"recv        {_buffer(buffers, one.buffer)}{rows}{part} <- rank {one.peer}, tag {one.tag}"
    if isinstance(one, Wait):
        return "wait"
    if isinstance(one, Copy):
        heads = f" heads from {', '.join(map(str, one.first_heads))}" if one.first_heads else ""
        return f"copy        {_view(buffers, one.source)} -> {_view(buffers, one.target)}{heads}"
    if isinstance(one, Launch):
        operands = ", ".join(_view(buffers, view) for view in one.operands)
        results = ", ".join(_buffer(buffers, number) for number in one.results)
        window = f"window {_side(one.batch.left)}:{_side(one.batch.right)}"
        return f"launch      {operands} {window} -> {results}"
    if isinstance(one, Accumulate):
        return f"accumulate  {_view(buffers, one.source)} -> {_view(buffers, one.target)}"
    assert isinstance(one, Free)
    return "free        " + ", ".join(f"b{number}" for number in one.buffers)


def _side(side: int | None) -> str:
    return "*" if side is None else str(side)


def _buffer(buffers: Sequence[BufferSpec], number: int) -> str:
    spec = buffers[number]
    return f"b{number}:{spec.kind}" + ("" if spec.role == "operand" else f" {spec.role}")


def _view(buffers: Sequence[BufferSpec], view: View[Any]) -> str:
    spec, text = buffers[view.buffer], _buffer(buffers, view.buffer)
    if view.rows is not None:
        text += _rows(view.rows)
    return text if view.heads == spec.all_heads else f"{text} heads {view.heads[0]}:{view.heads[1]}"


def _rows(rows: Any) -> str:
    """Rows of a buffer: a slice, or how many an index table has; of a draft, the number of the table.

    >>> _rows(slice(2, 6)), _rows(range(5))
    ('[2:6]', '[5 rows by index]')
    """
    if isinstance(rows, slice):
        return f"[{rows.start}:{rows.stop}]"
    return f"[table {rows}]" if isinstance(rows, int) else f"[{len(rows)} rows by index]"
