"""The steps of a ring, as `cp_ref.spec.p2p` has them: what goes on, what comes, what is computed meanwhile.

Who still needs which rows of a block is a question about the units that it has yet to visit. Under a band that is open
on one side the answer depends on the last query (or the first) of all of them, so one running maximum over the units
answers it for every step. Under a window on both sides each unit gets what it sees straight from the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, Protocol

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


class _Route(Protocol):
    """What a unit sends and gets at step s, as ranges of the owner's token axis."""

    def gives(self, s: int) -> Ranges:
        """Of the block in hand (ring), or of the own one (halo)."""
        ...

    def takes(self, s: int) -> Ranges:
        """The next block."""
        ...

    def gives_grads(self, s: int) -> Ranges:
        """Gradients of the block of the step before; from step 2 on."""
        ...

    def takes_grads(self, s: int) -> Ranges:
        """Gradients of the block in hand (ring), or of the own one (halo, and at the end); from step 2 on."""
        ...


def draft_ring(batch: Batch, place: Place, tables: Tables) -> tuple[list[DraftStep], list[DraftStep]]:
    """The forward and the backward steps of one rank."""
    count, unit, last = batch.count, place.unit, batch.count - 1
    route: _Route = (_Halo if batch.windowed else _Ring)(batch, unit)
    hops = (lambda s: s + 1) if batch.windowed else (lambda s: 1)
    block = grads = place.own  # in hand, and as its gradients leave in the step after
    forward: list[DraftStep] = []
    backward: list[DraftStep] = []
    for s in range(count):
        before = grads
        if s > 0:
            grads = block if batch.windowed else packed(route.gives_grads(s + 1))
        launches = place_launches(tables, see(batch, unit, unit - s), place.q_anchor, block, grads)
        step = DraftStep([], [], [], [], launches, s == 0, grads.size)
        coming = None
        if s < last:
            number = tag(place.first_step + s, "kv")
            source, own = (place.own, True) if batch.windowed else (block, s == 0)
            rows, size = message_rows(tables, source, route.gives(s))
            if size:
                step.give_kv = [DraftGive(place.rank_of((unit + hops(s)) % count), number, rows, own)]
            coming = packed(route.takes(s))
            if size := coming.size:
                by = place.rank_of((unit - hops(s)) % count)
                step.take_kv = [DraftTake(by, number, size, slice(0, size), False)]
        forward.append(step)
        backward.append(replace(step))
        if s >= 2:
            _add_grads(batch, place, tables, route, backward[s], s, before.size, place.own if batch.windowed else grads)
        block = coming or block
    if last > 0:
        backward.append(DraftStep())
    if count >= 2:
        _add_grads(batch, place, tables, route, backward[count], count, grads.size, place.own)
    return forward, backward


def place_launches(
    tables: Tables, placed: Sequence[Placed], q_anchor: Array, block: Block, grads: Block
) -> list[DraftLaunch]:
    """Tiles on token axes to launches on rows: key rows of the block in hand, and of the buffer of its gradients."""
    found: list[DraftLaunch] = []
    for window, slots in placed:
        q = _flat([s.q + q_anchor for s in slots])
        rows = _flat([s.rows for s in slots])
        columns = _flat([s.columns for s in slots])
        k, grad = _key_rows(slots, block), None if _same_rows(block, grads) else _key_rows(slots, grads)
        if not rows.all():
            there = rows > 0
            q, rows, columns, k = q[there], rows[there], columns[there], k[there]
            grad = grad if grad is None else grad[there]
        found.append(
            draft_launch(tables, window, (q, rows), (k, columns), None if grad is None else (grad, columns), columns)
        )
    return found


def _same_rows(block: Block, grads: Block) -> bool:
    """Whether both have every token in the same row."""
    if block is grads:
        return True
    return block.size == grads.size and all(map(np.array_equal, block.anchors, grads.anchors))


def _key_rows(slots: list[Slot], block: Block) -> Array:
    return _flat([s.k + block.anchors[min(s.piece, len(block.anchors) - 1)] for s in slots])


def _flat(columns: list[Array]) -> Array:
    """Sequence after sequence, so that a sequence's rows lie side by side."""
    return columns[0] if len(columns) == 1 else np.stack(columns, axis=1).ravel()


def _add_grads(
    batch: Batch, place: Place, tables: Tables, route: _Route, step: DraftStep, s: int, size: int, into: Block
) -> None:
    """What was added at step s - 1 (`size` rows): on to the next unit with the ring's sum so far, or straight home."""
    ahead = 1 - s if batch.windowed else 1
    number = tag(place.first_step + s, "dkv")
    if size:
        to = place.rank_of((place.unit + ahead) % batch.count)
        step.give_dkv = [DraftGive(to, number, slice(0, size), False)]
    rows, size = message_rows(tables, into, route.takes_grads(s))
    if size:
        by = place.rank_of((place.unit - ahead) % batch.count)
        step.take_dkv = [DraftTake(by, number, size, rows, into is place.own)]


class _Ring:
    """Blocks go from unit to unit, with the rows that a unit behind still needs. Ask for each step once, in order."""

    def __init__(self, batch: Batch, unit: int) -> None:
        self._batch, self._unit, self._last = batch, unit, batch.count - 1
        self._own = reach(batch, unit)
        # [t]: the reach of the t + 1 units ahead together; and of those behind, as far as they have been passed
        self._ahead = list(accumulate((reach(batch, unit + n) for n in range(1, batch.count)), self._farther))
        self._behind = self._behind_and_own = self._own

    def gives(self, s: int) -> Ranges:
        return self._seen(self._ahead[self._last - 1 - s], s)

    def takes(self, s: int) -> Ranges:
        first = s == self._last - 1  # of the units that the coming block still visits, this one is the only one
        return self._seen(self._own if first else self._farther(self._own, self._ahead[self._last - 2 - s]), s + 1)

    def gives_grads(self, s: int) -> Ranges:
        """Of the block that has seen this unit, and the s - 2 units behind it."""
        if s > 2:
            self._behind_and_own = self._farther(self._behind_and_own, self._reach_behind(s - 2))
        return self._seen(self._behind_and_own, s - 1)

    def takes_grads(self, s: int) -> Ranges:
        """Of the block that has seen the s - 1 units behind this one."""
        one = self._reach_behind(s - 1)
        self._behind = one if s == 2 else self._farther(self._behind, one)
        return self._seen(self._behind, s)

    def _farther(self, one: Array, other: Array) -> Array:
        return farther(self._batch, one, other)

    def _reach_behind(self, hops: int) -> Array:
        return reach(self._batch, self._unit - hops)

    def _seen(self, reached: Array, hops: int) -> Ranges:
        """Of the block of the unit that is `hops` behind."""
        return (seen_within(self._batch, reached, self._batch.owned("kv", self._unit - hops)),)


class _Halo:
    """Every unit gets what it sees straight from the owner, and gives its gradients straight back."""

    def __init__(self, batch: Batch, unit: int) -> None:
        self._batch, self._unit = batch, unit
        self._given: list[Ranges] = []

    def gives(self, s: int) -> Ranges:
        self._given.append(seen(self._batch, self._unit + s + 1, self._unit))
        return self._given[s]

    def takes(self, s: int) -> Ranges:
        return seen(self._batch, self._unit, self._unit - s - 1)

    def gives_grads(self, s: int) -> Ranges:
        return self.takes(s - 2)  # what came at step s - 2 was in hand at step s - 1

    def takes_grads(self, s: int) -> Ranges:
        return self._given[s - 2]
