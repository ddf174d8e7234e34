"""One rank's schedule, whichever it is, as a program of messages, copies and kernel launches on rows of buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain

from cp_fast.planning.complete_outs import CompleteOuts
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
    ResultSend,
    Send,
)
from cp_ref.spec import OPERANDS, RESULTS, Message, Workload
from cp_ref.spec import Program as Steps
from cp_ref.spec import Step as Planned

__all__ = ["COMPLETE", "Draft", "lower"]

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
    shared = groups, operands, results, CompleteOuts.of(forward, sets)
    drafts = _Pass(*shared, backward=False).lower(forward)
    kept = [held for held in operands.held if held in own_inputs or held.kind in saved]
    complete = {
        sums: operands.new(f"{sums}, kept", "res", heads, rows, 0) for sums, heads, rows in results.sent_complete()
    }
    dropped = [held for held in operands.held if held not in kept]
    last_uses = {held: held.last_use for held in operands.held}
    operands.held = [*kept, *own_gradients, *complete.values()]
    for held in operands.held:
        held.last_use = -1
    operands.direction = results.direction = "backward"
    back_drafts = _Pass(*shared, backward=True).lower(backward)
    needed = [held for held in kept if held.last_use >= 0]
    saved_sums = {sums: held.name for sums, held in complete.items() if held.last_use >= 0}
    for held in [*dropped, *(held for held in kept if held not in own_inputs and held not in needed)]:
        _free(drafts, held.name, last_uses[held])
    for held in operands.held:
        if held.name not in OWN.values() and held.last_use >= 0:
            _free(back_drafts, held.name, held.last_use)
    real = own["q"]
    return Draft(
        LoweredProgram(
            tuple(draft.step() for draft in drafts),
            tuple(draft.step() for draft in back_drafts),
            operands.buffers,
            results.sums,
            tuple(held.name for held in needed),
            saved_sums,
            tables.rows(real.row, real.stop - real.start),
        ),
        tables,
    )


@dataclass
class _StepDraft:
    """A step while it is made."""

    packed: list[Copy[RowKey]] = field(default_factory=list)
    sends: list[Send[RowKey]] = field(default_factory=list)
    recvs: list[Recv] = field(default_factory=list)
    result_sends: tuple[ResultSend, ...] = ()
    result_recvs: list[ResultRecv[RowKey]] = field(default_factory=list)
    copies: list[Copy[RowKey]] = field(default_factory=list)
    launches: list[Launch[RowKey]] = field(default_factory=list)
    last_use: list[str] = field(default_factory=list)

    def step(self) -> LoweredStep[RowKey]:
        lists = (getattr(self, f.name) for f in fields(self))
        return LoweredStep(*map(tuple, lists))


def _free(drafts: list[_StepDraft], name: str, last_use: int) -> None:
    """Let a buffer go after the step that needs it last; after the first where none does."""
    if drafts:
        drafts[max(last_use, 0)].last_use.append(name)


@dataclass
class _Pass:
    """Lowers one pass, step by step."""

    groups: TileGroups
    operands: Operands
    results: Results
    exchanged: CompleteOuts
    backward: bool

    def lower(self, steps: Steps) -> list[_StepDraft]:
        groups = [self.groups.of(step.tiles) for step in steps]
        result_sends = self.results.announce(steps, _head_edges(steps, groups))
        found: list[_StepDraft] = []
        for number, (step, computed, sends) in enumerate(zip(steps, groups, result_sends, strict=True)):
            draft = _StepDraft(result_sends=sends)
            self._send(draft, number, step, computed)
            arriving = self._receive(draft, number, step)
            for group in computed:
                self._launch(draft, number, group)
            self.operands.held += arriving
            found.append(draft)
        return found

    def _parcels(self, messages: Sequence[Message]) -> list[Parcels]:
        return [parcels for message in messages for parcels in parcels_of(message, self.operands.sets)]

    # ---- messages

    def _send(self, draft: _StepDraft, number: int, step: Planned, groups: list[TileGroup]) -> None:
        wanted: list[tuple[int, int, str, Heads, Spans]] = []  # peer, tag, kind, heads, rows
        for parcels in self._parcels([m for m in step.sends if m.kind in OPERANDS]):
            wanted.append((parcels.peer, parcels.tag, parcels.kind, parcels.heads, parcels.spans))
            if parcels.kind == "do" and not self.exchanged.cover(
                self.exchanged.received.get(parcels.peer, []), parcels
            ):
                wanted.append((parcels.peer, parcels.tag + 4, "res", parcels.heads, parcels.spans))
        sends: list[tuple[int, int, Operand[RowKey]]] = []
        for peer, tag, kind, heads, spans in wanted:
            operand = self.operands.find(kind, heads, spans, number)
            if operand is None:  # in one buffer with all that this step needs of the kind
                tiles = [group.rows(kind) for group in groups if group.heads_of(kind) == heads]
                others = [w[4] for w in wanted if w[2:4] == (kind, heads)]
                draft.packed += self.operands.gather(kind, heads, [*others, *tiles], number)
                operand = self._found(kind, heads, spans, number)
            sends.append((peer, tag, operand))
        draft.sends = _packed_together(sends)

    def _receive(self, draft: _StepDraft, number: int, step: Planned) -> list[Held]:
        """The receives of a step; and the buffers that are there from the next step on."""
        together: dict[tuple[str, Heads], list[Parcels]] = {}
        for parcels in self._parcels(step.recvs):
            if parcels.kind in RESULTS:
                draft.result_recvs.append(self._receive_result(parcels, number))
                continue
            together.setdefault((parcels.kind, parcels.heads), []).append(parcels)
            if parcels.kind == "do" and not self.exchanged.cover(self.exchanged.sent.get(parcels.peer, []), parcels):
                res = parcels._replace(kind="res", tag=parcels.tag + 4)
                together.setdefault(("res", parcels.heads), []).append(res)
        arriving: list[Held] = []
        for (kind, heads), group in together.items():
            for some in [group] if _disjoint(self._spans_of(group).packed) else [[one] for one in group]:
                name = f"{self.operands.direction} {number}: {kind} {heads[0]}:{heads[1]} received"
                spans = self._spans_of(some)
                made = self.operands.new(name, kind, heads, spans.packed, spans.total)
                draft.recvs += [Recv(p.peer, p.tag, made.name, p.spans.total) for p in some]
                made.last_use = number
                arriving.append(made)
        return arriving

    def _spans_of(self, parcels: list[Parcels]) -> Spans:
        """The rows of these, one behind the other."""
        return self.operands.sets.joined([p.spans for p in parcels])

    def _receive_result(self, parcels: Parcels, number: int) -> ResultRecv[RowKey]:
        if parcels.complete:
            located = self.results.own[parcels.kind].locate(parcels.spans)
            whole = slice(0, parcels.spans.total)
            rows = self.operands.tables.rows(located.row, located.count)
            heads = (0, parcels.heads[1] - parcels.heads[0])
            into = (Contribution(COMPLETE, whole, heads, rows, parcels.heads),)
        else:
            into = self.results.goes_to(parcels.kind, parcels.heads, parcels.spans, number)
        what = parcels.kind, parcels.heads, parcels.spans.total, parcels.complete
        return ResultRecv(parcels.peer, parcels.tag, *what, into)

    # ---- tiles

    def _launch(self, draft: _StepDraft, number: int, group: TileGroup) -> None:
        """The launches of one step's tiles of the same heads."""
        for kind in ("q", "kv", "do", "res") if self.backward else ("q", "kv"):
            heads = group.heads_of(kind)
            if None in [self.operands.holder(kind, heads, launch.rows(kind)) for launch in group.launches]:
                draft.copies += self.operands.gather(kind, heads, [group.rows(kind)], number)
        for launch in group.launches:
            buffer = self.operands.holder("kv", group.kv_heads, launch.kv)
            assert buffer is not None, "rows that were put together are not there"
            ordered = self.groups.in_buffer_order(launch, buffer.rows)
            draft.launches.append(self._one_launch(ordered, number, group.heads, group.kv_heads))

    def _one_launch(self, launch: LaunchRows, number: int, heads: Heads, kv_heads: Heads) -> Launch[RowKey]:
        q, kv = self._found("q", heads, launch.q, number), self._found("kv", kv_heads, launch.kv, number)
        if not self.backward:
            out = self.results.goes_to("out", heads, launch.q, number)
            return Launch(q, kv, None, None, launch.segments, heads[0], out)
        do, res = (self._found(kind, heads, launch.q, number) for kind in ("do", "res"))
        dq = self.results.goes_to("dq", heads, launch.q, number)
        dkv = (self.results.goes_to("dkv", kv_heads, rows, number, begin) for rows, begin in launch.layers)
        return Launch(q, kv, do, res, launch.segments, heads[0], dq, tuple(chain.from_iterable(dkv)))

    def _found(self, kind: str, heads: Heads, spans: Spans, number: int) -> Operand[RowKey]:
        operand = self.operands.find(kind, heads, spans, number)
        assert operand is not None, f"{kind} rows that were put together are not there"
        return operand


def _head_edges(steps: Steps, groups: Sequence[Sequence[TileGroup]]) -> dict[str, set[int]]:
    """Where heads are cut at home, by kind of result."""
    edges: dict[str, set[int]] = {kind: set() for kind in RESULTS}
    for group in (group for computed in groups for group in computed):
        edges["out"].update(group.heads)
        edges["dkv"].update(group.kv_heads)
    for message in (message for step in steps for message in (*step.sends, *step.recvs)):
        if message.kind in RESULTS and not message.complete:
            kind = "dkv" if message.kind == "dkv" else "out"
            edges[kind].update(edge for heads, *_ in message.by_heads for edge in heads)
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
