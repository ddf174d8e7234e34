"""The all_gather schedule: every rank gets the keys that its queries see, and attends to all of them at once (Llama 3).

    step 0    keys travel, everyone to everyone        tiles of documents whose keys are all here
    step 1                                             all other tiles, each with all keys of its queries
    step 2    (backward) dK/dV go to their owners, which add them: a reduce-scatter

A tile has all keys that its queries see, the own ones and those of others. So a query's result comes from one tile, and
nothing is merged: it has the bits of attention on one GPU. In head chunks (`head_chunks.py`) the first heads attend
while the keys of the next ones travel.

A rank is sent only the rows that its queries see: under a causal mask or a window, less than all of K and V. The
backward pass gathers again, so a rank keeps only its own slices between the passes.

From Llama 3 (Grattafiori et al., 2024).
"""

from __future__ import annotations

import numpy as np

from cp_ref.schedules.planners.ring_members import RingMembers, spans_by
from cp_ref.schedules.schedule import Message, Pieces, RankSchedule, Step, tag
from cp_ref.schedules.table import Spans

__all__ = [
    "plan_all_gather_rank",
]


def plan_all_gather_rank(members: RingMembers, rank: int) -> tuple[RankSchedule, RankSchedule]:
    """One rank's forward and backward schedule."""
    work, count = members.workload, members.member_count
    peers = [(rank + n) % count for n in range(1, count)]  # the next one first: not all begin with the same
    tiles = members.whole_tiles(rank, (0, work.heads_q))
    theirs, ours = members.gathers(rank)
    at_home = ~np.isin(tiles.area, theirs.area)

    def by_peer(rows: list[Spans]) -> dict[int, Pieces]:
        return {peer: Pieces.of(rows[peer], (0, work.heads_kv)) for peer in peers if len(rows[peer])}

    def messages(kind: str, pieces: dict[int, Pieces], step: int) -> tuple[Message, ...]:
        return tuple(Message(kind, peer, tag(step, kind), some) for peer, some in pieces.items())

    received = by_peer(spans_by(theirs.peer, theirs.keys, count))
    sent = by_peer(spans_by(ours.peer, ours.keys, count))
    kv = messages("kv", sent, 0), messages("kv", received, 0)
    forward = Step(*kv, tiles.take(at_home)), Step(tiles=tiles.take(~at_home))
    backward = *forward, Step(messages("dkv", received, 2), messages("dkv", sent, 2))
    return forward, backward
