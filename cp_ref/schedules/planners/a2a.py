"""The a2a schedules: heads are exchanged for sequence before attention and back after it (Ulysses), in a ring (USP).

In a group of `a2a_size` ranks, each rank starts with all heads of its rows and ends with all of the group's rows for
its heads. Attention then needs no merging inside the group, whatever the mask.

    a2a_size 2, 4 heads            before            exchanged           the result goes the other way
                                h 0 1 2 3            h 0 1 2 3
        rows of rank 0            0 0 0 0              0 0 1 1
        rows of rank 1            1 1 1 1              0 0 1 1           the number is the rank that has it

`a2a` is one group of all ranks. `a2a+p2p` has cp_size / a2a_size groups: global rank = p2p_rank * a2a_size + a2a_rank,
and the ranks with equal a2a_rank form a ring across the groups.

A document that one rank has whole needs no exchange: the rank attends to it with all heads, while the rows of the other
documents travel. All ranks attend to an equal share of what is exchanged, and not of what stays at home. So a document
stays only where that takes less time (`Visibility.at_home`).

Heads are exchanged all at once, or in head chunks (`head_chunks.py`): one chunk attends while the next chunk's rows
arrive and the previous chunk's results return to their owners.

With fewer kv heads than ranks in the group, a kv head goes to every rank that has one of its query heads, and its
gradients are added up at its owner.

The exchanged q and kv are kept for the backward pass. Keys that a ring then brings are not kept, as in `p2p`: they
travel again. To keep them would take, in every layer, as much memory again for each other group; their messages hide
behind the tiles of the backward pass, which take 2.5 times as long as those of the forward pass.

From DeepSpeed-Ulysses (Jacobs et al., 2023) and USP (Fang and Zhao, 2024).
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np

from cp_ref.schedules.ownership import Fragments
from cp_ref.schedules.planners.p2p import RingRole, ring_schedules
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import Heads, Message, Pieces, RankPasses, Step, Tiles, side_of, tag
from cp_ref.schedules.table import Spans

__all__ = [
    "head_ranges",
    "plan_a2a_rank",
]


def head_ranges(work: Workload, a2a_rank: int) -> tuple[Heads, Heads]:
    """The query heads of a rank of an a2a group, and the kv heads that they use.

    >>> from cp_ref.schedules.problem import Problem
    >>> eight_over_two = Problem(4, (), "a2a", 4, heads_q=8, heads_kv=2).workload
    >>> [head_ranges(eight_over_two, r) for r in range(4)]
    [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))]
    """
    share = work.heads_q // work.a2a_size
    start, stop = a2a_rank * share, (a2a_rank + 1) * share
    return (start, stop), (start // work.heads_per_kv, -(-stop // work.heads_per_kv))


def plan_a2a_rank(visibility: Visibility, rank: int) -> RankPasses:
    """One rank's forward and backward schedule: exchange, ring across the groups (one step in `a2a`), exchange back."""
    size, work, home = visibility.a2a_size, visibility.workload, visibility.at_home
    visibility = visibility.exchanged  # from here on: of the areas whose heads are exchanged
    member, a2a_rank = divmod(rank, size)
    heads = [dict[str, Heads](zip(("q", "kv"), head_ranges(work, other), strict=True)) for other in range(size)]

    def rank_of(other: int) -> int:
        """The rank of another ring member that has the same heads."""
        return other * size + a2a_rank

    role = RingRole(member, rank_of, heads[a2a_rank]["q"], heads[a2a_rank]["kv"], first_step=1)
    ring_forward, ring_backward = ring_schedules(visibility, role)
    active = _active_rows(visibility, member)
    replicated = sum(stop - start for start, stop in (own["kv"] for own in heads)) > work.heads_kv  # dK/dV are sums
    peers = [(a2a_rank + n) % size for n in range(1, size)]  # the next one first: not all begin with the same

    @cache
    def pieces(side: str, rows_of: int, heads_of: int) -> Pieces:
        """The rows of one rank of the group for the heads of another; messages of both passes have the same."""
        rows = active[side][rows_of]
        return Pieces.of(rows.spans, heads[heads_of][side])

    def messages(kinds: tuple[str, ...], step: int, *, own_rows: bool) -> tuple[Message, ...]:
        """With each peer, the own rows for the peer's heads; or else the peer's rows for the own heads."""
        found: list[Message] = []
        for kind, peer in product(kinds, peers):
            rows_of, heads_of = (a2a_rank, peer) if own_rows else (peer, a2a_rank)
            complete = kind in ("out", "dq") or (kind == "dkv" and not replicated)
            if len(some := pieces(side_of(kind), rows_of, heads_of)):
                found.append(Message(kind, member * size + peer, tag(step, kind), some, complete))
        return tuple(found)

    whole = Tiles.of_rows([])  # of documents at home: their keys are on no other rank
    if len(home.areas):
        whole = home.sees(rank, np.zeros(work.cp_size, dtype=int))[0].tiles((0, work.heads_q))

    def rows_for_heads(kinds: tuple[str, ...]) -> Step:
        """The first step: own rows go to those that have their heads, and the peers' rows come. Documents at home
        attend at the same time.
        """
        return Step(messages(kinds, 0, own_rows=True), messages(kinds, 0, own_rows=False), whole)

    def results_home(kinds: tuple[str, ...], step: int) -> Step:
        """The other way: results of the peers' rows go to them, and those of the own rows come."""
        return Step(sends=messages(kinds, step, own_rows=False), recvs=messages(kinds, step, own_rows=True))

    forward = rows_for_heads(("q", "kv")), *ring_forward, results_home(("out",), len(ring_forward) + 1)
    backward = rows_for_heads(("do",)), *ring_backward, results_home(("dq", "dkv"), len(ring_backward) + 1)
    return forward, backward


def _active_rows(visibility: Visibility, member: int) -> dict[str, list[Fragments]]:
    """The query rows of each rank of the group that see any key, and the key rows that any query sees."""
    alike = np.zeros(visibility.member_count, dtype=int)
    (sees,), (seen,) = visibility.sees(member, alike), visibility.seen(member, alike)
    queries, keys = sees.queries.merged(), seen.keys.merged()
    ownership, first = visibility.workload.ownership, member * visibility.a2a_size

    def active(rows: Fragments, spans: Spans) -> list[Fragments]:
        inside = rows.of(first, visibility.a2a_size).within(*spans)
        return [inside.of(rank) for rank in range(first, first + visibility.a2a_size)]

    of_queries = active(ownership.q, queries)
    if ownership.kv is ownership.q and all(map(np.array_equal, queries, keys)):
        return {"q": of_queries, "kv": of_queries}
    return {"q": of_queries, "kv": active(ownership.kv, keys)}
