"""The messages of a step: copies that assemble rows, sends and receives, and the destination of each arrival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cp_fast.compile.index_tables import RowKey
from cp_fast.compile.instructions import Accumulate, Copy, Heads, Instruction, Recv, Send, View
from cp_fast.compile.lowering.buffers import Held
from cp_fast.compile.lowering.pass_state import PassState
from cp_fast.compile.lowering.sums import Parcels
from cp_fast.compile.row_maps import Spans
from cp_fast.compile.tiles.groups import TileGroup
from cp_ref.schedules.schedule import OPERANDS, RESULTS

__all__ = ["lower_messages"]

Instructions = list[Instruction[RowKey]]


def lower_messages(
    state: PassState, number: int, sends: Sequence[Parcels], recvs: Sequence[Parcels], groups: Sequence[TileGroup]
) -> tuple[Instructions, Instructions, list[Held], list[Accumulate[RowKey]]]:
    """The copies before the sends; the sends and receives; the arriving operands; the sums of arriving results."""
    packed, posted = _sends(state, number, sends, groups)
    arriving, received = _recvs(state, number, recvs)
    posted += received
    accumulates: list[Accumulate[RowKey]] = []
    for one in recvs:
        if one.kind in RESULTS and not one.complete:
            name = f"step {number}: {one.kind} {one.heads[0]}:{one.heads[1]} from {one.peer}"
            made = state.buffers.new(name, one.kind, one.heads, one.spans.total, "partial", dtype="wide")
            posted.append(Recv(number, one.peer, one.tag, made, one.spans.total))
            parts = state.shared.sets.packed(one.spans)
            accumulates += state.sums.accumulates(made, one.kind, one.heads, parts, number)
    return packed, [*posted, *_complete(state, number, recvs)], arriving, accumulates


def _sends(
    state: PassState, number: int, parcels: Sequence[Parcels], groups: Sequence[TileGroup]
) -> tuple[Instructions, Instructions]:
    """The copies that assemble operands before the sends, and the sends."""
    wanted = list(_operands(parcels, state.received))
    packed: Instructions = []
    views: list[tuple[Parcels, View[RowKey]]] = []
    for one in wanted:
        kind, heads = one.kind, one.heads
        held = state.operands.holder(kind, heads, one.spans)
        if held is None:  # in one buffer with all rows of the kind that this step needs
            tiles = [group.rows(kind) for group in groups if group.heads_of(kind) == heads]
            others = [p.spans for p in wanted if (p.kind, p.heads) == (kind, heads)]
            held, copies = state.operands.gather(kind, heads, [*others, *tiles], number)
            packed += copies
        views.append((one, state.operands.view(held, one.spans, heads)))
    sends: Instructions = []
    for group in _with_the_same_rows(views):
        copies, made = _stacked_sends(state, number, group)
        packed, sends = packed + copies, sends + made
    return packed, sends


def _stacked_sends(
    state: PassState, number: int, group: Sequence[tuple[Parcels, View[RowKey]]]
) -> tuple[Instructions, Instructions]:
    """Sends of the same rows to one or more peers: of all heads without a copy, or of some heads each, packed for
    all peers by one copy.
    """
    one, view = group[0]
    if len(group) == 1 and view.heads == state.buffers.specs[view.buffer].all_heads:
        return [], [Send(number, one.peer, one.tag, view)]
    heads = view.heads[1] - view.heads[0]
    name = f"step {number}: {one.kind} packed"
    made = state.buffers.new(name, one.kind, (0, heads), one.spans.total, "operand", parts=len(group))
    source, target = replace(state.buffers.whole(view.buffer), rows=view.rows), state.buffers.whole(made)
    copy = Copy(number, source, target, tuple(its.heads[0] for _, its in group))
    return [copy], [Send(number, p.peer, p.tag, target, part) for part, (p, _) in enumerate(group)]


def _recvs(state: PassState, number: int, parcels: Sequence[Parcels]) -> tuple[list[Held], Instructions]:
    """The receives of a step's operands, and the buffers available from the next step on."""
    together: dict[tuple[str, Heads], list[Parcels]] = {}
    for one in _operands(parcels, state.sent):
        together.setdefault((one.kind, one.heads), []).append(one)
    arriving: list[Held] = []
    recvs: Instructions = []
    for (kind, heads), group in together.items():
        rows = _spans_of(state, group).buffer
        disjoint = len(group) == 1 or bool((rows.start[1:] >= rows.stop[:-1]).all())
        for some in [group] if disjoint else [[one] for one in group]:
            name = f"step {number}: {kind} {heads[0]}:{heads[1]} received"
            spans = _spans_of(state, some)
            made = state.operands.new(name, kind, heads, spans.buffer, spans.total)
            arriving.append(made)
            first = 0
            for p in some:
                where = (slice(first, first + p.spans.total),) if len(some) > 1 else None
                recvs.append(Recv(number, p.peer, p.tag, made.number, p.spans.total, where))
                first += p.spans.total
    return arriving, recvs


def _spans_of(state: PassState, parcels: list[Parcels]) -> Spans:
    """The rows of these parcels, one after the other."""
    return state.shared.sets.joined([p.spans for p in parcels])


def _complete(state: PassState, number: int, parcels: Sequence[Parcels]) -> Instructions:
    """The receives of complete results. Results for the same own rows are the parts of one buffer."""
    together: dict[tuple[str, str, int, int], tuple[RowKey, list[Parcels]]] = {}
    for one in parcels:
        if one.complete:
            located = state.sums.own[one.kind].locate(one.spans)
            rows = state.shared.tables.rows(located.row, located.count)
            key = one.kind, str(rows), one.spans.total, one.heads[1] - one.heads[0]
            together.setdefault(key, (rows, []))[1].append(one)
    recvs: Instructions = []
    for (kind, _, total, size), (rows, group) in together.items():
        name = f"step {number}: complete {kind} received"
        made = state.buffers.new(name, kind, (0, size), total, "partial", parts=len(group))
        state.stacked[kind].append((made, rows, tuple(one.heads[0] for one in group)))
        recvs += [Recv(number, p.peer, p.tag, made, total, None, part) for part, p in enumerate(group)]
    return recvs


def _operands(parcels: Sequence[Parcels], outs: Sequence[Parcels]) -> Iterator[Parcels]:
    """The operands among the messages of a step. Out and lse go with a gradient, unless `outs` already has them."""
    for one in parcels:
        if one.kind in OPERANDS:
            yield one
        if one.kind == "do" and not any(out.peer == one.peer and out.has(one) for out in outs):
            yield one._replace(kind="res", tag=one.tag + 4)


def _with_the_same_rows(views: list[tuple[Parcels, View[RowKey]]]) -> list[list[tuple[Parcels, View[RowKey]]]]:
    """Views to send, grouped by rows and number of heads. One copy packs views that differ only in their heads."""
    groups: dict[tuple[object, ...], list[tuple[Parcels, View[RowKey]]]] = {}
    for one, view in views:
        key: tuple[object, ...] = view.buffer, str(view.rows), view.heads[1] - view.heads[0]
        if any(other.heads == view.heads for _, other in groups.get(key, ())):
            key = *key, one.peer, one.tag
        groups.setdefault(key, []).append((one, view))
    return list(groups.values())
