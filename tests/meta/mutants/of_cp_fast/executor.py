"""Bugs of the executor: what travels, what is accumulated in which dtype, in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.meta.mutants.model import Mutant, wrap, wrap_operation

__all__ = ["MUTANTS"]


def _rotated(buffers: Any, some: Any, unpack: Any) -> Any:
    """Results of other ranks' heads are put into the places of the next ones."""

    def wrong(state: Any) -> None:
        for one in some:
            held = state.buffers[one.source.buffer]
            state.buffers[one.source.buffer] = held._replace(rows=[x.roll(1, 0) for x in held.rows])
        unpack(state)

    return wrong


def _rounded(buffers: Any, one: Any, convert: Any) -> Any:
    if buffers.specs[one.target.buffer].role != "message":
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


def _last_taken(buffers: Any, view: Any, take: Any) -> Any:
    """Rows that were gathered for one launch are believed to be those of the next."""
    if buffers.specs[view.buffer].role != "own" or buffers.is_whole(view):
        return take

    def wrong(state: Any) -> Any:
        last = state.gathered.get(view.buffer)
        return last[1] if last is not None and last[0][-1] == view.heads else take(state)

    return wrong


def _sums_in_the_inputs_dtype(buffers: Any, one: Any, accumulate: Any, **_: Any) -> Any:
    def wrong(state: Any) -> None:
        accumulate(state)
        rows, columns = state.buffers[one.target.buffer]
        for x in (*rows, *columns):
            x.copy_(x.to(buffers.shapes.dtype))

    return wrong


def _keys_travel_as_values(buffers: Any, send: Any, give: Any) -> Any:
    """Keys and values are exchanged."""
    return (lambda state: give(state)[::-1]) if buffers.specs[send.source.buffer].kind == "kv" else give


def _last_row_left_out(buffers: Any, some: Any, move: Any) -> Any:
    targets = [one.target.buffer for one in some if buffers.specs[one.target.buffer].role == "operand"]

    def wrong(state: Any) -> None:
        move(state)
        for x in (x for target in targets for x in state.buffers[target].rows):
            x[-1] = 0

    return wrong


def _columns_reversed(put: Any, into: Any, x: Any, *where: Any) -> None:
    put(into, x.flip(1), *where)


def _no_sink_on_the_way(buffers: Any, one: Any, accumulate: Any) -> Any:
    """Outs that leave their rank complete have no sink."""
    return accumulate if buffers.specs[one.target.buffer].rows is None else lambda state: None


def _no_dlse_from_afar(buffers: Any, view: Any, take: Any) -> Any:
    spec = buffers.specs[view.buffer]
    if (spec.kind, spec.role) != ("do", "operand"):
        return take

    def wrong(state: Any) -> Any:
        held = take(state)
        return held._replace(columns=[x.new_zeros(x.shape) for x in held.columns])

    return wrong


def _last_part_forgotten(buffers: Any, one: Any, accumulate: Any, *, of: Any) -> Any:
    """What is added to rows of a sum last is not added."""

    def wrong(state: Any) -> None:
        if of is None or id(one) not in of.rounded or state.buffers[one.target.buffer] is None:
            accumulate(state)

    return wrong


def _some_rows_are_all(accumulate: Any, buffers: Any, one: Any, **named: Any) -> Any:
    """A partial result with as many rows as the sum, in whatever order, becomes the sum."""
    rows = one.target.rows
    if isinstance(rows, torch.Tensor) and len(rows) == buffers.shapes.rows(buffers.specs[one.target.buffer]):
        one = replace(one, target=replace(one.target, rows=None))
    return accumulate(buffers, one, **named)


def _arrived_lse_left_out(buffers: Any, some: Any, unpack: Any) -> Any:
    """Complete results that arrive bring no lse."""

    def wrong(state: Any) -> None:
        for x in (x for one in some for x in state.buffers[one.source.buffer].columns):
            x.zero_()
        unpack(state)

    return wrong


_RUNTIME = "cp_fast.runtime"


def _operation(text: str, function: str, change: Any, tier: str = "logic") -> Mutant:
    return Mutant(text, f"{_RUNTIME}.{function}", wrap_operation(change), tier)


MUTANTS: dict[str, Mutant] = {
    "heads-come-home-rotated": _operation("heads come home to the next rank's place", "operations._unpack", _rotated),
    "results-rounded-before-they-travel": _operation(
        "results that are handed over are rounded to bfloat16", "operations._convert", _rounded
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
        "a launch gets the rows of the one before", "pass_buffers.PassBuffers.taker", _last_taken, "probes"
    ),
    "accumulators-in-the-inputs-dtype": _operation(
        "partial results are accumulated in the inputs' dtype",
        "run.accumulate",
        _sums_in_the_inputs_dtype,
        "budget",
    ),
    "keys-travel-as-values": _operation(
        "keys arrive as values, and values as keys", "operations._giver", _keys_travel_as_values
    ),
    "last-row-not-copied": _operation(
        "of rows that are put together the last is zero", "operations._move", _last_row_left_out
    ),
    "columns-reversed": Mutant(
        "the lse of rows that are put together is in reverse order",
        f"{_RUNTIME}.operations.put_columns",
        wrap(_columns_reversed),
        "logic",
    ),
    "no-sink-on-the-way": _operation(
        "outs that travel complete have no sink", "operations._accumulate_sink", _no_sink_on_the_way
    ),
    "no-dlse-from-afar": _operation(
        "the gradient of the lse does not travel with that of out", "pass_buffers.PassBuffers.taker", _no_dlse_from_afar
    ),
    "last-part-forgotten": _operation("the last partial result is not added", "run.accumulate", _last_part_forgotten),
    "rows-in-any-order-are-the-total": Mutant(
        "a partial result that has every row, in any order, becomes the sum",
        f"{_RUNTIME}.run.accumulate",
        wrap(_some_rows_are_all),
        "logic",
    ),
    "no-lse-of-complete-results": _operation(
        "outs that arrive complete have lse zero", "operations._unpack", _arrived_lse_left_out
    ),
}
