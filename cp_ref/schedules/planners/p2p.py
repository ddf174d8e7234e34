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

from cp_ref.schedules.planners.ring_members import RingMembers, SeenTiles
from cp_ref.schedules.schedule import Heads, Message, Pieces, RankSchedule, Step, tag
from cp_ref.schedules.table import Spans

__all__ = [
    "RingRole",
    "plan_p2p_rank",
    "ring_schedules",
]


class RingRole(NamedTuple):
    """A rank in a ring of ring members: its ring member, its peer in another ring member, its heads, the number of its
    first step.
    """

    member: int
    rank_of: Callable[[int], int]
    q_heads: Heads
    kv_heads: Heads
    first_step: int = 0


class Hop(NamedTuple):
    """Rows of one block that travel between this ring member and another one, counted modulo the ring members."""

    other: int
    rows: Spans


class Route(NamedTuple):
    """The messages of one ring member, by distance h = 1, 2, ...

    When ring member u visits distance h, it computes with the block of ring member u - h, at step h. The keys of a
    visit arrive at the visitor one step before, its gradients leave the visitor one step after.
    """

    keys_sent: dict[int, Hop]  # for a visit of the other ring member
    keys_received: dict[int, Hop]  # for a visit of this one
    grads_sent: dict[int, Hop]  # of a visit of this one
    grads_received: dict[int, Hop]  # of a visit of the other ring member


def plan_p2p_rank(members: RingMembers, rank: int) -> tuple[RankSchedule, RankSchedule]:
    """One rank's forward and backward schedule."""
    work = members.workload
    role = RingRole(rank, int, (0, work.heads_q), (0, work.heads_kv))  # A ring member is a rank.
    return ring_schedules(members, role)


def ring_schedules(members: RingMembers, role: RingRole) -> tuple[RankSchedule, RankSchedule]:
    """The forward and backward steps of one rank: at step s it computes with the block of ring member - s."""
    count = members.count
    sees = members.sees(role.member, (role.member - np.arange(count)) % count)  # by distance
    tiles = [some.tiles(role.q_heads) for some in sees]
    if count == 1:
        return (Step(tiles=tiles[0]),), (Step(tiles=tiles[0]),)
    route = _straight(members, role.member, sees) if members.sends_directly else _around(members, role.member)

    def message(kind: str, step: int, hop: Hop | None) -> tuple[Message, ...]:
        """The message of a hop; none where there is no hop or no row."""
        if hop is None or not len(hop.rows):
            return ()
        peer, number = role.rank_of(hop.other % count), tag(role.first_step + step, kind)
        return (Message(kind, peer, number, Pieces.of(hop.rows, role.kv_heads)),)

    forward: list[Step] = []
    for step in range(count):
        h = step + 1  # Keys travel to the next visit.
        sends = message("kv", step, route.keys_sent.get(h))
        recvs = message("kv", step, route.keys_received.get(h))
        forward.append(Step(sends, recvs, tiles[step]))

    backward: list[Step] = []
    for step, attend in enumerate([*forward, Step()]):  # The same keys and tiles.
        h = step - 1  # Gradients travel from the visit before.
        sends = message("dkv", step, route.grads_sent.get(h))
        recvs = message("dkv", step, route.grads_received.get(h))
        backward.append(Step(attend.sends + sends, attend.recvs + recvs, attend.tiles))
    return tuple(forward), tuple(backward)


def _straight(members: RingMembers, member: int, sees: list[SeenTiles]) -> Route:
    """The rows that a visitor sees come straight from their owner, and their gradients go straight back."""
    seen = members.seen(member, (np.arange(members.count) - member) % members.count)  # by the visitor's distance
    visits = {h: Hop(member - h, sees[h].keys.merged()) for h in range(1, members.count)}
    visitors = {h: Hop(member + h, seen[h].keys.merged()) for h in range(1, members.count)}
    return Route(keys_sent=visitors, keys_received=visits, grads_sent=visits, grads_received=visitors)


def _around(members: RingMembers, member: int) -> Route:
    """Blocks travel from each ring member to the next one, and their gradients behind them. The last visitor's next
    ring member is the owner of the block, so there the gradients are home.
    """
    count, n = members.count, np.arange(members.count)
    before, after = member - 1, member + 1
    onward = {visitor: members.key_bounds(visitor + n) for visitor in (member, after)}
    backward = {visitor: members.key_bounds(visitor - n) for visitor in (member, before)}

    def keys(visitor: int, h: int) -> Spans:
        """The rows of the block that the visitor and the count - h - 1 later ones see."""
        return members.rows_seen(visitor - h, onward[visitor], count - h)

    def grads(visitor: int, h: int) -> Spans:
        """The rows of the block that the visitor and the h - 1 earlier ones have seen."""
        return members.rows_seen(visitor - h, backward[visitor], h)

    return Route(
        keys_sent={h: Hop(after, keys(after, h)) for h in range(1, count)},
        keys_received={h: Hop(before, keys(member, h)) for h in range(1, count)},
        grads_sent={h: Hop(after, grads(member, h)) for h in range(1, count)},
        grads_received={h: Hop(before, grads(before, h)) for h in range(1, count)},
    )
