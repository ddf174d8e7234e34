"""The all_gather schedule: every rank gets the keys that its queries see, and attends to all of them at once (Llama 3).

    step 0    keys travel, everyone to everyone        tiles of documents whose keys are all here; (forward) of windows
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

from dataclasses import replace

import numpy as np

from cp_ref.schedules.areas import UNBOUNDED
from cp_ref.schedules.planners.visibility import Visibility, spans_by
from cp_ref.schedules.schedule import Message, Pieces, RankPasses, Step, Tiles, tag
from cp_ref.schedules.table import Column, Spans

__all__ = [
    "plan_all_gather_rank",
]


def plan_all_gather_rank(visibility: Visibility, rank: int) -> RankPasses:
    """One rank's forward and backward schedule."""
    work, count = visibility.workload, visibility.member_count
    peers = [(rank + n) % count for n in range(1, count)]  # the next one first: not all begin with the same
    theirs, ours = visibility.gathers(rank)
    whole = visibility.whole_tiles(rank, (0, work.heads_q))

    def by_peer(rows: list[Spans]) -> dict[int, Pieces]:
        return {peer: Pieces.of(rows[peer], (0, work.heads_kv)) for peer in peers if len(rows[peer])}

    def messages(kind: str, pieces: dict[int, Pieces], step: int) -> tuple[Message, ...]:
        return tuple(Message(kind, peer, tag(step, kind), some) for peer, some in pieces.items())

    received = by_peer(spans_by(theirs.peer, theirs.keys, count))
    sent = by_peer(spans_by(ours.peer, ours.keys, count))
    kv = messages("kv", sent, 0), messages("kv", received, 0)

    def attend(tiles: Tiles, behind: Column) -> tuple[Step, Step]:
        """Steps 0 and 1. `behind`: tiles of areas with keys of others that need none of these."""
        at_once = behind | ~np.isin(tiles.area, theirs.area)
        return Step(*kv, tiles.take(at_once)), Step(tiles=tiles.take(~at_once))

    forward = attend(*_by_window(visibility, rank, whole))
    backward = attend(whole, np.zeros(len(whole), dtype=bool))
    return forward, (*backward, Step(messages("dkv", received, 2), messages("dkv", sent, 2)))


def _by_window(visibility: Visibility, rank: int, tiles: Tiles) -> tuple[Tiles, Column]:
    """The tiles, and which of them have all their keys on this rank though others of their area do not.

    A tile under a window is cut in two: the first rows of queries, whose windows reach beyond the rank's own keys, and
    all rows behind them.

    For example, rank 1 of two, a window of 3 keys on the left, 16 tokens in contiguous halves:

        q[8:16) k[5:16)    becomes    q[8:11) k[5:11), and while keys 5 to 7 travel, q[11:16) k[8:16)

    Not in the backward pass: gradients of keys that both parts see would have to be added up.
    """
    areas, keys = visibility.workload.areas.take(tiles.area), visibility.keys
    own = keys.take(keys.rank == rank).spans.merged()
    if not len(own) or not bool((areas.lo > -UNBOUNDED).any()):
        return tiles, np.zeros(len(tiles), dtype=bool)
    n = np.maximum(np.searchsorted(own.start, tiles.k_stop, side="left") - 1, 0)
    first = own.start[n] + (areas.k_start - own.start[n]) % visibility.key_block  # Of the keys here that begin a block.
    row = np.where(own.start[n] <= tiles.k_start, tiles.q_start, first - areas.lo)
    row = np.where((areas.lo > -UNBOUNDED) & (own.stop[n] >= tiles.k_stop), row, tiles.q_stop)
    row = np.clip(row, tiles.q_start, tiles.q_stop)
    before = replace(tiles, q_stop=row, k_stop=np.minimum(tiles.k_stop, row + areas.hi))
    hidden = np.maximum(row + areas.lo - areas.k_start, 0)
    behind = replace(tiles, q_start=row, k_start=areas.k_start + hidden - hidden % visibility.key_block)
    before, behind = before.take(before.q_start < before.q_stop), behind.take(behind.q_start < behind.q_stop)
    return Tiles.concat([before, behind]), np.arange(len(before) + len(behind)) >= len(before)
