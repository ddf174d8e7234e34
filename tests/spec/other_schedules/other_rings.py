"""Schedules that no planner has: the ring run backwards, and a ring of rings. Both are a list of whom to visit when."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cp_ref.schedules.planners.p2p import tiles_of
from cp_ref.schedules.planners.ring_members import RingMembers, merged
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import Message, Pieces, Schedule, Step, tag

__all__ = ["backward_ring", "ring_of_rings"]

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
