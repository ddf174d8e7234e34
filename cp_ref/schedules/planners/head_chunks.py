"""Head chunks: ranks exchange a few heads at a time, and most messages travel while something is computed.

In a2a every row goes to the ranks that have its heads before attention, and the results go back after it. In head
chunks, the first heads attend while the rows of the next arrive, and the next attend while the results of the first
return:

    all 4 kv heads of a rank at once        step 0    rows 0:4
                                            step 1                attend 0:4
                                            step 2                              results 0:4

    head chunks of 1, 2 and 1               step 0    rows 0:1
                                            step 1    rows 1:3    attend 0:1
                                            step 2    rows 3:4    attend 1:3    results 0:1
                                            step 3                attend 3:4    results 1:3
                                            step 4                              results 3:4

In all_gather rows are keys, and results are their gradients, in the backward pass.

A head chunk is the whole schedule for some of each rank's heads, whatever the rows. Documents that stay at home attend
in the first step, with all heads. In a ring of a2a groups a chunk attends in one step per group, and the next chunk's
rows arrive in the last of these steps.

The sizes of the chunks are a parameter of `make_schedule`. All heads at once is the default, which the reference takes:
skip this on a first reading. The fast package chooses sizes for speed (`cp_fast/compile/chosen_head_chunks.py`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from cp_ref.schedules.schedule import STEP_TAGS, Heads, Message, Pieces, RankSchedule, Step, Tiles, side_of
from cp_ref.schedules.table import constant

__all__ = [
    "check_head_chunks",
    "in_head_chunks",
]


def check_head_chunks(own: int, head_chunks: tuple[int, ...]) -> None:
    """Check the kv heads of each rank that are exchanged at a time. The empty tuple means all at once.

    Args:
        own: the kv heads of each rank that may be exchanged in chunks; 0 where there are none.

    Raises:
        ValueError: the sizes are no integers from 1 that add up to `own`.
    """
    integers = all(type(n) is int and n >= 1 for n in head_chunks)
    if head_chunks and not (integers and sum(head_chunks) == own):
        needs = f"(), or integers from 1 with sum {own}" if own else "(): no rank has kv heads of its own to exchange"
        raise ValueError(f"head_chunks is {head_chunks}; it must be {needs}")


def in_head_chunks(
    rank_schedule: RankSchedule, every: int, heads_per_kv: int, head_chunks: tuple[int, ...]
) -> RankSchedule:
    """A rank's schedule in these head chunks. Each one begins `every` steps after the one before. The messages and
    tiles of `rank_schedule` are for all heads of their rank.
    """
    if len(head_chunks) < 2:
        return rank_schedule
    exchange = rank_schedule[0]._replace(tiles=Tiles.of_rows([]))
    steps = [Step()] * ((len(head_chunks) - 1) * every + len(rank_schedule))
    for n, heads in enumerate(pairwise(accumulate(head_chunks, initial=0))):
        for number, step in enumerate([exchange, *rank_schedule[1:]], n * every):
            steps[number] = _together(steps[number], _of_heads(step, heads, n * every, heads_per_kv))
    steps[0] = steps[0]._replace(tiles=rank_schedule[0].tiles)
    return tuple(steps)


def _together(one: Step, other: Step) -> Step:
    assert not len(one.tiles) or not len(other.tiles), "one head chunk attends at a time"
    return Step(one.sends + other.sends, one.recvs + other.recvs, one.tiles if len(one.tiles) else other.tiles)


def _of_heads(step: Step, heads: Heads, later: int, heads_per_kv: int) -> Step:
    """The step for these kv heads of each rank, counted from its first one, `later` steps later."""

    def cut(table: Pieces | Tiles, size: int) -> dict[str, np.ndarray]:
        own = int(table.head_start[0]) if len(table) else 0
        first, last = (constant(own + head * size, table.head_start) for head in heads)
        return {"head_start": first, "head_stop": last}

    def message(m: Message) -> Message:
        size = 1 if side_of(m.kind) == "kv" else heads_per_kv
        return replace(m, tag=m.tag + later * STEP_TAGS, pieces=replace(m.pieces, **cut(m.pieces, size)))

    sends, recvs = (tuple(map(message, messages)) for messages in (step.sends, step.recvs))
    return Step(sends, recvs, replace(step.tiles, **cut(step.tiles, heads_per_kv)))
