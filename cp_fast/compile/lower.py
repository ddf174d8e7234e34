"""Lowering: one rank's schedule, of any kind, becomes two programs, forward and backward.

Lowering runs on the host, step by step, on columns (arrays with one number a tile or a span). They are right and
slow; the compiler passes (`cp_fast.compile.pipeline`) make them fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from cp_fast.compile.buffers import Held, Lowering, LoweringInputs, MessagePart, Partial, message_parts
from cp_fast.compile.index_tables import RowKey, Tables, one_range
from cp_fast.compile.program import (
    OWN,
    Accumulate,
    Copy,
    Heads,
    Instruction,
    Launch,
    Program,
    Programs,
    Recv,
    Send,
    View,
    Wait,
    reads,
)
from cp_fast.tiles.row_spans import Placement, SpanSets
from cp_fast.tiles.segments import WindowRule
from cp_fast.tiles.tile_groups import LaunchRows, TileGroup, TileGroups
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import RESULTS, Message, RankSchedule, side_of
from cp_ref.schedules.table import Spans

__all__ = [
    "Draft",
    "add_sink",
    "arrived_results",
    "local_results",
    "lower",
    "lower_messages",
    "lower_tiles",
    "program_of",
]

Instructions = list[Instruction[RowKey]]


# ---- Messages
#
# The messages of a step: copies that assemble rows, sends and receives, and the destination of each arrival.


def lower_messages(
    state: Lowering,
    number: int,
    sends: Sequence[MessagePart],
    recvs: Sequence[MessagePart],
    groups: Sequence[TileGroup],
) -> tuple[Instructions, Instructions, list[Held], list[Accumulate[RowKey]]]:
    """The copies before the sends; the sends and receives; the arriving operands; the sums of arriving results."""
    packed, posted = _sends(state, number, sends, groups)
    arriving, received = _recvs(state, number, recvs)
    posted += received
    accumulates: list[Accumulate[RowKey]] = []
    for one in recvs:
        if one.kind in state.results and not one.complete:
            name = f"step {number}: {one.kind} {one.heads[0]}:{one.heads[1]} from {one.peer}"
            made = state.buffers.new(name, one.kind, one.heads, one.spans.total, "partial", dtype="wide")
            posted.append(Recv(number, one.peer, one.tag, made, one.spans.total))
            rows = state.shared.sets.packed(one.spans)
            accumulates += state.sums.accumulates(made, one.kind, one.heads, rows, number)
    return packed, [*posted, *_complete(state, number, recvs)], arriving, accumulates


def _sends(
    state: Lowering, number: int, parts: Sequence[MessagePart], groups: Sequence[TileGroup]
) -> tuple[Instructions, Instructions]:
    """The copies that assemble operands before the sends, and the sends."""
    wanted = list(_operands(parts, state.results, state.received))
    packed: Instructions = []
    views: list[tuple[MessagePart, View[RowKey]]] = []
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
    state: Lowering, number: int, group: Sequence[tuple[MessagePart, View[RowKey]]]
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


def _recvs(state: Lowering, number: int, parts: Sequence[MessagePart]) -> tuple[list[Held], Instructions]:
    """The receives of a step's operands, and the buffers available from the next step on."""
    together: dict[tuple[str, Heads], list[MessagePart]] = {}
    for one in _operands(parts, state.results, state.sent):
        together.setdefault((one.kind, one.heads), []).append(one)
    arriving: list[Held] = []
    recvs: Instructions = []
    for (kind, heads), group in together.items():
        whole = len(group) == 1 or state.shared.sets.packed(_spans_of(state, group)).disjoint
        for some in [group] if whole else [[one] for one in group]:
            name = f"step {number}: {kind} {heads[0]}:{heads[1]} received"
            spans = _spans_of(state, some)
            made = state.operands.new(name, kind, heads, state.shared.sets.packed(spans), spans.total)
            arriving.append(made)
            first = 0
            for p in some:
                where = (slice(first, first + p.spans.total),) if len(some) > 1 else None
                recvs.append(Recv(number, p.peer, p.tag, made.number, p.spans.total, where))
                first += p.spans.total
    return arriving, recvs


def _spans_of(state: Lowering, parts: list[MessagePart]) -> Spans:
    """The rows of these parts, one after the other."""
    return state.shared.sets.joined([p.spans for p in parts])


def _complete(state: Lowering, number: int, parts: Sequence[MessagePart]) -> Instructions:
    """The receives of complete results. Results for the same own rows are the parts of one buffer."""
    together: dict[tuple[str, str, int, int], tuple[RowKey, list[MessagePart]]] = {}
    for one in parts:
        if one.complete:
            found = state.sums.own[one.kind].find(one.spans)
            rows = state.shared.tables.rows(found.row, found.count)
            key = one.kind, str(rows), one.spans.total, one.heads[1] - one.heads[0]
            together.setdefault(key, (rows, []))[1].append(one)
    recvs: Instructions = []
    for (kind, _, total, size), (rows, group) in together.items():
        name = f"step {number}: complete {kind} received"
        made = state.buffers.new(name, kind, (0, size), total, "partial", parts=len(group))
        state.stacked[kind].append((made, rows, tuple(one.heads[0] for one in group)))
        recvs += [Recv(number, p.peer, p.tag, made, total, None, part) for part, p in enumerate(group)]
    return recvs


def _operands(
    parts: Sequence[MessagePart], results: Sequence[str], outs: Sequence[MessagePart]
) -> Iterator[MessagePart]:
    """The operands among the messages of a step: all but results. Out and lse go with a gradient, unless `outs` already
    has them.
    """
    for one in parts:
        if one.kind not in results:
            yield one
        if one.kind == "do" and not any(out.peer == one.peer and out.has(one) for out in outs):
            yield one._replace(kind="res", tag=one.tag + 4)


def _with_the_same_rows(views: list[tuple[MessagePart, View[RowKey]]]) -> list[list[tuple[MessagePart, View[RowKey]]]]:
    """Views to send, grouped by rows and number of heads. One copy packs views that differ only in their heads."""
    groups: dict[tuple[object, ...], list[tuple[MessagePart, View[RowKey]]]] = {}
    for one, view in views:
        key: tuple[object, ...] = view.buffer, str(view.rows), view.heads[1] - view.heads[0]
        if any(other.heads == view.heads for _, other in groups.get(key, ())):
            key = *key, one.peer, one.tag
        groups.setdefault(key, []).append((one, view))
    return list(groups.values())


# ---- Tiles
#
# The launches of a step's tiles, the copies before them, and the destinations of their results.


def lower_tiles(state: Lowering, groups: TileGroups, number: int, group: TileGroup) -> list[Instruction[RowKey]]:
    """The launches of a step's tiles of the same heads, the copies before them, and the destinations of their
    results.
    """
    by_kind: list[list[Held]] = []
    found: list[Instruction[RowKey]] = []
    for kind in state.kinds:
        heads = group.heads_of(kind)
        held = [state.operands.holder(kind, heads, launch.rows(kind)) for launch in group.launches]
        if None in held:
            made, copies = state.operands.gather(kind, heads, [group.rows(kind)], number)
            held, found = [made] * len(held), found + copies
        by_kind.append([one for one in held if one is not None])
    launches = list(zip(group.launches, zip(*by_kind, strict=True), strict=True))
    if state.direction == "forward" and group.sharing is not None:
        shared = _sharing(state, groups, group)
        if 0 < len(shared) < len(launches) or (shared and not all(_lie_together(*one) for one in launches)):
            launches = shared
    for launch, of_launch in launches:
        found += _launch(state, groups, number, group, launch, of_launch)
    return found


def _sharing(state: Lowering, groups: TileGroups, group: TileGroup) -> list[tuple[LaunchRows, tuple[Held, ...]]]:
    """The launches of a group that have common keys, and their buffers. None of them where rows do not lie together."""
    held: list[Held] = []
    for kind in state.kinds:
        rows = group.rows(kind)
        one = state.operands.holder(kind, group.heads_of(kind), rows.merged())
        if one is None:
            return []
        held.append(one)
    launches = groups.sharing(group, held[0].rows, held[1].rows)
    return [(launch, tuple(held)) for launch in launches or ()]


def _lie_together(launch: LaunchRows, held: tuple[Held, ...]) -> bool:
    """Whether a launch's queries, and its keys, are a slice of their buffers: no row is copied for it."""
    found = [one.rows.find(rows) for one, rows in zip(held, (launch.q, launch.kv), strict=False)]
    return all(one_range(one.row, one.count) for one in found)


def _launch(
    state: Lowering, groups: TileGroups, number: int, group: TileGroup, launch: LaunchRows, held: tuple[Held, ...]
) -> Iterator[Instruction[RowKey]]:
    heads, kv_heads, packed = group.heads, group.kv_heads, state.shared.sets.packed
    if launch.batch.starts is None:
        launch = groups.in_buffer_order(launch, held[1].rows)
    at, rows_q = launch.apart or (packed(launch.q), launch.q)
    if launch.apart is None:
        operands = [state.operands.view(one, launch.q, heads) for one in held]
        operands[1] = state.operands.view(held[1], launch.kv, kv_heads)
    else:  # A forward launch.
        queries = state.operands.stretch(held[0], launch.q, rows_q.total, heads)
        operands = [queries, state.operands.view(held[1], launch.kv, kv_heads)]
    of = f"of {' and '.join(state.buffers.specs[one.number].name for one in held[:2])}"
    window = f"window {launch.batch.left}, {launch.batch.right}"
    wanted: list[tuple[str, Heads, list[Placement]]] = [(state.results[0], heads, [at])]
    if state.direction == "backward":
        wanted.append(("dkv", kv_heads, list(launch.layers)))
    made = [
        state.buffers.new(
            f"step {number}: {kind} {of}, {window}",
            kind,
            some,
            launch.kv.total if kind == "dkv" else rows_q.total,
            "partial",
        )
        for kind, some, _ in wanted
    ]
    rows = rows_q, launch.kv
    yield Launch(number, tuple(operands), launch.batch, tuple(made), heads[0], *rows, launch.made_by)
    for partial, (kind, some, layers) in zip(made, wanted, strict=True):
        for layer in layers:
            yield from state.sums.accumulates(partial, kind, some, layer, number)


# ---- Results
#
# The rank's own results: sums with their sinks, and complete results that arrive.


def add_sink(state: Lowering, total: int, rows: RowKey | None, step: int) -> Instructions:
    """The sink as one more partial result of a sum of outs."""
    spec = state.buffers.specs[total]
    if not state.shared.sink or spec.kind != "out":
        return []
    return [Accumulate(step, View(OWN["sink"], None, spec.heads), View(total, rows, spec.all_heads), of_sink=True)]


def local_results(state: Lowering, kind: str, step: int) -> Instructions:
    """The rank's own results, from its local sums: one of all heads is the result."""
    shared, sums = state.shared, state.sums.local[kind]
    count, own = shared.kinds[kind]
    heads = (0, count)
    rows = shared.tables.rows(own.row, own.spans.size) if shared.sink and kind == "out" else None
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


def arrived_results(state: Lowering, kind: str, step: int) -> Instructions:
    """Copies of the received complete results into the rank's own."""
    result = state.buffers.whole(state.own_results[kind])
    return [
        Copy(step, state.buffers.whole(made), replace(result, rows=rows), first_heads)
        for made, rows, first_heads in state.stacked[kind]
    ]


# ---- A schedule


@dataclass(frozen=True)
class Draft:
    """A rank's programs on the host, and their tables."""

    programs: Programs[RowKey]
    tables: Tables


def lower(
    work: Workload,
    rank: int,
    forward: RankSchedule,
    backward: RankSchedule,
    saved: tuple[str, ...],
    rule: WindowRule,
    *,
    sink: bool = False,
    skipped: Mapping[str, str] | None = None,
    shared_keys_tile: int = 0,
) -> Draft:
    """Lower one rank's schedule of attention, both passes.

    Args:
        forward, backward: the rank's part of a schedule of this workload.
        saved: the kinds of operands that are kept between the passes.
        rule: which tiles keep their windows.
        sink: whether the softmax has a sink.
        skipped: the compiler passes that do not run, and why.
        shared_keys_tile: see `TileGroups`.

    Raises:
        ValueError: the schedule computes with rows that the rank does not have.
    """
    tables, sets = Tables(), SpanSets()
    skipped = skipped or {}
    groups = TileGroups(work, rule, tables, sets, skipped, shared_keys_tile=shared_keys_tile)
    own = {side: work.ownership.side(side).of(rank) for side in ("q", "kv")}
    own_q = Placement.of(own["q"])
    own_kv = own_q if work.ownership.kv is work.ownership.q else Placement.of(own["kv"])
    of_q, of_kv = (work.heads_q, own_q), (work.heads_kv, own_kv)
    kinds = {kind: of_kv if side_of(kind) == "kv" else of_q for kind in (*OWN, *RESULTS)}
    shared = LoweringInputs(tables, sets, kinds, sink)
    sent, received = (
        _parts_of_messages([m for step in forward for m in getattr(step, name) if m.kind == "out" and m.complete], sets)
        for name in ("sends", "recvs")
    )
    first = Lowering(shared, "forward", ("q", "kv"), ("out",))
    forward_program = program_of(first, forward, groups)
    second = Lowering(shared, "backward", ("q", "kv", "do", "res"), ("dq", "dkv"), sent, received)
    kept = [held for held in first.operands.held if held.number < len(OWN) or held.kind in saved]
    pairs = [(held.number, second.keep(held, forward_program)) for held in kept]
    pairs += [(o.message, second.keep_out(o.heads, o.rows)) for o in first.sums.outgoing["out"] if o.complete]
    backward_program = program_of(second, backward, groups)
    read = {number for one in backward_program.instructions for number in reads(one)}
    return Draft(
        Programs(
            forward_program,
            backward_program,
            tuple(pair for pair in pairs if pair[1] in read),
            tables.rows(own["q"].row, own["q"].stop - own["q"].start),
            skipped,
        ),
        tables,
    )


def program_of(
    state: Lowering, steps: RankSchedule, tiles: TileGroups | None = None, given: Mapping[str, Partial] | None = None
) -> Program[RowKey]:
    """All steps of one direction.

    Args:
        tiles: makes the launches of a step's tiles; None for messages alone.
        given: partial results that are there at the beginning, by kind.
    """
    sets, given = state.shared.sets, given or {}
    messages = [(_parts_of_messages(step.sends, sets), _parts_of_messages(step.recvs, sets)) for step in steps]
    groups = [[] if tiles is None else list(tiles.of(step.tiles)) for step in steps]
    edges = _head_edges(state.results, messages, groups)
    for kind, partial in given.items():
        edges[kind].update(partial.heads)
    announced = state.sums.announce([sends for sends, _ in messages], edges)
    found: list[Instruction[RowKey]] = []
    for kind, (number, heads, rows) in given.items():
        found += [replace(one, step=0) for one in state.sums.accumulates(number, kind, heads, rows, -1)]
    for n, (of_step, computed) in enumerate(zip(messages, groups, strict=True)):
        to_messages, sends = announced[n]
        for copy in to_messages:
            if state.buffers.specs[copy.target.buffer].dtype == "input":  # a partial one: by its owner
                found += add_sink(state, copy.source.buffer, None, n)
            found.append(copy)
        packed, posted, arriving, accumulates = lower_messages(state, n, *of_step, computed)
        found += [*packed, *sends, *posted]
        if tiles is not None:
            for group in computed:
                found += lower_tiles(state, tiles, n, group)
        if n == len(steps) - 1:  # finished sums are converted while the last messages travel
            late = {state.buffers.specs[one.target.buffer].kind for one in accumulates}
            found += chain.from_iterable(local_results(state, kind, n) for kind in state.results if kind not in late)
        if posted or sends:
            found.append(Wait(n))
        found += accumulates
        state.operands.held += arriving
    last = max(len(steps) - 1, 0)
    for kind in state.results:
        if kind not in state.own_results:
            found += local_results(state, kind, last)
        found += arrived_results(state, kind, last)
    return Program(state.direction, len(steps), tuple(state.buffers.specs), tuple(found), state.own_results)


def _parts_of_messages(messages: Sequence[Message], sets: SpanSets) -> list[MessagePart]:
    return [part for message in messages for part in message_parts(message, sets)]


def _head_edges(
    results: Sequence[str], messages: Sequence[Sequence[list[MessagePart]]], groups: Sequence[Sequence[TileGroup]]
) -> dict[str, set[int]]:
    """The head numbers at which local sums are cut, by kind of result."""
    edges: dict[str, set[int]] = {kind: set() for kind in results}
    for group in chain.from_iterable(groups):
        for kind in results:
            edges[kind].update(group.kv_heads if side_of(kind) == "kv" else group.heads)
    for part in chain.from_iterable(chain.from_iterable(messages)):
        if part.kind in edges and not part.complete:
            edges[part.kind].update(part.heads)
    return edges
