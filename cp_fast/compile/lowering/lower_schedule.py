"""Lowering: one rank's schedule, of any kind, becomes an executable plan.

Lowering runs on the host, step by step, on columns (arrays with one number a tile or a span). The plan is right and
slow; the compiler passes (`cp_fast.compile.pipeline`) make it fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from cp_fast.compile.executable_plan import ExecutablePlan, PassPlan
from cp_fast.compile.index_tables import RowKey, Tables
from cp_fast.compile.instructions import OWN, Instruction, Wait, reads
from cp_fast.compile.lowering.lower_messages import lower_messages
from cp_fast.compile.lowering.lower_results import add_sink, arrived_results, local_results
from cp_fast.compile.lowering.lower_tiles import lower_tiles
from cp_fast.compile.lowering.pass_state import PassState, Shared
from cp_fast.compile.lowering.sums import Parcels, parcels_of
from cp_fast.compile.row_maps import RowMap, SpanSets
from cp_fast.compile.tiles.groups import TileGroup, TileGroups
from cp_fast.compile.tiles.windows import WindowRule
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import RESULTS, Message, RankSchedule

__all__ = ["Draft", "lower"]


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
    shares_keys: int = 0,
) -> Draft:
    """Lower one rank's schedule of both passes.

    Args:
        forward, backward: the rank's part of a schedule of this workload.
        saved: the kinds of operands that are kept between the passes.
        rule: which tiles keep their windows.
        sink: whether the softmax has a sink.
        skipped: the compiler passes that do not run, and why.
        shares_keys: see `TileGroups`.

    Raises:
        ValueError: the schedule computes with rows that the rank does not have.
    """
    tables, sets = Tables(), SpanSets()
    skipped = skipped or {}
    groups = TileGroups(work, rule, tables, sets, skipped, shares_keys=shares_keys)
    own = {side: work.ownership.side(side).of(rank) for side in ("q", "kv")}
    own_q = RowMap.of(own["q"])
    own_kv = own_q if work.ownership.kv is work.ownership.q else RowMap.of(own["kv"])
    shared = Shared(work, rank, groups, tables, sets, {"q": own_q, "kv": own_kv}, sink)
    sent, received = (
        _parcels([m for step in forward for m in getattr(step, name) if m.kind == "out" and m.complete], sets)
        for name in ("sends", "recvs")
    )
    first = PassState(shared, "forward", ("q", "kv"), ("out",))
    plan_forward = _lower_pass(first, forward)
    second = PassState(shared, "backward", ("q", "kv", "do", "res"), ("dq", "dkv"), sent, received)
    kept = [held for held in first.operands.held if held.number < len(OWN) or held.kind in saved]
    pairs = [(held.number, second.keep(held, plan_forward)) for held in kept]
    pairs += [(o.message, second.keep_out(o.heads, o.rows)) for o in first.sums.outgoing["out"] if o.complete]
    plan_backward = _lower_pass(second, backward)
    read = {number for one in plan_backward.instructions for number in reads(one)}
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


def _lower_pass(state: PassState, steps: RankSchedule) -> PassPlan[RowKey]:
    """All steps of a pass."""
    sets = state.shared.sets
    messages = [(_parcels(step.sends, sets), _parcels(step.recvs, sets)) for step in steps]
    groups = [state.shared.groups.of(step.tiles) for step in steps]
    announced = state.sums.announce([sends for sends, _ in messages], _head_edges(messages, groups))
    found: list[Instruction[RowKey]] = []
    for n, (of_step, computed) in enumerate(zip(messages, groups, strict=True)):
        to_messages, sends = announced[n]
        for copy in to_messages:
            if state.buffers.specs[copy.target.buffer].dtype == "input":  # a partial one: by its owner
                found += add_sink(state, copy.source.buffer, None, n)
            found.append(copy)
        packed, posted, arriving, accumulates = lower_messages(state, n, *of_step, computed)
        found += [*packed, *sends, *posted]
        for group in computed:
            found += lower_tiles(state, n, group)
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
    return PassPlan(state.direction, len(steps), tuple(state.buffers.specs), tuple(found), state.own_results)


def _parcels(messages: Sequence[Message], sets: SpanSets) -> list[Parcels]:
    return [parcels for message in messages for parcels in parcels_of(message, sets)]


def _head_edges(
    messages: Sequence[Sequence[list[Parcels]]], groups: Sequence[Sequence[TileGroup]]
) -> dict[str, set[int]]:
    """The head numbers at which local sums are cut, by kind of result."""
    edges: dict[str, set[int]] = {kind: set() for kind in RESULTS}
    for group in chain.from_iterable(groups):
        edges["out"].update(group.heads)
        edges["dkv"].update(group.kv_heads)
    for parcels in chain.from_iterable(chain.from_iterable(messages)):
        if parcels.kind in RESULTS and not parcels.complete:
            edges["dkv" if parcels.kind == "dkv" else "out"].update(parcels.heads)
    return edges | {"dq": edges["out"]}
