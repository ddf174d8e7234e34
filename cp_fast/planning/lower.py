"""One rank's schedule, whichever it is, as a program of messages, copies and kernel launches on rows of buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cp_fast.planning.launches import LaunchTable, keys_in_buffer_order, launch_tables
from cp_fast.planning.operands import Held, Operands
from cp_fast.planning.results import Parcels, Results, parcels_of
from cp_fast.planning.rows import RowMap, RowMaps, Spans
from cp_fast.planning.tables import Key, RowKey, Tables
from cp_fast.planning.windows import BandTiles, WindowRule, band_tiles
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
from cp_ref.spec import OPERANDS, RESULTS, Tiles, Workload
from cp_ref.spec import Program as Steps
from cp_ref.spec import Step as Planned

__all__ = ["COMPLETE", "Draft", "SegmentKeys", "lower"]

HeadGroup = tuple[Heads, Heads, BandTiles]  # query heads, kv heads, tiles

COMPLETE = "complete"  # instead of sums: complete results that arrive are written to the rank's own rows


class SegmentKeys(NamedTuple):
    """A launch's segments on the host: keys of cumulative lengths, and the window. `bounds`, of q and kv: what no
    length ever exceeds, in a plan that is updated in place.
    """

    cu_q: Key
    cu_kv: Key
    left: int | None
    right: int | None
    bounds: tuple[int, int] | None = None


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
    maps = RowMaps()
    operands, results = Operands(tables, maps), Results(tables, maps, {"out": own_q, "dq": own_q, "dkv": own_kv})
    sides = {kind: (work.heads_kv, own_kv) if kind == "kv" else (work.heads_q, own_q) for kind in OWN}
    made = [operands.new(OWN[kind], kind, (0, heads), rows, 0) for kind, (heads, rows) in sides.items()]
    own_inputs, own_gradients = made[:2], made[2:]
    operands.held = list(own_inputs)
    shared = work, rule, operands, results, _CompleteOuts.of(forward), _Known()
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


@dataclass(frozen=True)
class _CompleteOuts:
    """The rows and heads of which this rank got complete outs from a peer, or gave them to one: for these the peer, or
    this rank, has the final out and lse, so that a `do` message need not carry them.
    """

    received: dict[int, list[Parcels]]
    sent: dict[int, list[Parcels]]

    @staticmethod
    def of(forward: Steps) -> _CompleteOuts:
        """The complete outs of the forward pass's steps."""
        received: dict[int, list[Parcels]] = {}
        sent: dict[int, list[Parcels]] = {}
        for step in forward:
            for messages, found in ((step.recvs, received), (step.sends, sent)):
                for message in messages:
                    if message.kind == "out" and message.complete:
                        found.setdefault(message.peer, []).extend(parcels_of(message))
        return _CompleteOuts(received, sent)

    @staticmethod
    def cover(outs: Sequence[Parcels], parcels: Parcels) -> bool:
        """Whether these have all rows and heads of a message."""
        return any(
            out.heads[0] <= parcels.heads[0]
            and parcels.heads[1] <= out.heads[1]
            and RowMap.packed(out.spans).covers(parcels.spans)
            for out in outs
        )


@dataclass
class _Known:
    """Bands and launches of tiles that were lowered before: both passes of the usual schedule compute the same, and so
    do the stages of an a2a schedule, for other heads.
    """

    _banded: dict[tuple[int, ...], tuple[Tiles, BandTiles]] = field(default_factory=dict)
    _launches: dict[int, tuple[BandTiles, list[LaunchTable]]] = field(default_factory=dict)

    def banded(self, work: Workload, tiles: Tiles) -> BandTiles:
        """The tiles with their bands."""
        rectangles = tuple(map(id, tiles.columns[:5]))  # columns that the tiles kept here keep alive
        if rectangles not in self._banded:
            self._banded[rectangles] = tiles, band_tiles(work.areas, tiles)
        return self._banded[rectangles][1]

    def launches(self, tiles: BandTiles, rule: WindowRule) -> list[LaunchTable]:
        """The launches that compute them."""
        if id(tiles) not in self._launches:
            self._launches[id(tiles)] = tiles, launch_tables(tiles, rule)
        return self._launches[id(tiles)][1]


@dataclass
class _Pass:
    """Lowers one pass, step by step."""

    work: Workload
    rule: WindowRule
    operands: Operands
    results: Results
    exchanged: _CompleteOuts
    known: _Known
    backward: bool

    def lower(self, steps: Steps) -> list[_StepDraft]:
        result_sends = self.results.announce(steps, self._head_edges(steps))
        found: list[_StepDraft] = []
        for number, (step, sends) in enumerate(zip(steps, result_sends, strict=True)):
            draft = _StepDraft(result_sends=sends)
            groups = list(self._head_groups(step.tiles))
            self._send(draft, number, step, groups)
            arriving = self._receive(draft, number, step)
            for heads, kv_heads, tiles in groups:
                self._launch(draft, number, heads, kv_heads, tiles)
            self.operands.held += arriving
            found.append(draft)
        return found

    # ---- messages

    def _send(self, draft: _StepDraft, number: int, step: Planned, groups: list[HeadGroup]) -> None:
        wanted: list[tuple[int, int, str, Heads, Spans]] = []  # peer, tag, kind, heads, rows
        for parcels in (p for m in step.sends if m.kind in OPERANDS for p in parcels_of(m)):
            wanted.append((parcels.peer, parcels.tag, parcels.kind, parcels.heads, parcels.spans))
            if parcels.kind == "do" and not self.exchanged.cover(
                self.exchanged.received.get(parcels.peer, []), parcels
            ):
                wanted.append((parcels.peer, parcels.tag + 4, "res", parcels.heads, parcels.spans))
        sends: list[tuple[int, int, Operand[RowKey]]] = []
        for peer, tag, kind, heads, spans in wanted:
            operand = self.operands.find(kind, heads, spans, number)
            if operand is None:  # in one buffer with all that this step needs of the kind
                tiles = [_rows_of(t[2], kind) for t in groups if heads == (t[1] if kind == "kv" else t[0])]
                others = [w[4] for w in wanted if w[2:4] == (kind, heads)]
                draft.packed += self.operands.gather(kind, heads, [*others, *tiles], number)
                operand = self._found(kind, heads, spans, number)
            sends.append((peer, tag, operand))
        draft.sends = _packed_together(sends)

    def _receive(self, draft: _StepDraft, number: int, step: Planned) -> list[Held]:
        """The receives of a step; and the buffers that are there from the next step on."""
        together: dict[tuple[str, Heads], list[Parcels]] = {}
        for message in step.recvs:
            for parcels in parcels_of(message):
                if parcels.kind in RESULTS:
                    draft.result_recvs.append(self._receive_result(parcels, number))
                    continue
                together.setdefault((parcels.kind, parcels.heads), []).append(parcels)
                if parcels.kind == "do" and not self.exchanged.cover(
                    self.exchanged.sent.get(parcels.peer, []), parcels
                ):
                    res = replace(parcels, kind="res", tag=parcels.tag + 4)
                    together.setdefault(("res", parcels.heads), []).append(res)
        arriving: list[Held] = []
        for (kind, heads), group in together.items():
            for some in [group] if _disjoint(self._rows_of_all(group)) else [[one] for one in group]:
                name = f"{self.operands.direction} {number}: {kind} {heads[0]}:{heads[1]} received"
                made = self.operands.new(name, kind, heads, self._rows_of_all(some), sum(p.size for p in some))
                draft.recvs += [Recv(p.peer, p.tag, made.name, p.size) for p in some]
                made.last_use = number
                arriving.append(made)
        return arriving

    def _rows_of_all(self, parcels: list[Parcels]) -> RowMap:
        """The rows of these, one behind the other."""
        spans = np.concatenate([p.start for p in parcels]), np.concatenate([p.stop for p in parcels])
        return self.operands.maps.packed(spans)

    def _receive_result(self, parcels: Parcels, number: int) -> ResultRecv[RowKey]:
        if parcels.complete:
            located = self.results.own[parcels.kind].locate(parcels.spans)
            whole = slice(0, parcels.size)
            rows = self.operands.tables.rows(located.row, located.count)
            heads = (0, parcels.heads[1] - parcels.heads[0])
            into = (Contribution(COMPLETE, whole, heads, rows, parcels.heads),)
        else:
            into = self.results.goes_to(parcels.kind, parcels.heads, parcels.spans, number)
        what = parcels.kind, parcels.heads, parcels.size, parcels.complete
        return ResultRecv(parcels.peer, parcels.tag, *what, into)

    # ---- tiles

    def _head_groups(self, tiles: Tiles) -> Iterator[HeadGroup]:
        """Tiles by heads: their query heads, and the kv heads that these use by the kernel's rule."""
        ranges = _head_ranges(tiles)
        for heads in ranges:
            some = tiles
            if len(ranges) > 1:
                some = tiles.take((tiles.head_start == heads[0]) & (tiles.head_stop == heads[1]))
            banded = self.known.banded(self.work, some)
            for part in aligned(heads, self.work.group_size):
                kv_heads = part[0] // self.work.group_size, -(-part[1] // self.work.group_size)
                if len(banded):
                    yield part, kv_heads, banded

    def _launch(self, draft: _StepDraft, number: int, heads: Heads, kv_heads: Heads, tiles: BandTiles) -> None:
        """The launches of one step's tiles of the same heads."""
        tables = self.known.launches(tiles, self.rule)
        for kind in ("q", "kv", "do", "res") if self.backward else ("q", "kv"):
            of_kind = kv_heads if kind == "kv" else heads
            if not all(self.operands.has(kind, of_kind, _rows_of_launch(t, kind)) for t in tables):
                draft.copies += self.operands.gather(kind, of_kind, [_rows_of(tiles, kind)], number)
        for table in tables:
            ordered = keys_in_buffer_order(table, self.operands.rows_of("kv", kv_heads, table.k_spans))
            draft.launches.append(self._one_launch(ordered, number, heads, kv_heads))

    def _one_launch(self, table: LaunchTable, number: int, heads: Heads, kv_heads: Heads) -> Launch[RowKey]:
        q_spans, k_spans, tables = table.q_spans, table.k_spans, self.operands.tables
        q, kv = self._found("q", heads, q_spans, number), self._found("kv", kv_heads, k_spans, number)
        segments = SegmentKeys(
            tables.lengths(table.lengths_q), tables.lengths(table.lengths_k), table.left, table.right
        )
        if not self.backward:
            out = self.results.goes_to("out", heads, q_spans, number)
            return Launch(q, kv, None, None, segments, heads[0], out)
        do, res = (self._found(kind, heads, q_spans, number) for kind in ("do", "res"))
        dq = self.results.goes_to("dq", heads, q_spans, number)
        dkv = self.results.goes_to("dkv", kv_heads, k_spans, number)
        return Launch(q, kv, do, res, segments, heads[0], dq, dkv)

    def _found(self, kind: str, heads: Heads, spans: Spans, number: int) -> Operand[RowKey]:
        operand = self.operands.find(kind, heads, spans, number)
        assert operand is not None, f"{kind} rows that were put together are not there"
        return operand

    def _head_edges(self, steps: Steps) -> dict[str, set[int]]:
        """Where heads are cut at home, by kind of result."""
        edges: dict[str, set[int]] = {kind: set() for kind in RESULTS}
        size = self.work.group_size
        for step in steps:
            cuts = _head_ranges(step.tiles)
            for part in {part for heads in cuts for part in aligned(heads, size)}:
                edges["out"].update(part)
                edges["dkv"].update((part[0] // size, -(-part[1] // size)))
            for message in (*step.sends, *step.recvs):
                if message.kind in RESULTS and not message.complete:
                    kind = "dkv" if message.kind == "dkv" else "out"
                    edges[kind].update(edge for parcels in parcels_of(message) for edge in parcels.heads)
        return edges | {"dq": edges["out"]}


def _head_ranges(tiles: Tiles) -> list[Heads]:
    """The ranges of heads that tiles have."""
    first, last = tiles.head_start, tiles.head_stop
    if len(tiles) and bool((first == first[0]).all()) and bool((last == last[0]).all()):
        return [(int(first[0]), int(last[0]))]
    return sorted({*zip(first.tolist(), last.tolist(), strict=True)})


def aligned(heads: Heads, group_size: int) -> list[Heads]:
    """Query heads as ranges that a kernel takes: all heads of some kv heads, or some heads of one.

    >>> aligned((1, 7), 2), aligned((0, 8), 4), aligned((1, 3), 4)
    ([(1, 2), (2, 6), (6, 7)], [(0, 8)], [(1, 3)])
    """
    first, last = heads
    begin, end = -(-first // group_size) * group_size, last // group_size * group_size
    if begin > end:  # inside one group
        return [heads]
    edges = sorted({first, begin, end, last})
    return list(pairwise(edges))


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


def _rows_of(tiles: BandTiles, kind: str) -> Spans:
    return (tiles.k_start, tiles.k_stop) if kind == "kv" else (tiles.q_start, tiles.q_stop)


def _rows_of_launch(table: LaunchTable, kind: str) -> Spans:
    return table.k_spans if kind == "kv" else table.q_spans


def _disjoint(rows: RowMap) -> bool:
    """Whether no row comes twice."""
    return bool((rows.start[1:] >= rows.stop[:-1]).all())
