"""Bugs of the executor: what travels, what is accumulated in which dtype, in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.meta.mutants.model import Mutant, wrap, wrap_operation

__all__ = ["MUTANTS"]


def _rotated(self: Any, one: Any, unpack: Any) -> Any:
    """Results of other ranks' heads are put into the places of the next ones."""

    def wrong(state: Any) -> None:
        held = state.buffers[one.source.buffer]
        state.buffers[one.source.buffer] = held._replace(rows=[x.roll(1, 0) for x in held.rows])
        unpack(state)

    return wrong


def _rounded(self: Any, one: Any, convert: Any) -> Any:
    if self.buffers[one.target.buffer].role != "message":
        return convert

    def wrong(state: Any) -> None:
        convert(state)
        held = state.buffers[one.target.buffer]
        state.buffers[one.target.buffer] = held._replace(rows=[x.bfloat16().to(x.dtype) for x in held.rows])

    return wrong


def _columns_left_behind(post: Any, self: Any, group: Any, sends: Any, recvs: Any) -> Any:
    """The lse of the first row travels for all rows."""
    return post(self, group, [x[:, :1].expand(x.shape).contiguous() if x.ndim == 2 else x for x in sends], recvs)


def _first_largest(forward: Any, *arguments: Any) -> Any:
    done = forward(*arguments)
    return done if done.max_logit is None else done._replace(max_logit=done.max_logit[:1].expand(done.max_logit.shape))


def _last_taken(self: Any, view: Any, take: Any) -> Any:
    """Rows that were gathered for one launch are believed to be those of the next."""
    if self.buffers[view.buffer].role != "own" or self._is_whole(view):
        return take

    def wrong(state: Any) -> Any:
        last = state.gathered.get(view.buffer)
        return last[1] if last is not None and last[0][-1] == view.heads else take(state)

    return wrong


def _sums_in_the_inputs_dtype(self: Any, one: Any, accumulate: Any, **_: Any) -> Any:
    def wrong(state: Any) -> None:
        accumulate(state)
        rows, columns = state.buffers[one.target.buffer]
        for x in (*rows, *columns):
            x.copy_(x.to(self.shapes.dtype))

    return wrong


def _keys_travel_as_values(self: Any, send: Any, give: Any) -> Any:
    """Keys and values are exchanged."""
    return (lambda state: give(state)[::-1]) if self.buffers[send.source.buffer].kind == "kv" else give


def _last_row_left_out(self: Any, one: Any, move: Any) -> Any:
    if self.buffers[one.target.buffer].role != "operand":
        return move

    def wrong(state: Any) -> None:
        move(state)
        for x in state.buffers[one.target.buffer].rows:
            x[-1] = 0

    return wrong


def _columns_reversed(put: Any, into: Any, x: Any, rows: Any) -> None:
    put(into, x.flip(1), rows)


def _no_sink_on_the_way(self: Any, one: Any, accumulate: Any) -> Any:
    """Outs that leave their rank complete have no sink."""
    return accumulate if self.buffers[one.target.buffer].rows is None else lambda state: None


def _no_dlse_from_afar(self: Any, view: Any, take: Any) -> Any:
    spec = self.buffers[view.buffer]
    if (spec.kind, spec.role) != ("do", "operand"):
        return take

    def wrong(state: Any) -> Any:
        held = take(state)
        return held._replace(columns=[x.new_zeros(x.shape) for x in held.columns])

    return wrong


def _last_part_forgotten(self: Any, one: Any, accumulate: Any, *, last: bool) -> Any:
    """What is added to a sum last is not added."""

    def wrong(state: Any) -> None:
        if not last or state.buffers[one.target.buffer] is None:
            accumulate(state)

    return wrong


def _some_rows_are_all(accumulate: Any, self: Any, one: Any, **named: Any) -> Any:
    """A partial result with as many rows as the sum, in whatever order, becomes the sum."""
    rows = one.target.rows
    if isinstance(rows, torch.Tensor) and len(rows) == self.shapes.rows(self.buffers[one.target.buffer]):
        one = replace(one, target=replace(one.target, rows=None))
    return accumulate(self, one, **named)


def _arrived_lse_left_out(self: Any, one: Any, unpack: Any) -> Any:
    """Complete results that arrive bring no lse."""

    def wrong(state: Any) -> None:
        for x in state.buffers[one.source.buffer].columns:
            x.zero_()
        unpack(state)

    return wrong


_OPERATIONS = "cp_fast.runtime.operations.Operations"


def _operation(text: str, method: str, change: Any, tier: str = "logic") -> Mutant:
    return Mutant(text, f"{_OPERATIONS}.{method}", wrap_operation(change), tier)


MUTANTS: dict[str, Mutant] = {
    "heads-come-home-rotated": _operation("heads come home to the next rank's place", "_unpack", _rotated),
    "results-rounded-before-they-travel": _operation(
        "results that are handed over are rounded to bfloat16", "_convert", _rounded
    ),
    "one-lse-travels-for-all-rows": Mutant(
        "of the lse that travels every row has the first row's",
        "cp_fast.runtime.prepared_exchange._ByGroup.post",
        wrap(_columns_left_behind),
        "logic",
    ),
    "one-max-logit-for-all-heads": Mutant(
        "max_logit is the first head's", "cp_fast.runtime.run.CompiledCall.forward", wrap(_first_largest), "logic"
    ),
    "rows-taken-for-the-last-ones": _operation(
        "a launch gets the rows of the one before", "_taker", _last_taken, "probes"
    ),
    "accumulators-in-the-inputs-dtype": _operation(
        "partial results are accumulated in the inputs' dtype", "accumulate", _sums_in_the_inputs_dtype, "budget"
    ),
    "keys-travel-as-values": _operation("keys arrive as values, and values as keys", "_giver", _keys_travel_as_values),
    "last-row-not-copied": _operation("of rows that are put together the last is zero", "_move", _last_row_left_out),
    "columns-reversed": Mutant(
        "the lse of rows that are put together is in reverse order",
        "cp_fast.runtime.operations.put_columns",
        wrap(_columns_reversed),
        "logic",
    ),
    "no-sink-on-the-way": _operation("outs that travel complete have no sink", "_accumulate_sink", _no_sink_on_the_way),
    "no-dlse-from-afar": _operation(
        "the gradient of the lse does not travel with that of out", "_taker", _no_dlse_from_afar
    ),
    "last-part-forgotten": _operation("the last partial result is not added", "accumulate", _last_part_forgotten),
    "rows-in-any-order-are-the-total": Mutant(
        "a partial result that has every row, in any order, becomes the sum",
        f"{_OPERATIONS}.accumulate",
        wrap(_some_rows_are_all),
        "logic",
    ),
    "no-lse-of-complete-results": _operation(
        "outs that arrive complete have lse zero", "_unpack", _arrived_lse_left_out
    ),
}
