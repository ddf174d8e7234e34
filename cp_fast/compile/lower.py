"""Lowering: one rank's schedule, of any kind, becomes an executable plan.

Lowering runs on the host, step by step, on columns (arrays with one number a tile or a span). The plan is right and
slow; the compiler passes (`cp_fast.compile.pipeline`) make it fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from cp_fast.compile.buffers import Buffers, Held, Operands
from cp_fast.compile.index_tables import RowKey, Tables
from cp_fast.compile.instructions import (
    OWN,
    Accumulate,
    Copy,
    ExecutablePlan,
    Heads,
    Instruction,
    Launch,
    PassPlan,
    Recv,
    Send,
    View,
    Wait,
)
from cp_fast.compile.row_maps import Parts, RowMap, Spans, SpanSets
from cp_fast.compile.sums import Parcels, Sums, parcels_of
from cp_fast.compile.tiles.groups import LaunchRows, SegmentKeys, TileGroup, TileGroups
from cp_fast.compile.tiles.windows import WindowRule
from cp_ref.spec import OPERANDS, RESULTS, Message, RankSchedule, Workload

__all__ = ["Draft", "lower"]

Instructions = list[Instruction[RowKey]]


@dataclass(frozen=True)
class Draft:
    """An executable plan on the host, and its tables."""

    plan: ExecutablePlan[RowKey]
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
) -> Draft:
    """Lower one rank's schedule of both passes.

    Args:
        forward, backward: the rank's part of a schedule of this workload.
        saved: the kinds of operands that are kept between the passes.
        rule: which tiles keep their windows.
        sink: whether the softmax has a sink.
        skipped: the compiler passes that do not run, and why.

    Raises:
        ValueError: the schedule computes with rows that the rank does not have.
    """
    tables, sets = Tables(), SpanSets()
    skipped = skipped or {}
    groups = TileGroups(work, rule, tables, sets, skipped)
    own = {side: work.ownership.side(side).of(rank) for side in ("q", "kv")}
    own_q = RowMap.of(own["q"])
    own_kv = own_q if work.ownership.kv is work.ownership.q else RowMap.of(own["kv"])
    shared = _Shared(work, rank, groups, tables, sets, {"q": own_q, "kv": own_kv}, sink, {})
    sent, received = (
        _parcels([m for step in forward for m in getattr(step, name) if m.kind == "out" and m.complete], sets)
        for name in ("sends", "recvs")
    )
    first = _Lowering(shared, "forward", ("q", "kv"), ("out",))
    plan_forward = first.lower(forward)
    second = _Lowering(shared, "backward", ("q", "kv", "do", "res"), ("dq", "dkv"), sent, received)
    kept = [held for held in first.operands.held if held.number < len(OWN) or held.kind in saved]
    pairs = [(held.number, second.keep(held, plan_forward)) for held in kept]
    pairs += [
        (o.message, second.keep_out(o.message, o.heads, o.rows)) for o in first.sums.outgoing["out"] if o.complete
    ]
    plan_backward = second.lower(backward)
    read = set(reads(plan_backward.instructions))
    return Draft(
        ExecutablePlan(
            plan_forward,
            plan_backward,
            tuple(pair for pair in pairs if pair[1] in read),
            tables.rows(own["q"].row, own["q"].stop - own["q"].start),
            skipped,
        ),
        tables,
    )


def reads(instructions: Sequence[Instruction[RowKey]]) -> Iterator[int]:
    """The buffers that instructions read, once for each read."""
    for one in instructions:
        if isinstance(one, Send | Copy | Accumulate):
            yield one.source.buffer
        elif isinstance(one, Launch):
            yield from (view.buffer for view in one.operands)


class _Shared(NamedTuple):
    """The inputs of the lowering of both passes."""

    work: Workload
    rank: int
    groups: TileGroups
    tables: Tables
    sets: SpanSets
    own: dict[str, RowMap]
    sink: bool
    states: dict[tuple[Heads, Spans, Spans, SegmentKeys], int]  # The slots of forward launches.

    def side(self, kind: str) -> tuple[int, RowMap]:
        """All heads and the own rows of a kind."""
        kv = kind in ("kv", "dkv")
        return (self.work.heads_kv if kv else self.work.heads_q), self.own["kv" if kv else "q"]


class _Messages(NamedTuple):
    """The messages of a step, by heads."""

    sends: list[Parcels]
    recvs: list[Parcels]


class _Posted(NamedTuple):
    """The messages of a step: copies before the sends, sends and receives, and the destination of each arrival."""

    packed: Instructions
    posted: Instructions
    arriving: list[Held]
    accumulates: list[Accumulate[RowKey]]


@dataclass
class _Lowering:
    """Lowers one pass. `kinds`: the operands of its launches. `sent`, `received`: in a backward pass, the complete outs
    of the forward pass. Both ends have these and their lse, so they are not sent again with the gradient.
    """

    shared: _Shared
    direction: str
    kinds: Sequence[str]
    results: Sequence[str]
    sent: Sequence[Parcels] = ()
    received: Sequence[Parcels] = ()
    buffers: Buffers = field(default_factory=Buffers)

    def __post_init__(self) -> None:
        shared, made = self.shared, list[Held]()
        for kind, number in OWN.items():
            heads, rows = shared.side(kind)
            assert self.buffers.new(f"own {kind}", kind, (0, heads), None, "own") == number
            if kind in self.kinds:
                made.append(Held(number, kind, (0, heads), rows))
        self.operands = Operands(self.buffers, shared.tables, shared.sets)
        self.operands.held = made[:2] if self.direction == "forward" else made[2:]
        own = {kind: shared.side(kind)[1] for kind in RESULTS}
        self.sums = Sums(self.buffers, shared.tables, shared.sets, own, shared.sink)
        self.stacked: dict[str, list[tuple[int, RowKey, tuple[int, ...]]]] = {kind: [] for kind in self.results}
        self.own_results: dict[str, int] = {}

    def keep(self, held: Held, plan: PassPlan[RowKey]) -> int:
        """Add a buffer of operands kept by the forward pass; returns its number in this pass."""
        number, spec = held.number, plan.buffers[held.number]
        if number >= len(OWN):
            number = self.buffers.new(f"kept {spec.name}", spec.kind, spec.heads, spec.rows, "operand")
        gradients = self.operands.held[-2:]
        self.operands.held[-2:] = [Held(number, held.kind, held.heads, held.rows), *gradients]
        return number

    def keep_out(self, message: int, heads: Heads, rows: RowMap) -> int:
        """Add the complete out and lse of others' rows that the forward pass sent; returns the buffer's number."""
        size = int((rows.stop - rows.start).sum())
        made = self.operands.new(f"kept out {heads[0]}:{heads[1]}", "res", heads, rows, size)
        self.operands.held.append(made)
        return made.number

    # ---- a pass

    def lower(self, steps: RankSchedule) -> PassPlan[RowKey]:
        """All steps."""
        sets = self.shared.sets
        messages = [_Messages(_parcels(step.sends, sets), _parcels(step.recvs, sets)) for step in steps]
        groups = [self.shared.groups.of(step.tiles) for step in steps]
        announced = self.sums.announce([m.sends for m in messages], _head_edges(messages, groups))
        found: Instructions = []
        for n, (of_step, computed) in enumerate(zip(messages, groups, strict=True)):
            to_messages, sends = announced[n]
            for copy in to_messages:
                if self.buffers.specs[copy.target.buffer].dtype == "input":  # a partial one: by its owner
                    found += self._sink(copy.source.buffer, None, n)
                found.append(copy)
            packed, posted, arriving, accumulates = self._messages(n, of_step, computed)
            found += [*packed, *sends, *posted]
            for group in computed:
                found += self._tiles(n, group)
            if n == len(steps) - 1:  # finished sums are converted while the last messages travel
                late = {self.buffers.specs[one.target.buffer].kind for one in accumulates}
                found += chain.from_iterable(self._local_results(kind, n) for kind in self.results if kind not in late)
            if posted or sends:
                found.append(Wait(n))
            found += accumulates
            self.operands.held += arriving
        last = max(len(steps) - 1, 0)
        for kind in self.results:
            if kind not in self.own_results:
                found += self._local_results(kind, last)
            found += self._arrived(kind, last)
        return PassPlan(self.direction, len(steps), tuple(self.buffers.specs), tuple(found), self.own_results)

    # ---- messages

    def _messages(self, number: int, of_step: _Messages, groups: Sequence[TileGroup]) -> _Posted:
        packed, posted = self._sends(number, of_step.sends, groups)
        arriving, recvs = self._recvs(number, of_step.recvs)
        accumulates: list[Accumulate[RowKey]] = []
        for one in of_step.recvs:
            if one.kind in RESULTS and not one.complete:
                name = f"step {number}: {one.kind} {one.heads[0]}:{one.heads[1]} from {one.peer}"
                made = self.buffers.new(name, one.kind, one.heads, one.spans.total, "partial", dtype="wide")
                recvs.append(Recv(number, one.peer, one.tag, made, one.spans.total))
                accumulates += self.sums.accumulates(
                    made, one.kind, one.heads, self.shared.sets.packed(one.spans), number
                )
        recvs += self._complete(number, [one for one in of_step.recvs if one.complete])
        return _Posted(packed, [*posted, *recvs], arriving, accumulates)

    def _sends(
        self, number: int, parcels: Sequence[Parcels], groups: Sequence[TileGroup]
    ) -> tuple[Instructions, Instructions]:
        """The copies that assemble operands before the sends, and the sends."""
        wanted = list(_operands(parcels, self.received))
        packed: Instructions = []
        views: list[tuple[Parcels, View[RowKey]]] = []
        for one in wanted:
            kind, heads = one.kind, one.heads
            held = self.operands.holder(kind, heads, one.spans)
            if held is None:  # in one buffer with all rows of the kind that this step needs
                tiles = [group.rows(kind) for group in groups if group.heads_of(kind) == heads]
                others = [p.spans for p in wanted if (p.kind, p.heads) == (kind, heads)]
                held, copies = self.operands.gather(kind, heads, [*others, *tiles], number)
                packed += copies
            views.append((one, self.operands.view(held, one.spans, heads)))
        sends: Instructions = []
        for group in _with_the_same_rows(views):
            copies, made = self._stacked_sends(number, group)
            packed, sends = packed + copies, sends + made
        return packed, sends

    def _stacked_sends(
        self, number: int, group: Sequence[tuple[Parcels, View[RowKey]]]
    ) -> tuple[Instructions, Instructions]:
        """Sends of the same rows to one or more peers: of all heads without a copy, or of some heads each, packed for
        all peers by one copy.
        """
        one, view = group[0]
        if len(group) == 1 and view.heads == self.buffers.all_heads(view.buffer):
            return [], [Send(number, one.peer, one.tag, view)]
        heads = view.heads[1] - view.heads[0]
        name = f"step {number}: {one.kind} packed"
        made = self.buffers.new(name, one.kind, (0, heads), one.spans.total, "operand", parts=len(group))
        source, target = View(view.buffer, view.rows, self.buffers.all_heads(view.buffer)), self.buffers.whole(made)
        copy = Copy(number, source, target, tuple(its.heads[0] for _, its in group))
        return [copy], [Send(number, p.peer, p.tag, target, part) for part, (p, _) in enumerate(group)]

    def _recvs(self, number: int, parcels: Sequence[Parcels]) -> tuple[list[Held], Instructions]:
        """The receives of a step's operands, and the buffers available from the next step on."""
        together: dict[tuple[str, Heads], list[Parcels]] = {}
        for one in _operands(parcels, self.sent):
            together.setdefault((one.kind, one.heads), []).append(one)
        arriving: list[Held] = []
        recvs: Instructions = []
        for (kind, heads), group in together.items():
            disjoint = len(group) == 1 or _disjoint(self._spans_of(group).buffer)
            for some in [group] if disjoint else [[one] for one in group]:
                name = f"step {number}: {kind} {heads[0]}:{heads[1]} received"
                spans = self._spans_of(some)
                made = self.operands.new(name, kind, heads, spans.buffer, spans.total)
                arriving.append(made)
                first = 0
                for p in some:
                    rows = (slice(first, first + p.spans.total),) if len(some) > 1 else None
                    recvs.append(Recv(number, p.peer, p.tag, made.number, p.spans.total, rows))
                    first += p.spans.total
        return arriving, recvs

    def _spans_of(self, parcels: list[Parcels]) -> Spans:
        """The rows of these parcels, one after the other."""
        return self.shared.sets.joined([p.spans for p in parcels])

    def _complete(self, number: int, parcels: Sequence[Parcels]) -> Instructions:
        """The receives of complete results. Results for the same own rows are the parts of one buffer."""
        together: dict[tuple[object, ...], tuple[RowKey, list[Parcels]]] = {}
        for one in parcels:
            located = self.sums.own[one.kind].locate(one.spans)
            rows = self.shared.tables.rows(located.row, located.count)
            key = (rows.start, rows.stop) if isinstance(rows, slice) else rows
            size = one.heads[1] - one.heads[0]
            together.setdefault((one.kind, key, one.spans.total, size), (rows, []))[1].append(one)
        recvs: Instructions = []
        for (kind, _, total, size), (rows, group) in together.items():
            assert isinstance(kind, str)
            assert isinstance(total, int)
            assert isinstance(size, int)
            name = f"step {number}: complete {kind} received"
            made = self.buffers.new(name, kind, (0, size), total, "partial", parts=len(group))
            self.stacked[kind].append((made, rows, tuple(one.heads[0] for one in group)))
            recvs += [Recv(number, p.peer, p.tag, made, total, None, part) for part, p in enumerate(group)]
        return recvs

    # ---- tiles

    def _tiles(self, number: int, group: TileGroup) -> Instructions:
        """The launches of a step's tiles of the same heads, the copies before them, and the destinations of their
        results.
        """
        by_kind: list[list[Held]] = []
        found: Instructions = []
        for kind in self.kinds:
            heads = group.heads_of(kind)
            held = [self.operands.holder(kind, heads, launch.rows(kind)) for launch in group.launches]
            if None in held:
                made, copies = self.operands.gather(kind, heads, [group.rows(kind)], number)
                held, found = [made] * len(held), found + copies
            by_kind.append([one for one in held if one is not None])
        for launch, of_launch in zip(group.launches, zip(*by_kind, strict=True), strict=True):
            found += self._launch(number, group, launch, of_launch)
        return found

    def _launch(
        self, number: int, group: TileGroup, launch: LaunchRows, held: tuple[Held, ...]
    ) -> Iterator[Instruction[RowKey]]:
        heads, kv_heads, packed = group.heads, group.kv_heads, self.shared.sets.packed
        launch = self.shared.groups.in_buffer_order(launch, held[1].rows)
        operands = [self.operands.view(one, launch.q, heads) for one in held]
        operands[1] = self.operands.view(held[1], launch.kv, kv_heads)
        of = f"of {' and '.join(self.buffers.specs[one.number].name for one in held[:2])}"
        window = f"window {launch.segments.left}, {launch.segments.right}"
        wanted: list[tuple[str, Heads, list[Parts]]] = [(self.results[0], heads, [packed(launch.q)])]
        if self.direction == "backward":
            wanted.append(("dkv", kv_heads, list(launch.layers)))
        made = [
            self.buffers.new(
                f"step {number}: {kind} {of}, {window}",
                kind,
                some,
                (launch.kv if kind == "dkv" else launch.q).total,
                "partial",
            )
            for kind, some, _ in wanted
        ]
        states, same = self.shared.states, (heads, launch.q, launch.kv, launch.segments)
        state = states.setdefault(same, len(states)) if self.direction == "forward" else states.get(same)
        rows = launch.q, launch.kv
        yield Launch(number, tuple(operands), launch.segments, tuple(made), heads[0], *rows, state, launch.made_by)
        for partial, (kind, some, layers) in zip(made, wanted, strict=True):
            for layer in layers:
                yield from self.sums.accumulates(partial, kind, some, layer, number)

    # ---- results

    def _sink(self, total: int, rows: RowKey | None, step: int) -> Instructions:
        """The sink as one more partial result of a sum of outs."""
        spec = self.buffers.specs[total]
        if not self.shared.sink or spec.kind != "out":
            return []
        return [Accumulate(step, View(OWN["sink"], None, spec.heads), View(total, rows, self.buffers.all_heads(total)))]

    def _local_results(self, kind: str, step: int) -> Instructions:
        """The rank's own results, from its local sums: one of all heads is the result."""
        shared, sums = self.shared, self.sums.local[kind]
        heads = (0, shared.side(kind)[0])
        own = shared.work.ownership.q.of(shared.rank)
        rows = shared.tables.rows(own.row, own.stop - own.start)
        result = self.own_results[kind] = self.buffers.new(f"own {kind} result", kind, heads, None, "result")
        to_result = [Copy(step, self.buffers.whole(sums[heads]), self.buffers.whole(result))] if heads in sums else []
        if len(sums) == 1 and to_result and not self.stacked[kind]:
            return [*self._sink(sums[heads], rows, step), *to_result]
        joined = result
        if shared.sink and kind == "out":
            joined = self.buffers.new("own out, all heads", kind, heads, None, "sum", dtype="wide")
        found: Instructions = [
            Copy(step, self.buffers.whole(total), View(joined, None, some)) for some, total in sums.items()
        ]
        if joined != result:
            found += self._sink(joined, rows, step)
            found.append(Copy(step, self.buffers.whole(joined), self.buffers.whole(result)))
        return found

    def _arrived(self, kind: str, step: int) -> Instructions:
        """Copies of the received complete results into the rank's own."""
        result = self.own_results[kind]
        heads = self.buffers.all_heads(result)
        return [
            Copy(step, self.buffers.whole(made), View(result, rows, heads), first_heads)
            for made, rows, first_heads in self.stacked[kind]
        ]


def _parcels(messages: Sequence[Message], sets: SpanSets) -> list[Parcels]:
    return [parcels for message in messages for parcels in parcels_of(message, sets)]


def _operands(parcels: Sequence[Parcels], outs: Sequence[Parcels]) -> Iterator[Parcels]:
    """The operands among the messages of a step. Out and lse go with a gradient, unless `outs` already has them."""
    for one in parcels:
        if one.kind in OPERANDS:
            yield one
        if one.kind == "do" and not any(out.peer == one.peer and out.has(one) for out in outs):
            yield one._replace(kind="res", tag=one.tag + 4)


def _head_edges(messages: Sequence[_Messages], groups: Sequence[Sequence[TileGroup]]) -> dict[str, set[int]]:
    """The head numbers at which local sums are cut, by kind of result."""
    edges: dict[str, set[int]] = {kind: set() for kind in RESULTS}
    for group in chain.from_iterable(groups):
        edges["out"].update(group.heads)
        edges["dkv"].update(group.kv_heads)
    for parcels in chain.from_iterable((*m.sends, *m.recvs) for m in messages):
        if parcels.kind in RESULTS and not parcels.complete:
            edges["dkv" if parcels.kind == "dkv" else "out"].update(parcels.heads)
    return edges | {"dq": edges["out"]}


def _with_the_same_rows(views: list[tuple[Parcels, View[RowKey]]]) -> list[list[tuple[Parcels, View[RowKey]]]]:
    """Views to send, grouped by rows and number of heads. One copy packs views that differ only in their heads."""
    groups: dict[tuple[object, ...], list[tuple[Parcels, View[RowKey]]]] = {}
    for one, view in views:
        rows = (view.rows.start, view.rows.stop) if isinstance(view.rows, slice) else view.rows
        key: tuple[object, ...] = view.buffer, rows, view.heads[1] - view.heads[0]
        if any(other.heads == view.heads for _, other in groups.get(key, ())):
            key = *key, one.peer, one.tag
        groups.setdefault(key, []).append((one, view))
    return list(groups.values())


def _disjoint(rows: RowMap) -> bool:
    """Whether no row comes twice."""
    return bool((rows.start[1:] >= rows.stop[:-1]).all())
