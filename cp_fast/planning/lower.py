"""One rank's schedule, whichever it is, as a program of messages, copies and kernel launches on rows of buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from cp_fast.planning.groups import LaunchRows, TileGroup, TileGroups
from cp_fast.planning.operands import Held, Operands
from cp_fast.planning.results import Parcels, Results, parcels_of
from cp_fast.planning.rows import RowMap, Spans, SpanSets
from cp_fast.planning.tables import RowKey, Tables
from cp_fast.planning.windows import WindowRule
from cp_fast.program import (
    OWN,
    Contribution,
    Copy,
    Heads,
    Launch,
    LoweredProgram,
    LoweredStep,
    Operand,
    Recv,
    ResultRecv,
    Send,
)
from cp_ref.spec import OPERANDS, RESULTS, Message, Workload
from cp_ref.spec import Program as Steps

__all__ = ["COMPLETE", "Draft", "lower", "reads", "released"]

COMPLETE = "complete"  # instead of sums: complete results that arrive are written to the rank's own rows


@dataclass(frozen=True)
class Draft:
    """A lowered program on the host, and its tables."""

    program: LoweredProgram[RowKey]
    tables: Tables


def lower(
    work: Workload, rank: int, forward: Steps, backward: Steps, saved: tuple[str, ...], rule: WindowRule
) -> Draft:
    """Lower one rank's steps of both passes.

    Args:
        forward, backward: the rank's part of a schedule of this workload.
        saved: the kinds of operands that are kept between the passes.
        rule: which tiles keep their windows.
    """
    tables = Tables()
    own = {side: work.ownership.side(side).of(rank) for side in ("q", "kv")}
    own_q = RowMap.of(own["q"])
    own_kv = own_q if work.ownership.kv is work.ownership.q else RowMap.of(own["kv"])
    sets = SpanSets()
    operands, results = Operands(tables, sets), Results(tables, sets, {"out": own_q, "dq": own_q, "dkv": own_kv})
    sides = {kind: (work.heads_kv, own_kv) if kind == "kv" else (work.heads_q, own_q) for kind in OWN}
    made = [operands.new(OWN[kind], kind, (0, heads), rows, 0) for kind, (heads, rows) in sides.items()]
    own_inputs, own_gradients = made[:2], made[2:]
    operands.held = list(own_inputs)
    groups = TileGroups(work, rule, tables, sets)
    steps = _Pass(groups, operands, results, tuple(OWN)[:2]).lower(forward)
    sent, received = (
        _parcels([m for step in forward for m in getattr(step, name) if m.kind == "out" and m.complete], sets)
        for name in ("sends", "recvs")
    )
    kept = [held for held in operands.held if held in own_inputs or held.kind in saved]
    complete = {
        sums: operands.new(f"{sums}, kept", "res", heads, rows, 0) for sums, heads, rows in results.sent_complete()
    }
    operands.held = [*kept, *own_gradients, *complete.values()]
    operands.direction = results.direction = "backward"
    back_steps = _Pass(groups, operands, results, tuple(OWN), sent, received).lower(backward)
    read = {name for step in back_steps for name in reads(step)}
    needed = tuple(held.name for held in kept if held.name in read)
    program = LoweredProgram(
        tuple(steps),
        tuple(back_steps),
        operands.buffers,
        results.sums,
        needed,
        {sums: held.name for sums, held in complete.items() if held.name in read},
        tables.rows(own["q"].row, own["q"].stop - own["q"].start),
    )
    return released(Draft(program, tables))


def reads(step: LoweredStep[RowKey]) -> Iterator[str]:
    """The buffers that a step reads, as often as it reads them."""
    yield from (copy.source.buffer for copy in (*step.packed, *step.copies))
    yield from (send.buffer for send in step.sends)
    for launch in step.launches:
        yield from (x.buffer for x in (launch.q, launch.kv, launch.do, launch.res) if x is not None)


def released(draft: Draft) -> Draft:
    """The same program with the buffers that each step is the last to use, but for those that are kept."""
    program, own = draft.program, set(OWN.values())
    forward, backward = _released(program.forward, own | {*program.saved}), _released(program.backward, own)
    return replace(draft, program=replace(program, forward=forward, backward=backward))


def _released(steps: Sequence[LoweredStep[RowKey]], kept: set[str]) -> tuple[LoweredStep[RowKey], ...]:
    found: list[LoweredStep[RowKey]] = []
    for step in reversed(steps):
        last = {*reads(step), *(recv.buffer for recv in step.recvs)} - kept
        kept = kept | last
        found.append(replace(step, last_use=tuple(sorted(last))))
    return tuple(reversed(found))


def _parcels(messages: Sequence[Message], sets: SpanSets) -> list[Parcels]:
    return [parcels for message in messages for parcels in parcels_of(message, sets)]


def _operands(parcels: Sequence[Parcels], outs: Sequence[Parcels]) -> Iterator[Parcels]:
    """The operands among the messages of a step; with a gradient go out and lse, but where these outs have them."""
    for one in parcels:
        if one.kind in OPERANDS:
            yield one
        if one.kind == "do" and not any(out.peer == one.peer and out.has(one) for out in outs):
            yield one._replace(kind="res", tag=one.tag + 4)


class _Messages(NamedTuple):
    """The messages of a step, by heads."""

    sends: list[Parcels]
    recvs: list[Parcels]


@dataclass
class _Pass:
    """Lowers one pass, step by step. `kinds`: the operands of its tiles. `sent`, `received`: of a backward pass, the
    complete outs of the forward pass. Of these both ends have out and lse, which need not travel beside the gradient.
    """

    groups: TileGroups
    operands: Operands
    results: Results
    kinds: Sequence[str]
    sent: Sequence[Parcels] = ()
    received: Sequence[Parcels] = ()

    def lower(self, steps: Steps) -> list[LoweredStep[RowKey]]:
        sets = self.operands.sets
        messages = [_Messages(_parcels(step.sends, sets), _parcels(step.recvs, sets)) for step in steps]
        groups = [self.groups.of(step.tiles) for step in steps]
        announced = self.results.announce([m.sends for m in messages], _head_edges(messages, groups))
        found: list[LoweredStep[RowKey]] = []
        for n, (of_step, computed, result_sends) in enumerate(zip(messages, groups, announced, strict=True)):
            packed, sends = self._sends(n, of_step.sends, computed)
            arriving, recvs = self._recvs(n, of_step.recvs)
            result_recvs = [self._result_recv(n, p) for p in of_step.recvs if p.kind in RESULTS]
            copies: list[Copy[RowKey]] = []
            launches: list[Launch[RowKey]] = []
            for group in computed:
                held, gathered = self._holders(n, group)
                copies += gathered
                launches += (self._launch(n, group, *of_launch) for of_launch in zip(group.launches, held, strict=True))
            self.operands.held += arriving
            sent, received = (tuple(packed), tuple(sends), tuple(recvs)), (result_sends, tuple(result_recvs))
            found.append(LoweredStep(*sent, *received, tuple(copies), tuple(launches)))
        return found

    # ---- messages

    def _sends(
        self, number: int, parcels: Sequence[Parcels], groups: Sequence[TileGroup]
    ) -> tuple[list[Copy[RowKey]], list[Send[RowKey]]]:
        """The sends of a step's operands, and the copies that put their rows together before."""
        wanted = list(_operands(parcels, self.received))
        packed: list[Copy[RowKey]] = []
        sends: list[tuple[int, int, Operand[RowKey]]] = []
        for one in wanted:
            kind, heads = one.kind, one.heads
            held = self.operands.holder(kind, heads, one.spans)
            if held is None:  # in one buffer with all that this step needs of the kind
                tiles = [group.rows(kind) for group in groups if group.heads_of(kind) == heads]
                others = [p.spans for p in wanted if (p.kind, p.heads) == (kind, heads)]
                held, copies = self.operands.gather(kind, heads, [*others, *tiles], number)
                packed += copies
            sends.append((one.peer, one.tag, self.operands.of(held, one.spans, heads)))
        return packed, _packed_together(sends)

    def _recvs(self, number: int, parcels: Sequence[Parcels]) -> tuple[list[Held], list[Recv]]:
        """The receives of a step's operands, and the buffers that are there from the next step on."""
        together: dict[tuple[str, Heads], list[Parcels]] = {}
        for one in _operands(parcels, self.sent):
            together.setdefault((one.kind, one.heads), []).append(one)
        arriving: list[Held] = []
        recvs: list[Recv] = []
        for (kind, heads), group in together.items():
            apart = len(group) == 1 or _disjoint(self._spans_of(group).buffer)
            for some in [group] if apart else [[one] for one in group]:
                name = f"{self.operands.direction} {number}: {kind} {heads[0]}:{heads[1]} received"
                spans = self._spans_of(some)
                made = self.operands.new(name, kind, heads, spans.buffer, spans.total)
                recvs += [Recv(p.peer, p.tag, made.name, p.spans.total) for p in some]
                arriving.append(made)
        return arriving, recvs

    def _spans_of(self, parcels: list[Parcels]) -> Spans:
        """The rows of these, one behind the other."""
        return self.operands.sets.joined([p.spans for p in parcels])

    def _result_recv(self, number: int, parcels: Parcels) -> ResultRecv[RowKey]:
        if parcels.complete:
            located = self.results.own[parcels.kind].locate(parcels.spans)
            whole = slice(0, parcels.spans.total)
            rows = self.operands.tables.rows(located.row, located.count)
            heads = (0, parcels.heads[1] - parcels.heads[0])
            into = (Contribution(COMPLETE, whole, heads, rows, parcels.heads),)
        else:
            into = self.results.goes_to(parcels.kind, parcels.heads, self.operands.sets.packed(parcels.spans), number)
        what = parcels.kind, parcels.heads, parcels.spans.total, parcels.complete
        return ResultRecv(parcels.peer, parcels.tag, *what, into)

    # ---- tiles

    def _holders(self, number: int, group: TileGroup) -> tuple[list[tuple[Held, ...]], list[Copy[RowKey]]]:
        """For each launch of a step's tiles of the same heads, the buffers that have its operands, by kind; and the
        copies that fill them.
        """
        by_kind: list[list[Held]] = []
        copies: list[Copy[RowKey]] = []
        for kind in self.kinds:
            heads = group.heads_of(kind)
            held = [self.operands.holder(kind, heads, launch.rows(kind)) for launch in group.launches]
            if None in held:
                made, filled = self.operands.gather(kind, heads, [group.rows(kind)], number)
                held, copies = [made] * len(held), copies + filled
            by_kind.append([one for one in held if one is not None])
        return list(zip(*by_kind, strict=True)), copies

    def _launch(self, number: int, group: TileGroup, launch: LaunchRows, held: tuple[Held, ...]) -> Launch[RowKey]:
        heads, kv_heads = group.heads, group.kv_heads
        launch = self.groups.in_buffer_order(launch, held[1].rows)
        q, kv = self.operands.of(held[0], launch.q, heads), self.operands.of(held[1], launch.kv, kv_heads)
        if len(held) == 2:
            out = self.results.goes_to("out", heads, self.operands.sets.packed(launch.q), number)
            return Launch(q, kv, None, None, launch.segments, heads[0], out)
        do, res = (self.operands.of(one, launch.q, heads) for one in held[2:])
        dq = self.results.goes_to("dq", heads, self.operands.sets.packed(launch.q), number)
        dkv = (self.results.goes_to("dkv", kv_heads, layer, number) for layer in launch.layers)
        return Launch(q, kv, do, res, launch.segments, heads[0], dq, tuple(chain.from_iterable(dkv)))


def _head_edges(messages: Sequence[_Messages], groups: Sequence[Sequence[TileGroup]]) -> dict[str, set[int]]:
    """Where heads are cut at home, by kind of result."""
    edges: dict[str, set[int]] = {kind: set() for kind in RESULTS}
    for group in chain.from_iterable(groups):
        edges["out"].update(group.heads)
        edges["dkv"].update(group.kv_heads)
    for parcels in chain.from_iterable((*m.sends, *m.recvs) for m in messages):
        if parcels.kind in RESULTS and not parcels.complete:
            edges["dkv" if parcels.kind == "dkv" else "out"].update(parcels.heads)
    return edges | {"dq": edges["out"]}


def _packed_together(sends: list[tuple[int, int, Operand[RowKey]]]) -> list[Send[RowKey]]:
    """(peer, tag, operand) as sends: the same rows for as many heads each are packed for all peers at once."""
    groups: dict[tuple[object, ...], list[tuple[int, int, Operand[RowKey]]]] = {}
    for peer, tag, what in sends:
        rows = (what.rows.start, what.rows.stop) if isinstance(what.rows, slice) else what.rows
        key: tuple[object, ...] = what.buffer, rows, what.heads[1] - what.heads[0]
        if any(other[2].heads == what.heads for other in groups.get(key, ())):
            key = *key, peer, tag  # not other heads
        groups.setdefault(key, []).append((peer, tag, what))
    return [
        Send(
            tuple(peer for peer, _, _ in group),
            tuple(tag for _, tag, _ in group),
            group[0][2].buffer,
            group[0][2].rows,
            tuple(what.heads[0] for _, _, what in group),
            group[0][2].heads[1] - group[0][2].heads[0],
        )
        for group in groups.values()
    ]


def _disjoint(rows: RowMap) -> bool:
    """Whether no row comes twice."""
    return bool((rows.start[1:] >= rows.stop[:-1]).all())
