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
from cp_fast.planning.blocks import Block, Range, Reach, packed, rows_in, seen, seen_within
from cp_fast.planning.drafts import DraftGive, DraftLaunch, DraftStep, DraftTake, draft_launch
from cp_fast.planning.tables import Tables
from cp_fast.planning.tiles import Placed, see
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
    grads = [place.own, *(packed(ranges) for ranges in route.gives_grads[2:])]
    forward: list[DraftStep] = []
    backward: list[DraftStep] = []
    for s in range(count):
        placed = see(batch, unit, unit - s)
        launches = place_launches(batch, tables, placed, place.q_anchor, blocks[s].anchors, grads[s].anchors)
        gives: list[DraftGive] = []
        takes: list[DraftTake] = []
        if s < last:
            source, own = (place.own, True) if batch.windowed else (blocks[s], s == 0)
            to = place.rank_of((unit + (s + 1 if batch.windowed else 1)) % count)
            by = place.rank_of((unit - (s + 1 if batch.windowed else 1)) % count)
            number = tag(place.first_step + s, "kv")
            rows = tables.rows(*rows_in(source.anchors[0], route.gives[s]))
            gives = [DraftGive(to, number, rows, own)] if rows != _NO_ROWS else []
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
    batch: Batch,
    tables: Tables,
    placed: Sequence[Placed],
    q_anchor: Array,
    kv_anchors: tuple[Array, ...],
    grad_anchors: tuple[Array, ...],
) -> list[DraftLaunch]:
    """Tiles on token axes to launches on rows."""
    found: list[DraftLaunch] = []
    for window, slots in placed:
        q, rows, k, columns, g = [], [], [], [], []
        for slot in slots:
            there = slot.rows > 0
            everywhere = bool(there.all())
            q.append(slot.q + q_anchor)
            k.append(slot.k + kv_anchors[min(slot.piece, len(kv_anchors) - 1)])
            g.append(slot.k + grad_anchors[min(slot.piece, len(grad_anchors) - 1)])
            rows.append(slot.rows)
            columns.append(slot.columns)
            if len(slots) == 1 and not everywhere:
                q, rows, k, columns, g = ([x[0][there]] for x in (q, rows, k, columns, g))
        if len(slots) > 1:  # sequence after sequence, so that a sequence's rows lie side by side
            q, rows, k, columns, g = ([np.stack(x, axis=1).ravel()] for x in (q, rows, k, columns, g))
            there = rows[0] > 0
            q, rows, k, columns, g = ([x[0][there]] for x in (q, rows, k, columns, g))
        found.append(draft_launch(tables, window, (q[0], rows[0]), (k[0], columns[0]), (g[0], columns[0]), columns[0]))
    return found


_NO_ROWS = slice(0, 0)


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
    anchor = place.own.anchors[0] if home else grads[s].anchors[0]
    rows = tables.rows(*rows_in(anchor, route.takes_grads[s]))
    if rows != _NO_ROWS:
        size = sum(int(r.count.sum()) for r in route.takes_grads[s])
        step.take_dkv = [DraftTake(place.rank_of((unit - ahead) % count), number, size, rows, home)]


def _ring(batch: Batch, unit: int) -> _Route:
    count, last = batch.count, batch.count - 1
    reach = [Reach.of(batch.owned("q", unit + n), batch.far) for n in range(count)]  # of the unit n ahead
    keys = [batch.owned("kv", unit - s) for s in range(count + 1)]  # of the unit s behind
    ahead = _running(reach[1:])  # [t]: the t + 1 units ahead
    behind = _running([reach[-n % count] for n in range(count)])  # [t]: this unit and t behind it
    behind_it = _running([reach[-n % count] for n in range(1, count)])
    gives = [(seen_within(batch, ahead[last - s - 1], keys[s]),) for s in range(last)]
    takes = [(seen_within(batch, reach[0] | ahead[last - s - 2], keys[s + 1]),) for s in range(last - 1)]
    takes += [(seen_within(batch, reach[0], keys[last]),)] if last else []
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


def _running(reach: list[Reach]) -> list[Reach]:
    """[t]: of the first t + 1 units together."""
    found = reach[:1]
    for one in reach[1:]:
        found.append(found[-1] | one)
    return found
