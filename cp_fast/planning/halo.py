"""The steps of a ring under a window on both sides, as `cp_ref.spec.p2p` has them.

Every unit gets what it sees straight from the owner, one distance a step, and gives its gradients straight back. Far
units see each other in few sequences, so each step looks at those alone.
"""

from __future__ import annotations

from dataclasses import replace

from cp_fast.planning.batch import Batch
from cp_fast.planning.blocks import message_rows, packed, seen
from cp_fast.planning.drafts import DraftGive, DraftStep, DraftTake
from cp_fast.planning.placing import Place, place_launches
from cp_fast.planning.tables import RowKey, Tables
from cp_fast.planning.tiles import see
from cp_fast.planning.views import Views
from cp_ref.spec.schedule import tag

__all__ = ["draft_halo"]


def draft_halo(batch: Batch, place: Place, tables: Tables) -> tuple[list[DraftStep], list[DraftStep]]:
    """The forward and the backward steps of one rank."""
    count, unit = batch.count, place.unit
    forward: list[DraftStep] = []
    given: list[tuple[RowKey, int]] = []  # own rows that the unit s + 1 ahead sees, and their number
    views, block = Views(batch, unit), place.own
    for s in range(count):
        view = views.of(unit, unit - s)
        q_anchor = view.batch.of(place.q_anchor)
        launches = place_launches(view.batch, tables, see(view), q_anchor, block, block)
        forward.append(DraftStep(launches=launches, own=s == 0, grad_size=block.size))
        if s + 1 == count:
            break
        number, ahead, behind = tag(place.first_step + s, "kv"), unit + s + 1, unit - s - 1
        view = views.of(ahead, unit)
        rows, size = message_rows(tables, place.own, view.batch.of(place.own.anchors[0]), seen(view))
        given.append((rows, size))
        if size:
            forward[s].give_kv = [DraftGive(place.rank_of(ahead % count), number, rows, True)]
        view = views.of(unit, behind)
        block = packed(view.batch, seen(view))
        if block.size:
            rows = slice(0, block.size)
            forward[s].take_kv = [DraftTake(place.rank_of(behind % count), number, block.size, rows, False)]
    return forward, _backward(forward, given, place, count)


def _backward(forward: list[DraftStep], given: list[tuple[RowKey, int]], place: Place, count: int) -> list[DraftStep]:
    """The same steps, and in the step after each the gradients that it made: to the owner, and from who saw the own."""
    steps = [replace(step) for step in forward]
    if given:
        steps.append(DraftStep())
    for s, (rows, size) in enumerate(given, start=2):
        number, gone = tag(place.first_step + s, "dkv"), forward[s - 1].grad_size
        if gone:
            to = place.rank_of((place.unit - s + 1) % count)
            steps[s].give_dkv = [DraftGive(to, number, slice(0, gone), False)]
        if size:
            by = place.rank_of((place.unit + s - 1) % count)
            steps[s].take_dkv = [DraftTake(by, number, size, rows, True)]
    return steps
