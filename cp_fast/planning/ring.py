"""The steps of a ring, as `cp_ref.spec.p2p` has them: what goes on, what comes, what is computed meanwhile.

Who needs which rows of a block is a question about units: those that it has yet to visit (its keys go on to them), and
those that it has visited (its gradients are their sum). Under a band that is open on one side the answer depends on the
last query (or the first) of all of them, so running maxima over the units answer it for every step. Under a window on
both sides there is no ring: see `halo`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate

from cp_fast.planning.batch import Batch
from cp_fast.planning.blocks import farther, message_rows, packed, reach, seen_within
from cp_fast.planning.drafts import DraftGive, DraftStep, DraftTake
from cp_fast.planning.placing import Place, place_launches
from cp_fast.planning.tables import RowKey, Tables
from cp_fast.planning.tiles import see
from cp_ref.spec.schedule import tag

__all__ = ["draft_ring"]


def draft_ring(batch: Batch, place: Place, tables: Tables) -> tuple[list[DraftStep], list[DraftStep]]:
    """The forward and the backward steps of one rank."""
    count, unit = batch.count, place.unit
    ahead, behind = (place.rank_of((unit + n) % count) for n in (1, -1))
    together = partial(farther, batch)
    own, *others = (reach(batch, unit + n) for n in range(count))
    to_visit = list(reversed(list(accumulate(others, together))))  # [s]: by the block in hand at step s
    visited = accumulate(reversed(others), together)  # from step 2 on: before this unit
    forward: list[DraftStep] = []
    leaving: list[tuple[RowKey, int]] = []  # rows of the keys that go on, and their number
    arriving: list[tuple[RowKey, int]] = []  # rows of the gradients that come, from step 2 on
    block = grads = place.own  # in hand, and as its gradients leave in the step after
    for s in range(count):
        keys = batch.owned("kv", unit - s)
        before = next(visited) if s > 1 else None
        if s > 0:
            block = packed(batch, (seen_within(batch, together(own, to_visit[s]) if s + 1 < count else own, keys),))
            grads = packed(batch, (seen_within(batch, own if before is None else together(own, before), keys),))
        launches = place_launches(batch, tables, see(batch, unit, unit - s), place.q_anchor, block, grads)
        step = DraftStep(launches=launches, own=s == 0, grad_size=grads.size)
        if s > 0 and block.size:
            number, rows = tag(place.first_step + s - 1, "kv"), slice(0, block.size)
            forward[s - 1].take_kv = [DraftTake(behind, number, block.size, rows, False)]
        if s + 1 < count:
            rows, size = message_rows(tables, block, block.anchors[0], (seen_within(batch, to_visit[s], keys),))
            if size:
                step.give_kv = [DraftGive(ahead, tag(place.first_step + s, "kv"), rows, s == 0)]
            leaving.append((rows, size))
        if before is not None:
            arriving.append(message_rows(tables, grads, grads.anchors[0], (seen_within(batch, before, keys),)))
        forward.append(step)
    arriving += leaving[:1]  # own rows that other units see
    return forward, _backward(forward, arriving, place, (ahead, behind))


def _backward(
    forward: list[DraftStep], arriving: list[tuple[RowKey, int]], place: Place, peers: tuple[int, int]
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
