"""The p2p schedule: K/V blocks visit the ranks while every rank computes on the block it has (ring attention).

Without a window the blocks travel round a ring. At step s ring member u has the block of ring member u - s and passes
it on:

    step   ring member  0    1    2    3        4 ring members; the number is the owner of the block that each one has.
      0                 0    1    2    3        During each step every block travels to the next ring member.
      1                 3    0    1    2
      2                 2    3    0    1
      3                 1    2    3    0

In the backward pass the gradients of a block travel one step behind it. Each ring member adds its part, and they end at
the owner of the block.

With a window on both sides, or documents that lie on a few ring members, a ring member sees little of most blocks and
nothing of many. Then every ring member receives only the rows that it sees (the halo), directly from their owner. Ring
member u receives from ring member u - s at step s - 1, and its gradients of these rows go directly back. In both cases,
rows that no later ring member needs are not sent, and a tile that sees nothing is not computed.

A ring member is a rank. In `a2a+p2p` it is a group of ranks: each of its ranks is in another ring, with its heads.

From Ring Attention (Liu et al., 2023); the dual_chunk balance from Striped Attention and from Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cp_ref.schedules.planners.ring_members import RingMembers, Sights, Spans, merged
from cp_ref.schedules.schedule import Heads, Message, Pieces, RankSchedule, Step, Tiles, tag
from cp_ref.schedules.table import constant

__all__ = [
    "RingPlace",
    "plan_p2p_rank",
    "ring_schedules",
    "tiles_of",
]


class RingPlace(NamedTuple):
    """A rank in a ring of ring members: its ring member, its peer in another ring member, its heads, the number of its
    first step.
    """

    member: int
    rank_of: Callable[[int], int]
    q_heads: Heads
    kv_heads: Heads
    first_step: int = 0


Hops = list[tuple[int, Spans]]  # By the distance 1, 2, ... of the block: the other ring member, the rows.


class Route(NamedTuple):
    """The ways of blocks and of their gradients: the block at distance h arrives at step h - 1, its gradients leave at
    step h + 1. Ring members are counted modulo their number.
    """

    kv_out: Hops
    kv_in: Hops
    dkv_out: Hops
    dkv_in: Hops


def plan_p2p_rank(members: RingMembers, rank: int) -> tuple[RankSchedule, RankSchedule]:
    """One rank's forward and backward schedule."""
    work = members.workload
    place = RingPlace(rank, int, (0, work.heads_q), (0, work.heads_kv))  # A ring member is a rank.
    return ring_schedules(members, place)


def ring_schedules(members: RingMembers, place: RingPlace) -> tuple[RankSchedule, RankSchedule]:
    """The forward and backward steps of one rank: at step s it computes on the block of ring member - s."""
    count = members.count
    sees = members.sees(place.member, (place.member - np.arange(count)) % count)  # By distance.
    tiles = [tiles_of(some, place.q_heads) for some in sees]
    if count == 1:
        return (Step(tiles=tiles[0]),), (Step(tiles=tiles[0]),)
    route = _halo(members, place.member, sees) if members.sparse else _ring(members, place.member)

    def messages(kind: str, hops: Hops, h: int, step: int) -> tuple[Message, ...]:
        if not 0 < h < count:
            return ()
        member, (start, stop) = hops[h - 1]
        if not len(start):
            return ()
        peer = place.rank_of(member % count)
        return (Message(kind, peer, tag(place.first_step + step, kind), Pieces.spans(start, stop, place.kv_heads)),)

    kv = [(messages("kv", route.kv_out, s + 1, s), messages("kv", route.kv_in, s + 1, s)) for s in range(count + 1)]
    dkv = [
        (messages("dkv", route.dkv_out, s - 1, s), messages("dkv", route.dkv_in, s - 1, s)) for s in range(count + 1)
    ]
    forward = [Step(*kv[s], tiles[s]) for s in range(count)]
    backward = [Step(kv[s][0] + dkv[s][0], kv[s][1] + dkv[s][1], tiles[s]) for s in range(count)]
    return tuple(forward), (*backward, Step(*dkv[count]))


def tiles_of(sees: Sights, heads: Heads) -> Tiles:
    """The rectangles that are seen, as tiles."""
    edges = (constant(head, sees.area) for head in heads)
    return Tiles(sees.area, sees.q_start, sees.q_stop, sees.k_start, sees.k_stop, *edges)


def _halo(members: RingMembers, member: int, sees: list[Sights]) -> Route:
    """Every ring member receives the rows that it sees of the ring member h behind it directly, and sends their
    gradients back.
    """
    seen = members.seen(member, (np.arange(members.count) - member) % members.count)
    received, given = ([merged(some.k_start, some.k_stop) for some in side[1:]] for side in (sees, seen))
    behind = [(member - h, rows) for h, rows in enumerate(received, 1)]
    ahead = [(member + h, rows) for h, rows in enumerate(given, 1)]
    return Route(ahead, behind, behind, ahead)


def _ring(members: RingMembers, member: int) -> Route:
    """The current block goes on to the next ring member: the rows that this or a later ring member still needs.
    Gradients follow: the rows that a ring member on the way has seen.
    """
    count, n = members.count, np.arange(members.count)
    following, last = member + 1, member - 1
    # The way that a block still has to go, and the way back to its owner:
    from_next, from_here = members.reach(following + n), members.reach(member + n)
    here_back, last_back = members.reach(member - n), members.reach(last - n)
    distances = range(1, count)
    return Route(
        [(following, members.needed(following - h, from_next, count - 1 - h)) for h in distances],
        [(last, members.needed(member - h, from_here, count - 1 - h)) for h in distances],
        [(following, members.needed(member - h, here_back, h - 1)) for h in distances],
        [(last, members.needed(last - h, last_back, h - 1)) for h in distances],
    )
