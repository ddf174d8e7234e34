"""The steps of a ring, as `cp_ref.spec.p2p` has them: what goes on, what comes, what is computed meanwhile.

Who needs which rows of a block is a question about units: those that it has yet to visit (its keys go on to them), and
those that it has visited (its gradients are their sum). Under a band that is open on one side the answer depends on the
last query (or the first) of all of them, so running maxima over the units answer it for every step. Under a window on
both sides there is no ring: see `halo`.

    _by_steps   one step after the other, whatever becomes of the tiles
    _by_chunks  where sequences are cut alike, and no tile is cut: a step is one loop
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np

from cp_fast.planning.batch import Batch
from cp_fast.planning.blocks import farther, message_rows, packed, reach, seen_within
from cp_fast.planning.columns import Spans
from cp_fast.planning.drafts import DraftGive, DraftLaunch, DraftStep, DraftTake, draft_launch
from cp_fast.planning.loops.base import Ring, RingStep
from cp_fast.planning.placing import Place, place_launches
from cp_fast.planning.tables import RowKey, Tables
from cp_fast.planning.tiles import Window, see, see_whole
from cp_fast.planning.views import Views
from cp_ref.spec.schedule import tag

__all__ = ["draft_ring"]

Message = tuple[RowKey, int]  # rows, and their number


@dataclass(frozen=True, slots=True)
class _Step:
    """What a step computes; how large its block is, and the buffer of its gradients; the rows of the block that go on,
    and those of the gradients that come (None where the ring has no such message).
    """

    launches: list[DraftLaunch]
    size: int
    grad_size: int
    leaving: Message | None
    arriving: Message | None


def draft_ring(batch: Batch, place: Place, tables: Tables) -> tuple[list[DraftStep], list[DraftStep]]:
    """The forward and the backward steps of one rank."""
    ahead, behind = (place.rank_of((place.unit + n) % batch.count) for n in (1, -1))
    views = Views(batch, place.unit)
    steps = _by_chunks(batch, place, tables, views) or list(_by_steps(batch, place, tables, views))
    forward: list[DraftStep] = []
    for s, step in enumerate(steps):
        draft = DraftStep(launches=step.launches, own=s == 0, grad_size=step.grad_size)
        if s > 0 and step.size:
            number, rows = tag(place.first_step + s - 1, "kv"), slice(0, step.size)
            forward[s - 1].take_kv = [DraftTake(behind, number, step.size, rows, False)]
        if step.leaving is not None and step.leaving[1]:
            draft.give_kv = [DraftGive(ahead, tag(place.first_step + s, "kv"), step.leaving[0], s == 0)]
        forward.append(draft)
    arriving = [step.arriving for step in steps if step.arriving is not None]
    if steps[0].leaving is not None:
        arriving.append(steps[0].leaving)  # own rows that other units see
    return forward, _backward(forward, arriving, place, (ahead, behind))


def _by_steps(batch: Batch, place: Place, tables: Tables, views: Views) -> Iterator[_Step]:
    count, unit = batch.count, place.unit
    together = partial(farther, batch)
    own, *others = (reach(batch, unit + n) for n in range(count))
    to_visit = list(reversed(list(accumulate(others, together))))  # [s]: by the block in hand at step s
    visited = accumulate(reversed(others), together)  # from step 2 on: before this unit
    block = grads = place.own  # in hand, and as its gradients leave in the step after
    for s in range(count):
        keys = batch.owned("kv", unit - s)
        before = next(visited) if s > 1 else None
        if s > 0:
            block = packed(batch, (seen_within(batch, together(own, to_visit[s]) if s + 1 < count else own, keys),))
            grads = packed(batch, (seen_within(batch, own if before is None else together(own, before), keys),))
        launches = place_launches(batch, tables, see(views.of(unit, unit - s)), place.q_anchor, block, grads)
        leaving = arriving = None
        if s + 1 < count:
            leaving = message_rows(tables, block, block.anchors[0], (seen_within(batch, to_visit[s], keys),))
        if before is not None:
            arriving = message_rows(tables, grads, grads.anchors[0], (seen_within(batch, before, keys),))
        yield _Step(launches, block.size, grads.size, leaving, arriving)


def _by_chunks(batch: Batch, place: Place, tables: Tables, views: Views) -> list[_Step] | None:
    """None where a tile is cut, or where the loops have nothing for it."""
    count, unit = batch.count, place.unit
    if count == 1 or batch.lo is not None or isinstance(batch.hi, np.ndarray) or batch.chunks(unit) is None:
        return None
    tiles = [see_whole(views.of(unit, unit - s)) for s in range(count)]
    whole = [tile for tile in tiles if tile is not None]
    if len(whole) < count:
        return None
    tokens = [batch.owned("kv", n) for n in range(count)]
    ring = Ring(unit, tokens, batch.hi, [t.pieces for t in whole], place.q_anchor, place.own.anchors[0])
    steps = batch.loops.ring(ring)
    if steps is None:
        return None
    return [
        _placed(tables, tile.window, step, place.own.size if s == 0 else None)
        for s, (tile, step) in enumerate(zip(whole, steps, strict=True))
    ]


def _placed(tables: Tables, window: Window, step: RingStep, own: int | None) -> _Step:
    """A step with its rows in the tables. `own`: the rows of the own keys' buffer, in the first step."""
    launches = [draft_launch(tables, window, step.tiles)] if step.tiles.q.total else []
    sizes = (step.size, step.grad_size) if own is None else (own, own)
    leaving = _message(tables, step.sent, None if own is not None else step.size)
    return _Step(launches, *sizes, leaving, _message(tables, step.got, step.grad_size))


def _message(tables: Tables, rows: Spans | None, block: int | None) -> Message | None:
    """`block`: the number of rows of a buffer that holds nothing but what it is for."""
    if rows is None:
        return None
    return slice(0, rows.total) if rows.total in (0, block) else tables.spans(rows), rows.total


def _backward(
    forward: list[DraftStep], arriving: list[Message], place: Place, peers: tuple[int, int]
) -> list[DraftStep]:
    """The same steps; in the step after each the gradients of its block go on, from the last unit to the owner."""
    steps = [replace(step) for step in forward]
    if arriving:
        steps.append(DraftStep())
    for s, (rows, size) in enumerate(arriving, start=2):
        number, gone, home = tag(place.first_step + s, "dkv"), forward[s - 1].grad_size, s == len(forward)
        if gone:
            steps[s].give_dkv = [DraftGive(peers[0], number, slice(0, gone), False)]
        if size:
            steps[s].take_dkv = [DraftTake(peers[1], number, size, rows, home)]
    return steps
