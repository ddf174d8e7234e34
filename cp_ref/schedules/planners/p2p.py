"""The p2p schedule: K/V blocks travel while every rank computes with the block that it has (ring attention).

Without a window the blocks travel round a ring. At step s ring member u has the block of ring member u - s and passes
it on:

    step   ring member  0    1    2    3        4 ring members; the number is the owner of the block that each one has.
      0                 0    1    2    3        During each step every block travels to the next ring member.
      1                 3    0    1    2
      2                 2    3    0    1
      3                 1    2    3    0

We say that ring member u meets the block of ring member u - h, which is at distance h, at step h. In the backward pass
the gradients of a block travel one step behind it. Each ring member adds its part, and they end at the owner of the
block. So this happens to a block around the step at which a ring member meets it:

    step     h - 1                    h                                       h + 1
    kv       arrives at the member    is computed with, travels on
    dkv                               the sum of earlier members arrives      the sum, with its own part, travels on

With a window on both sides, or documents that lie on a few ring members, a ring member sees little of most blocks and
nothing of many. Then every ring member receives only the rows that it sees (the halo), directly from their owner, at
step h - 1 too, and at step h + 1 its gradients of these rows go directly back. In both cases, rows that no later ring
member needs are not sent, and a tile that sees nothing is not computed.

A ring member is a rank. In `a2a+p2p` it is a group of ranks: each of its ranks is in another ring, with its heads.

From Ring Attention (Liu et al., 2023); the dual_chunk balance from Striped Attention and from Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cp_ref.schedules.planners.visibility import SeenTiles, Visibility
from cp_ref.schedules.schedule import Heads, Message, Pieces, RankPasses, Step, tag
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
    """The messages of one ring member, by distance h = 1, 2, ... of the block.

    A ring member meets the block at step h. Its keys travel to this ring member at step h - 1; the gradients leave this
    ring member at step h + 1.
    """

    keys_sent: dict[int, Hop]  # for the other ring member to meet
    keys_received: dict[int, Hop]  # for this one to meet
    grads_sent: dict[int, Hop]  # of what this one has met
    grads_received: dict[int, Hop]  # of what the other ring member has met


def plan_p2p_rank(visibility: Visibility, rank: int) -> RankPasses:
    """One rank's forward and backward schedule."""
    work = visibility.workload
    role = RingRole(rank, int, (0, work.heads_q), (0, work.heads_kv))  # A ring member is a rank.
    return ring_schedules(visibility, role)


def ring_schedules(visibility: Visibility, role: RingRole) -> RankPasses:
    """The forward and backward steps of one rank: at step s it computes with the block of ring member - s."""
    count = visibility.member_count
    sees = visibility.sees(role.member, (role.member - np.arange(count)) % count)  # by distance
    tiles = [some.tiles(role.q_heads) for some in sees]
    if count == 1:
        return (Step(tiles=tiles[0]),), (Step(tiles=tiles[0]),)
    route = _straight(visibility, role.member, sees) if visibility.sends_directly else _around(visibility, role.member)

    def message(kind: str, step: int, hop: Hop | None) -> tuple[Message, ...]:
        """The message of a hop; none where there is no hop or no row."""
        if hop is None or not len(hop.rows):
            return ()
        peer, number = role.rank_of(hop.other % count), tag(role.first_step + step, kind)
        return (Message(kind, peer, number, Pieces.of(hop.rows, role.kv_heads)),)

    forward: list[Step] = []
    for step in range(count):
        h = step + 1  # Keys travel to where they are met next.
        sends = message("kv", step, route.keys_sent.get(h))
        recvs = message("kv", step, route.keys_received.get(h))
        forward.append(Step(sends, recvs, tiles[step]))

    backward: list[Step] = []
    for step, attend in enumerate([*forward, Step()]):  # The same keys and tiles.
        h = step - 1  # Gradients travel from where the keys were met last.
        sends = message("dkv", step, route.grads_sent.get(h))
        recvs = message("dkv", step, route.grads_received.get(h))
        backward.append(Step(attend.sends + sends, attend.recvs + recvs, attend.tiles))
    return tuple(forward), tuple(backward)


def _straight(visibility: Visibility, member: int, sees: list[SeenTiles]) -> Route:
    """The rows that a ring member sees come straight from their owner, and their gradients go straight back."""
    count = visibility.member_count
    seen = visibility.seen(member, (np.arange(count) - member) % count)  # by distance
    met = {h: Hop(member - h, sees[h].keys.merged()) for h in range(1, count)}  # of others' blocks
    lent = {h: Hop(member + h, seen[h].keys.merged()) for h in range(1, count)}  # of the own block
    return Route(keys_sent=lent, keys_received=met, grads_sent=met, grads_received=lent)


def _around(visibility: Visibility, member: int) -> Route:
    """Blocks travel from each ring member to the next one, and their gradients behind them. Behind the last ring member
    that meets a block comes its owner, so there the gradients are home.
    """
    count, before, after = visibility.member_count, member - 1, member + 1

    def keys(reader: int, h: int) -> Spans:
        """The rows of the block at distance h that the reader and the count - h - 1 ring members ahead of it see."""
        return visibility.rows_seen_by(reader - h, range(reader, reader + count - h))

    def grads(reader: int, h: int) -> Spans:
        """The rows of the block at distance h that the reader and the h - 1 ring members behind it have seen."""
        return visibility.rows_seen_by(reader - h, range(reader, reader - h, -1))

    return Route(
        keys_sent={h: Hop(after, keys(after, h)) for h in range(1, count)},
        keys_received={h: Hop(before, keys(member, h)) for h in range(1, count)},
        grads_sent={h: Hop(after, grads(member, h)) for h in range(1, count)},
        grads_received={h: Hop(before, grads(before, h)) for h in range(1, count)},
    )
