"""The exchanges of a layer as programs: rows are gathered where a rank computes with them, and results are given back.

A layer's kernels are plain Python, so its programs have no launches. They come from messages of a schedule by the
lowering of attention's (`cp_fast.compile.lower`), run by the same loop, and print alike:

    gather      own rows, and those that arrive      -> one buffer of the rows that the rank computes with
    give back   results for the rows of this buffer  -> sums for the own rows, of all ranks

A result begins as the rank's own part. Results of others are added in the order of the steps, and of the messages of a
step. So the sums have the same bits in every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from cp_fast.compile.buffers import Held, Lowering, LoweringInputs, Partial
from cp_fast.compile.index_tables import RowKey, Tables
from cp_fast.compile.lower import Draft, program_of
from cp_fast.compile.pipeline import optimized
from cp_fast.compile.program import Heads, Instruction, Program, Programs, View
from cp_fast.tiles.row_spans import SpanSets
from cp_ref.schedules.schedule import RankSchedule
from cp_ref.schedules.table import Spans

__all__ = ["ExchangedRows", "RowMessages", "lower_exchange"]


@dataclass(frozen=True, eq=False)
class ExchangedRows:
    """The rows of one kind that a rank has, and those that it computes with. They may be rows of the global buffer, or
    any others that all ranks number alike.

    Attributes:
        own: the rank's own, in the order of its tensors.
        gathered: those that it computes with, in the order that its kernels want.
        count: how many heads there are; 1 where all heads travel together.
        heads: those that the rank computes with.
    """

    own: Spans
    gathered: Spans
    count: int = 1
    heads: Heads = (0, 1)


class RowMessages(NamedTuple):
    """A rank's messages and rows, from which an exchange is lowered.

    Attributes:
        rows: those that are gathered, by kind.
        there: the messages that gather them, of these kinds.
        results: the rows whose results are given back, from the gathered to the own ones, by the kind of the results.
        back: the messages that bring them back, of these kinds.
    """

    rows: Mapping[str, ExchangedRows]
    there: RankSchedule
    results: Mapping[str, ExchangedRows] = {}
    back: RankSchedule = ()


def lower_exchange(name: str, messages: RowMessages) -> Draft:
    """The programs of an exchange: forward gathers, backward gives back.

    >>> import numpy as np
    >>> from cp_ref.schedules.schedule import Message, Pieces, Step
    >>> first, second = (Spans(np.array([n]), np.array([n + 2])) for n in (0, 2))
    >>> both = Spans(np.array([0]), np.array([4]))
    >>> sent, received = (Pieces.of(rows, (0, 1)) for rows in (first, second))
    >>> there = Step((Message("kv", 1, 0, sent),), (Message("kv", 1, 0, received),))
    >>> back = Step((Message("dkv", 1, 0, received),), (Message("dkv", 1, 0, sent),))
    >>> rows = ExchangedRows(first, both)
    >>> print(lower_exchange("keys", RowMessages({"kv": rows}, (there,), {"dkv": rows}, (back,))).programs)
    skipped accumulate_late: the sums of a layer have the order of its messages
    skipped free_early: an exchange is short, and its buffers go with it
    gather keys
      step 0
        0 send        b0:kv own[0:2] -> rank 1, tag 0
        1 recv        b2:kv [2:4] <- rank 1, tag 0                             ; recv_in_place
        2 copy        b0:kv own[0:2] -> b2:kv[0:2]                             ; copy_early
        3 wait
    give back keys
      step 0
        0 accumulate  b0:dkv own[2:4] -> b1:dkv sum[0:2]
        1 accumulate  b0:dkv own[0:2] -> b3:dkv sum[0:2]
        2 copy        b1:dkv sum -> b2:dkv message
        3 send        b2:dkv message[0:2] -> rank 1, tag 0
        4 recv        b4:dkv partial <- rank 1, tag 0
        5 wait
        6 accumulate  b4:dkv partial[0:2] -> b3:dkv sum[0:2]
        7 copy        b3:dkv sum -> b5:dkv result
    """
    tables, sets = Tables(), SpanSets()
    gather = _gathering(f"gather {name}", messages, tables, sets)
    give_back = _giving_back(f"give back {name}", messages, tables, sets)
    skipped = {
        "accumulate_late": "the sums of a layer have the order of its messages",
        "free_early": "an exchange is short, and its buffers go with it",
    }
    draft = Draft(Programs(gather, give_back, (), slice(0, 0), skipped), tables)
    return optimized(draft, writes_rows=True, most_pieces=1)  # one kernel moves the rows of all messages


def _gathering(direction: str, messages: RowMessages, tables: Tables, sets: SpanSets) -> Program[RowKey]:
    """Its results are the gathered rows, by kind: own ones where these are all and lie in order."""
    kinds = {kind: (some.count, sets.packed(some.own)) for kind, some in messages.rows.items()}
    own = {kind: number for number, kind in enumerate(kinds)}
    state = Lowering(LoweringInputs(tables, sets, kinds), direction, tuple(kinds), (), own=own)
    program = program_of(state, messages.there)
    copies, results = list[Instruction[RowKey]](), dict[str, int]()
    last = max(len(messages.there) - 1, 0)
    for kind, some in messages.rows.items():
        held = state.operands.holder(kind, some.heads, some.gathered)
        if held is None or not _is_all(state, held, some):
            held, more = state.operands.in_order(kind, some.heads, some.gathered, last)
            copies += more
        results[kind] = held.number
    instructions = *program.instructions, *copies
    return replace(program, buffers=tuple(state.buffers.specs), instructions=instructions, results=results)


def _is_all(state: Lowering, held: Held, rows: ExchangedRows) -> bool:
    """Whether a buffer has the gathered rows in their order, and nothing else."""
    view = state.operands.view(held, rows.gathered, rows.heads)
    return view == View(held.number, slice(0, held.rows.spans.total), state.buffers.specs[held.number].all_heads)


def _giving_back(direction: str, messages: RowMessages, tables: Tables, sets: SpanSets) -> Program[RowKey]:
    """Its first buffers are the results for the gathered rows, by kind; its results are those for the own rows."""
    kinds = {kind: (some.count, sets.packed(some.own)) for kind, some in messages.results.items()}
    state = Lowering(LoweringInputs(tables, sets, kinds), direction, (), tuple(kinds), own={})
    given = dict[str, Partial]()
    for kind, some in messages.results.items():
        number = state.buffers.new(f"{kind} of the gathered rows", kind, some.heads, some.gathered.total, "own")
        given[kind] = Partial(number, some.heads, sets.packed(some.gathered))
    return program_of(state, messages.back, given=given)
