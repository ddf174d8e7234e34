"""The rank's own results: sums with their sinks, and complete results that arrive."""

from __future__ import annotations

from dataclasses import replace

from cp_fast.compile.index_tables import RowKey
from cp_fast.compile.instructions import OWN, Accumulate, Copy, Instruction, View
from cp_fast.compile.lowering.pass_state import PassState

__all__ = ["add_sink", "arrived_results", "local_results"]

Instructions = list[Instruction[RowKey]]


def add_sink(state: PassState, total: int, rows: RowKey | None, step: int) -> Instructions:
    """The sink as one more partial result of a sum of outs."""
    spec = state.buffers.specs[total]
    if not state.shared.sink or spec.kind != "out":
        return []
    return [Accumulate(step, View(OWN["sink"], None, spec.heads), View(total, rows, spec.all_heads))]


def local_results(state: PassState, kind: str, step: int) -> Instructions:
    """The rank's own results, from its local sums: one of all heads is the result."""
    shared, sums = state.shared, state.sums.local[kind]
    heads = (0, shared.side(kind)[0])
    own = shared.work.ownership.q.of(shared.rank)
    rows = shared.tables.rows(own.row, own.stop - own.start)
    result = state.own_results[kind] = state.buffers.new(f"own {kind} result", kind, heads, None, "result")
    to_result = [Copy(step, state.buffers.whole(sums[heads]), state.buffers.whole(result))] if heads in sums else []
    if len(sums) == 1 and to_result and not state.stacked[kind]:
        return [*add_sink(state, sums[heads], rows, step), *to_result]
    joined = result
    if shared.sink and kind == "out":
        joined = state.buffers.new("own out, all heads", kind, heads, None, "sum", dtype="wide")
    found: Instructions = [
        Copy(step, state.buffers.whole(total), View(joined, None, some)) for some, total in sums.items()
    ]
    if joined != result:
        found += add_sink(state, joined, rows, step)
        found.append(Copy(step, state.buffers.whole(joined), state.buffers.whole(result)))
    return found


def arrived_results(state: PassState, kind: str, step: int) -> Instructions:
    """Copies of the received complete results into the rank's own."""
    result = state.buffers.whole(state.own_results[kind])
    return [
        Copy(step, state.buffers.whole(made), replace(result, rows=rows), first_heads)
        for made, rows, first_heads in state.stacked[kind]
    ]
