"""Random legal schedules: whatever `verify` accepts, not only what a planner would make.

A pass is drawn as one list of events that all ranks agree on: a message travels, or a rank computes a tile. Each event
only uses what its rank has by then, so the list is right by construction. Every rank then cuts its own events, in this
order, into steps wherever it likes: a step may not use what arrives in it, and that is the only rule. No such cut can
deadlock: of all messages that have not travelled, the first one of the list is what both its ranks come to next.

    drawn list      kv 0->1, tile at 0, kv 1->2, out 2->0, ...
    rank 1          | recv kv from 0 | send kv to 2 ...           any bars, but one between these two, as it sends on
                                                                  what it receives
What is drawn
    tiles           areas are split again and again, by query rows, keys or query heads (also inside a group
                    that shares a kv head); forward and backward pass differently; cropped to what is visible, or not
    ranks           any rank computes any tile, at any time
    operands        come from their owner or from any rank that has them, through a third rank or not, early or late,
                    just what is missing or all that the sender has
    results         move to any other rank, whole or in part, before they go home
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cp_ref.schedules.areas import UNBOUNDED, Areas, crop
from cp_ref.schedules.ownership import Fragments, Ownership
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Problem, Workload
from cp_ref.schedules.schedule import KINDS, Message, Pieces, RankPasses, RankSchedule, Schedule, Step, Tiles, tag
from cp_ref.schedules.table import Spans
from cp_ref.schedules.verify.costs import tile_pairs
from cp_ref.schedules.verify.proof import verify_tables
from tests.spec.problems import small_problems

__all__ = [
    "backward_ring",
    "plan_bidirectional_rank",
    "random_schedules",
    "random_workloads",
    "ring_of_rings",
    "scheduled_problems",
]

_SPLITS = 5  # of the areas, at most
_MOVES = 3  # of partial results, before they go home, at most

Draw = Callable[[st.SearchStrategy[Any]], Any]
Cells = np.ndarray[Any, Any]  # [rows, heads], bool: what is meant, or what a rank has
Tile = tuple[int, ...]  # a row of `Tiles`


@st.composite
def random_workloads(draw: st.DrawFn) -> Workload:
    """Tables that no problem has: rectangles anywhere, each with a diagonal band of its own, and rows owned by
    anybody.
    """
    cp_size, edge = draw(st.integers(1, 4)), st.integers(-6, 6)
    rectangles: list[tuple[int, ...]] = [(0, draw(st.integers(0, 9)), 0, draw(st.integers(0, 9)))]
    rows = rectangles[0][1], rectangles[0][3]
    for _ in range(draw(st.integers(0, 3))):
        number, axis = draw(st.integers(0, len(rectangles) - 1)), draw(st.sampled_from([0, 2]))
        whole = rectangles[number]
        cut = draw(st.integers(whole[axis], whole[axis + 1]))
        rectangles[number] = (*whole[: axis + 1], cut, *whole[axis + 2 :])
        rectangles.append((*whole[:axis], cut, *whole[axis + 1 :]))
    bands = [(draw(st.just(-UNBOUNDED) | edge), draw(st.just(UNBOUNDED) | edge)) for _ in rectangles]
    areas = Areas.of_rows([(*r, *band) for r, band in zip(rectangles, bands, strict=True)])
    areas = areas.take(areas.pairs > 0)
    edges = crop(areas.q_start, areas.q_stop, areas.k_start, areas.k_stop, areas.lo, areas.hi)
    areas = Areas(*edges, areas.lo, areas.hi)
    sides = [[draw(st.integers(0, cp_size - 1)) for _ in range(count)] for count in rows]
    heads_kv = draw(st.integers(1, 2))
    ownership = Ownership(cp_size, *(_fragments(owners) for owners in sides))
    return Workload(areas, ownership, heads_kv * draw(st.integers(1, 3)), heads_kv)


def _fragments(owners: list[int]) -> Fragments:
    """One fragment a row, from the rank that owns each."""
    order = sorted(range(len(owners)), key=lambda row: owners[row])
    before = {rank: sum(owner < rank for owner in owners) for rank in owners}
    return Fragments.of_rows([(owners[row], row, row + 1, n - before[owners[row]]) for n, row in enumerate(order)])


@st.composite
def scheduled_problems(draw: st.DrawFn, cp_sizes: Sequence[int] = (1, 2, 3, 4)) -> tuple[Problem, Schedule]:
    """A problem, and a schedule for it."""
    problem = draw(small_problems(cp_sizes))
    return problem, draw(random_schedules(problem.workload))


@st.composite
def random_schedules(draw: st.DrawFn, work: Workload) -> Schedule:
    """A legal schedule of this workload: `verify_tables` accepts it, which is asserted."""
    saved = draw(st.sampled_from([(), ("q",), ("kv",), ("q", "kv")]))
    forward = _Pass(work, ("q", "kv"), ("out",))
    forward_schedules = forward.draw(draw)
    backward = _Pass(work, ("q", "kv", "do"), ("dq", "dkv"))
    for start, end in zip(backward.has, forward.has, strict=True):
        for kind in saved:
            start[kind] |= end[kind]
    schedule = Schedule("random", (work.heads_q, work.heads_kv), forward_schedules, backward.draw(draw), saved)
    verify_tables(work, schedule)
    return schedule


@dataclass(frozen=True)
class _Event:
    """Something that happens at one rank: `uses` what it has at the start of the step, `gives` what it has after it."""

    verb: str  # "send", "recv" or "tile"
    what: Message | Tile
    uses: dict[str, Cells]
    gives: dict[str, Cells]


class _Pass:
    """One pass while it is drawn: what every rank has, and what happened at every rank so far."""

    def __init__(self, work: Workload, operands: tuple[str, ...], results: tuple[str, ...]) -> None:
        self.work, self.operands, self.results = work, operands, results
        self.has = [{kind: self._owned(rank, kind) for kind in operands} for rank in range(work.cp_size)]
        self.sums = [{kind: self._nothing(kind) for kind in results} for _ in range(work.cp_size)]
        self.events: list[list[_Event]] = [[] for _ in range(work.cp_size)]
        self.messages = 0

    def draw(self, draw: Draw) -> tuple[RankSchedule, ...]:
        """The rank schedules of all ranks."""
        ranks = list(range(self.work.cp_size))
        tiles = _tiles(draw, self.work)
        where = [self._ranks_for(tile)[draw(st.integers(0, len(ranks) - 1))] for tile in tiles]
        turns = [*range(len(tiles)), *range(len(tiles))]  # of a tile: its operands arrive, it is computed
        if len(ranks) > 1:
            turns += [-1] * draw(st.integers(0, _MOVES))
        ready: set[int] = set()
        for turn in draw(st.permutations(turns)):
            if turn < 0:
                self._move(draw)
            elif turn not in ready:
                ready.add(turn)
                self._fetch(draw, where[turn], tiles[turn])
            else:
                self._compute(where[turn], tiles[turn])
        for rank in ranks:
            self._bring_home(rank)
        return tuple(_steps(draw, events) for events in self.events)

    def _ranks_for(self, tile: Tile) -> list[int]:
        """All ranks, the one that owns the tile's first query first: the simplest one to draw."""
        owner = next(r for r, has in enumerate(self.has) if has["q"][tile[1]].any())
        return [(owner + n) % self.work.cp_size for n in range(self.work.cp_size)]

    def _fetch(self, draw: Draw, rank: int, tile: Tile) -> None:
        """Let everything arrive that a tile needs and its rank does not have."""
        for kind in self.operands:
            missing = self._of_tile(kind, tile) & ~self.has[rank][kind]
            for owner in range(self.work.cp_size):
                while (part := missing & self._owned(owner, kind)).any():
                    sources = [r for r, has in enumerate(self.has) if (has[kind] & part).any() and r != rank]
                    sources.sort(key=lambda r: r != owner)
                    source = draw(st.sampled_from(sources))
                    part = part & self.has[source][kind]
                    if draw(st.booleans()):  # more than is needed
                        part = self.has[source][kind].copy()
                    others = [r for r in range(self.work.cp_size) if r not in (source, rank)]
                    if others and draw(st.booleans()):
                        relay = draw(st.sampled_from(others))
                        self._send(kind, source, relay, part)
                        source = relay
                    self._send(kind, source, rank, part)
                    missing &= ~part

    def _compute(self, rank: int, tile: Tile) -> None:
        gives = {kind: self._of_tile(kind, tile) for kind in self.results}
        for kind, cells in gives.items():
            self.sums[rank][kind] |= cells
        self.events[rank].append(_Event("tile", tile, {k: self._of_tile(k, tile) for k in self.operands}, gives))

    def _move(self, draw: Draw) -> None:
        """Hand partial results to another rank, all of a kind or some rows of it; nothing where there are none."""
        there = [(rank, kind) for rank, sums in enumerate(self.sums) for kind in self.results if sums[kind].any()]
        if there:
            rank, kind = draw(st.sampled_from(there))
            peer = (rank + draw(st.integers(1, self.work.cp_size - 1))) % self.work.cp_size
            cells = self.sums[rank][kind].copy()
            rows = np.flatnonzero(cells.any(axis=1))
            left = draw(st.integers(0, len(rows) - 1))  # so many rows stay
            cells[rows[len(rows) - left - 1] + 1 :] = False
            self._send(kind, rank, peer, cells)

    def _bring_home(self, rank: int) -> None:
        for kind in self.results:
            for owner in range(self.work.cp_size):
                cells = self.sums[rank][kind] & self._owned(owner, kind)
                if owner != rank and cells.any():
                    self._send(kind, rank, owner, cells)

    def _send(self, kind: str, source: int, target: int, cells: Cells) -> None:
        """A message travels."""
        number, pieces = self.messages * len(KINDS) + KINDS.index(kind), Pieces.of_rows(_boxes(cells))
        self.messages += 1
        uses, gives = {kind: cells}, {kind: cells.copy()}
        if kind in self.results:
            self.sums[source][kind] &= ~cells
            self.sums[target][kind] |= cells
        else:
            gives = {kind: cells & ~self.has[target][kind]}
            self.has[target][kind] |= cells
        self.events[source].append(_Event("send", Message(kind, target, number, pieces), uses, {}))
        self.events[target].append(_Event("recv", Message(kind, source, number, pieces), {}, gives))

    def _of_tile(self, kind: str, tile: Tile) -> Cells:
        _, q0, q1, k0, k1, h0, h1 = tile
        cells, size = self._nothing(kind), self.work.heads_per_kv
        if kind in ("kv", "dkv"):
            cells[k0:k1, h0 // size : -(-h1 // size)] = True
        else:
            cells[q0:q1, h0:h1] = True
        return cells

    def _owned(self, rank: int, kind: str) -> Cells:
        cells = self._nothing(kind)
        for _, start, stop, _ in self.work.ownership.side("kv" if kind in ("kv", "dkv") else "q").of(rank).rows():
            cells[start:stop] = True
        return cells

    def _nothing(self, kind: str) -> Cells:
        on_kv = kind in ("kv", "dkv")
        rows = self.work.ownership.side("kv" if on_kv else "q").stop.max(initial=0)
        return np.zeros((int(rows), self.work.heads_kv if on_kv else self.work.heads_q), dtype=np.bool_)


def _tiles(draw: Draw, work: Workload) -> list[Tile]:
    """Every area cut into tiles."""
    areas = work.areas
    tiles: list[Tile] = [(n, *row[:4], 0, work.heads_q) for n, row in enumerate(areas.rows())]
    for _ in range(draw(st.integers(0, _SPLITS)) if tiles else 0):
        number, axis = draw(st.integers(0, len(tiles) - 1)), draw(st.sampled_from([1, 3, 5]))
        tile = tiles[number]
        if tile[axis + 1] - tile[axis] > 1:
            cut = draw(st.integers(tile[axis] + 1, tile[axis + 1] - 1))
            tiles[number] = (*tile[: axis + 1], cut, *tile[axis + 2 :])
            tiles.append((*tile[:axis], cut, *tile[axis + 1 :]))
    if tiles and draw(st.booleans()):  # as planners do: no row or column that sees nothing
        table = Tiles.of_rows(tiles)
        sides = table.q_start, table.q_stop, table.k_start, table.k_stop
        edges = crop(*sides, areas.lo[table.area], areas.hi[table.area])
        cropped = replace(table, **dict(zip(("q_start", "q_stop", "k_start", "k_stop"), edges, strict=True)))
        tiles = list(cropped.take(tile_pairs(areas, table) > 0).rows())
    return tiles


def _boxes(cells: Cells) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, head_start, head_stop) of boxes that make up the cells: neighbouring rows with equal heads.

    >>> list(_boxes(np.array([[1, 0, 1], [1, 0, 1], [0, 1, 1]], dtype=bool)))
    [(0, 2, 0, 1), (0, 2, 2, 3), (2, 3, 1, 3)]
    """
    ends = [0, *(np.flatnonzero((cells[1:] != cells[:-1]).any(axis=1)) + 1).tolist(), len(cells)]
    for start, stop in pairwise(ends) if len(cells) else ():
        edges = np.flatnonzero(np.diff(np.concatenate([[0], cells[start].astype(int), [0]]))).tolist()
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            yield start, stop, first, last


def _steps(draw: Draw, events: list[_Event]) -> RankSchedule:
    """One rank's events as steps: cut where something is used that arrives in the same step, and anywhere else."""
    steps: list[list[_Event]] = [[]]
    fresh: dict[str, Cells] = {}
    for event in events:
        must = any(kind in fresh and (fresh[kind] & cells).any() for kind, cells in event.uses.items())
        cut = draw(st.integers(0, 2))  # 2: with an empty step between the two
        if must or cut:
            steps += [[] for _ in range(max(cut, 1))]
            fresh = {}
        steps[-1].append(event)
        for kind, cells in event.gives.items():
            fresh[kind] = fresh[kind] | cells if kind in fresh else cells
    return tuple(_step(step) for step in steps)


def _step(events: list[_Event]) -> Step:
    messages = {verb: tuple(e.what for e in events if e.verb == verb) for verb in ("send", "recv")}
    tiles = Tiles.of_rows([e.what for e in events if e.verb == "tile" and isinstance(e.what, tuple)])
    return Step(messages["send"], messages["recv"], tiles)  # type: ignore[arg-type]


# ---- rings that no planner has
#
# Schedules that the packages do not have: the ring run backwards, and a ring of rings, which are a list of whom to
# visit when; and a bidirectional ring, which is a planner.


Route = Callable[[int, int], tuple[int, int]]  # (rank, step) -> (whose keys it computes with, who gave them to it)


def backward_ring(work: Workload) -> Schedule:
    """Blocks of keys travel to the rank before: at step s rank r has the block of r + s."""
    n = work.cp_size
    return _visits(work, "backward_ring", lambda rank, step: ((rank + step) % n, (rank + 1) % n))


def ring_of_rings(work: Workload, size: int) -> Schedule:
    """Blocks go round in groups of `size` neighbours, then all of a group's blocks move on to the next group, which has
    them from the time they first came by.
    """
    n = work.cp_size

    def route(rank: int, step: int) -> tuple[int, int]:
        (group, place), (round_, turn) = divmod(rank, size), divmod(step, size)
        owner = (group - round_) * size % n + (place - turn) % size
        return owner, group * size + (place - 1) % size if turn else (group - 1) * size % n + place

    return _visits(work, "ring_of_rings", route)


def _visits(work: Workload, name: str, route: Route) -> Schedule:
    """Each block arrives while the one before it is computed on; gradients of keys go straight home, a step later."""
    visibility, n, heads, ranks = Visibility(work), work.cp_size, (0, work.heads_kv), range(work.cp_size)
    steps = [[[Step() for _ in range(n + 1)] for _ in ranks] for _ in ("forward", "backward")]

    def send(rank_schedules: list[list[Step]], step: int, kind: str, source: int, target: int, pieces: Pieces) -> None:
        sends, recvs = (Message(kind, peer, tag(step, kind), pieces) for peer in (target, source))
        rank_schedules[source][step] = rank_schedules[source][step]._replace(
            sends=(*rank_schedules[source][step].sends, sends)
        )
        rank_schedules[target][step] = rank_schedules[target][step]._replace(
            recvs=(*rank_schedules[target][step].recvs, recvs)
        )

    for rank in ranks:
        turn = np.argsort([route(rank, step)[0] for step in range(n)])  # owner -> step
        for step, sees in enumerate(visibility.sees(rank, turn)):
            owner, giver = route(rank, step)
            block, seen = work.ownership.kv.of(owner), sees.keys.merged()
            tiles = sees.tiles((0, work.heads_q))
            for rank_schedules in steps:
                rank_schedules[rank][step] = rank_schedules[rank][step]._replace(tiles=tiles)
                if step and len(block):
                    send(rank_schedules, step - 1, "kv", giver, rank, Pieces.of(block.spans, heads))
            if step and len(seen):
                send(steps[1], step + 1, "dkv", rank, owner, Pieces.of(seen, heads))
    forward, backward = (tuple(map(tuple, rank_schedules)) for rank_schedules in steps)
    return Schedule(name, (work.heads_q, work.heads_kv), forward, backward)


def plan_bidirectional_rank(visibility: Visibility, rank: int) -> RankPasses:
    """Blocks travel both ways round the ring: at step h a rank has the blocks of rank - h and of rank + h. Gradients go
    straight home, a step later. So cp_size ranks need half the steps of a ring.
    """
    n, work, others = visibility.member_count, visibility.workload, np.arange(visibility.member_count)
    up, down = n // 2, (n - 1) // 2  # the furthest rank that a block visits, each way
    sees = visibility.sees(rank, (rank - others) % n)  # by how far up a block came; n - h is h down
    seen = visibility.seen(rank, (others - rank) % n)

    def messages(kind: str, step: int, hops: list[tuple[int, Spans]]) -> tuple[Message, ...]:
        found = ((peer % n, Pieces.of(rows, (0, work.heads_kv))) for peer, rows in hops)
        return tuple(Message(kind, peer, tag(step, kind), pieces) for peer, pieces in found if len(pieces))

    def keys(visitor: int, way: int, h: int) -> Spans:
        """The rows of a block that the visitor and all later ones see."""
        later = (up if way == 1 else down) - h + 1
        return visibility.rows_seen_by(visitor - way * h, range(visitor, visitor + way * later, way))

    def ways(h: int) -> list[int]:
        return [1] * (0 < h <= up) + [-1] * (0 < h <= down)

    forward: list[Step] = []
    for step in range(up + 1):
        tiles = Tiles.concat([sees[way * step % n].tiles((0, work.heads_q)) for way in ways(step) or [1]])
        there = messages("kv", step, [(rank + way, keys(rank + way, way, step + 1)) for way in ways(step + 1)])
        here = messages("kv", step, [(rank - way, keys(rank, way, step + 1)) for way in ways(step + 1)])
        forward.append(Step(there, here, tiles))

    backward: list[Step] = []
    for step, attend in enumerate([*forward, Step()]):
        own, theirs = ([(way, some[way * (step - 1) % n]) for way in ways(step - 1)] for some in (sees, seen))
        home = [(rank - way * (step - 1), some.keys.merged()) for way, some in own]
        back = [(rank + way * (step - 1), some.keys.merged()) for way, some in theirs]
        sends, recvs = messages("dkv", step, home), messages("dkv", step, back)
        backward.append(Step(attend.sends + sends, attend.recvs + recvs, attend.tiles))
    return tuple(forward), tuple(backward)
