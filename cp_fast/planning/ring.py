"""The steps of a ring, as `cp_ref.spec.p2p` has them: what goes on, what comes, what is computed meanwhile.

Who still needs which rows of a block is a question about the units that it has yet to visit. Under a band that is open
on one side the answer depends on the last query (or the first) of all of them, so one running maximum over the units
answers it for every step. Under a window on both sides each unit gets what it sees straight from the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cp_fast.planning.batch import Array, Batch
from cp_fast.planning.blocks import Block, Range, farther, message_rows, packed, reach, seen, seen_within
from cp_fast.planning.drafts import DraftGive, DraftLaunch, DraftStep, DraftTake, draft_launch
from cp_fast.planning.tables import Tables
from cp_fast.planning.tiles import Placed, Slot, see
from cp_ref.spec.schedule import tag

__all__ = ["Place", "draft_ring", "place_launches"]

Ranges = tuple[Range, ...]


class Place(NamedTuple):
    """Where a rank stands: its unit, the rank of its ring in another unit, the number of its first step, and where the
    rows of its unit lie: `q_anchor` of the queries, and the block of its own keys.
    """

    unit: int
    rank_of: Callable[[int], int]
    first_step: int
    q_anchor: Array
    own: Block


class _Route(NamedTuple):
    """What a unit sends and gets at step s, as ranges of the owner's token axis."""

    gives: list[Ranges]  # of the block in hand (ring) or of the own one (halo)
    takes: list[Ranges]
    gives_grads: list[Ranges]  # from step 2 on; [0] and [1] are empty
    takes_grads: list[Ranges]


def draft_ring(batch: Batch, place: Place, tables: Tables) -> tuple[list[DraftStep], list[DraftStep]]:
    """The forward and the backward steps of one rank."""
    count, unit, last = batch.count, place.unit, batch.count - 1
    route = (_halo if batch.windowed else _ring)(batch, unit)
    blocks = [place.own, *(packed(ranges) for ranges in route.takes)]
    # the gradients of the block in hand, as they leave in the step after
    if batch.windowed:  # what came at step n - 1 goes straight home at step n + 1
        grads = blocks
    else:
        grads = [place.own, *(packed(ranges) for ranges in route.gives_grads[2:])]
    forward: list[DraftStep] = []
    backward: list[DraftStep] = []
    for s in range(count):
        placed = see(batch, unit, unit - s)
        launches = place_launches(batch, tables, placed, place.q_anchor, blocks[s], grads[s])
        gives: list[DraftGive] = []
        takes: list[DraftTake] = []
        if s < last:
            source, own = (place.own, True) if batch.windowed else (blocks[s], s == 0)
            to = place.rank_of((unit + (s + 1 if batch.windowed else 1)) % count)
            by = place.rank_of((unit - (s + 1 if batch.windowed else 1)) % count)
            number = tag(place.first_step + s, "kv")
            rows, size = message_rows(tables, source, route.gives[s])
            gives = [DraftGive(to, number, rows, own)] if size else []
            size = blocks[s + 1].size
            takes = [DraftTake(by, number, size, slice(0, size), False)] if size else []
        forward.append(DraftStep(gives, takes, [], [], launches, s == 0, blocks[s].size))
        size = place.own.size if s == 0 else grads[s].size
        backward.append(DraftStep(gives, takes, [], [], launches, s == 0, size))
    if last > 0:
        backward.append(DraftStep())
    for s in range(2, count + 1):
        _add_grads(batch, place, tables, route, grads, backward[s], s)
    return forward, backward


def place_launches(
    batch: Batch, tables: Tables, placed: Sequence[Placed], q_anchor: Array, block: Block, grads: Block
) -> list[DraftLaunch]:
    """Tiles on token axes to launches on rows: key rows of the block in hand, and of the buffer of its gradients."""
    found: list[DraftLaunch] = []
    for window, slots in placed:
        q = _flat([s.q + q_anchor for s in slots])
        rows = _flat([s.rows for s in slots])
        columns = _flat([s.columns for s in slots])
        k, grad = _key_rows(slots, block), None if grads is block else _key_rows(slots, grads)
        if not rows.all():
            there = rows > 0
            q, rows, columns, k = q[there], rows[there], columns[there], k[there]
            grad = grad if grad is None else grad[there]
        found.append(
            draft_launch(tables, window, (q, rows), (k, columns), None if grad is None else (grad, columns), columns)
        )
    return found


def _key_rows(slots: list[Slot], block: Block) -> Array:
    return _flat([s.k + block.anchors[min(s.piece, len(block.anchors) - 1)] for s in slots])


def _flat(columns: list[Array]) -> Array:
    """Sequence after sequence, so that a sequence's rows lie side by side."""
    return columns[0] if len(columns) == 1 else np.stack(columns, axis=1).ravel()


def _add_grads(
    batch: Batch, place: Place, tables: Tables, route: _Route, grads: list[Block], step: DraftStep, s: int
) -> None:
    """What was added at step s - 1: on to the next unit with the ring's sum so far, or straight home."""
    count, unit, hop = batch.count, place.unit, s - 1
    ahead = -hop if batch.windowed else 1
    number = tag(place.first_step + s, "dkv")
    if size := grads[hop].size:
        step.give_dkv = [DraftGive(place.rank_of((unit + ahead) % count), number, slice(0, size), False)]
    home = batch.windowed or s == count
    rows, size = message_rows(tables, place.own if home else grads[s], route.takes_grads[s])
    if size:
        step.take_dkv = [DraftTake(place.rank_of((unit - ahead) % count), number, size, rows, home)]


def _ring(batch: Batch, unit: int) -> _Route:
    count, last = batch.count, batch.count - 1
    reached = [reach(batch, unit + n) for n in range(count)]  # by the unit n ahead
    keys = [batch.owned("kv", unit - s) for s in range(count + 1)]  # of the unit s behind
    ahead = _running(batch, reached[1:])  # [t]: by the t + 1 units ahead
    behind = _running(batch, [reached[-n % count] for n in range(count)])  # [t]: by this unit and t behind it
    behind_it = _running(batch, [reached[-n % count] for n in range(1, count)])
    gives = [(seen_within(batch, ahead[last - s - 1], keys[s]),) for s in range(last)]
    takes = [
        (seen_within(batch, farther(batch, reached[0], ahead[last - s - 2]), keys[s + 1]),) for s in range(last - 1)
    ]
    takes += [(seen_within(batch, reached[0], keys[last]),)] if last else []
    gives_grads: list[Ranges] = [(), ()]
    takes_grads: list[Ranges] = [(), ()]
    for s in range(2, count + 1):
        hop = s - 1
        gives_grads.append((seen_within(batch, behind[hop - 1], keys[hop]),))
        takes_grads.append((seen_within(batch, behind_it[hop - 1], keys[hop + 1]),))
    return _Route(gives, takes, gives_grads, takes_grads)


def _halo(batch: Batch, unit: int) -> _Route:
    count = batch.count
    gives = [seen(batch, unit + s + 1, unit) for s in range(count - 1)]
    takes = [seen(batch, unit, unit - s - 1) for s in range(count - 1)]
    # the gradients of what came at step n - 1 leave at step n + 1
    return _Route(gives, takes, [(), (), *takes], [(), (), *gives])


def _running(batch: Batch, reached: list[Array]) -> list[Array]:
    """[t]: the reach of the first t + 1 units together."""
    found = reached[:1]
    for one in reached[1:]:
        found.append(farther(batch, found[-1], one))
    return found
