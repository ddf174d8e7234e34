"""Schedules that the packages do not have: the ring run backwards, and a ring of rings, which are a list of whom to
visit when; and a bidirectional ring, which is a planner.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cp_ref.schedules.planners.p2p import tiles_of
from cp_ref.schedules.planners.ring_members import RingMembers, Spans, merged
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import Message, Pieces, RankSchedule, Schedule, Step, Tiles, tag

__all__ = [
    "backward_ring",
    "plan_bidirectional_rank",
    "ring_of_rings",
]

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
    members, n, heads, ranks = RingMembers(work), work.cp_size, (0, work.heads_kv), range(work.cp_size)
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
        for step, sees in enumerate(members.sees(rank, turn)):
            owner, giver = route(rank, step)
            block, seen = work.ownership.kv.of(owner), merged(sees.k_start, sees.k_stop)
            tiles = tiles_of(sees, (0, work.heads_q))
            for rank_schedules in steps:
                rank_schedules[rank][step] = rank_schedules[rank][step]._replace(tiles=tiles)
                if step and len(block):
                    send(rank_schedules, step - 1, "kv", giver, rank, Pieces.spans(block.start, block.stop, heads))
            if step and len(seen[0]):
                send(steps[1], step + 1, "dkv", rank, owner, Pieces.spans(*seen, heads))
    forward, backward = (tuple(map(tuple, rank_schedules)) for rank_schedules in steps)
    return Schedule(name, (work.heads_q, work.heads_kv), forward, backward)


def plan_bidirectional_rank(members: RingMembers, rank: int) -> tuple[RankSchedule, RankSchedule]:
    """Blocks travel both ways round the ring: at step h a rank has the blocks of rank - h and of rank + h. Gradients go
    straight home, a step later. So cp_size ranks need half the steps of a ring.
    """
    n, work, others = members.count, members.workload, np.arange(members.count)
    up, down = n // 2, (n - 1) // 2  # the furthest rank that a block visits, each way
    sees = members.sees(rank, (rank - others) % n)  # by how far up a block came; n - h is h down
    seen = members.seen(rank, (others - rank) % n)
    bounds = {
        (start, way): members.key_bounds(start + way * others) for start in range(rank - 1, rank + 2) for way in (1, -1)
    }

    def messages(kind: str, step: int, hops: list[tuple[int, Spans]]) -> tuple[Message, ...]:
        found = ((peer % n, Pieces.spans(*rows, (0, work.heads_kv))) for peer, rows in hops)
        return tuple(Message(kind, peer, tag(step, kind), pieces) for peer, pieces in found if len(pieces))

    def keys(visitor: int, way: int, h: int) -> Spans:
        """The rows of a block that the visitor and all later ones see."""
        return members.rows_seen(visitor - way * h, bounds[visitor, way], (up if way == 1 else down) - h + 1)

    def ways(h: int) -> list[int]:
        return [1] * (0 < h <= up) + [-1] * (0 < h <= down)

    forward: list[Step] = []
    for step in range(up + 1):
        tiles = Tiles.concat([tiles_of(sees[way * step % n], (0, work.heads_q)) for way in ways(step) or [1]])
        there = messages("kv", step, [(rank + way, keys(rank + way, way, step + 1)) for way in ways(step + 1)])
        here = messages("kv", step, [(rank - way, keys(rank, way, step + 1)) for way in ways(step + 1)])
        forward.append(Step(there, here, tiles))

    backward: list[Step] = []
    for step, attend in enumerate([*forward, Step()]):
        own, theirs = ([(way, some[way * (step - 1) % n]) for way in ways(step - 1)] for some in (sees, seen))
        home = [(rank - way * (step - 1), merged(some.k_start, some.k_stop)) for way, some in own]
        back = [(rank + way * (step - 1), merged(some.k_start, some.k_stop)) for way, some in theirs]
        sends, recvs = messages("dkv", step, home), messages("dkv", step, back)
        backward.append(Step(attend.sends + sends, attend.recvs + recvs, attend.tiles))
    return tuple(forward), tuple(backward)
