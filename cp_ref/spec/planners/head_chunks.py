"""Heads one after the other: most messages of an a2a schedule then travel while something is computed.

Before attention every row goes to the ranks that have its heads, and the results go back after it. In stages, the first
heads attend while the rows of the next arrive, and the next attend while the results of the first go home:

    all 4 kv heads of a rank at once        step 0    rows 0:4
                                            step 1                attend 0:4
                                            step 2                              results 0:4

    in stages of 1, 2 and 1                 step 0    rows 0:1
                                            step 1    rows 1:3    attend 0:1
                                            step 2    rows 3:4    attend 1:3    results 0:1
                                            step 3                attend 3:4    results 1:3
                                            step 4                              results 3:4

A stage is the whole program for some of each rank's heads. So stages are a rewrite of a program, whatever its rows. In
a ring of a2a groups a stage attends in one step per group, and the next stage's rows arrive in the last of these steps.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from cp_ref.spec.tables.schedule import KINDS, Heads, Message, Pieces, RankSchedule, Step, Tiles
from cp_ref.spec.tables.table import constant
from cp_ref.spec.tables.workload import Workload

__all__ = ["in_stages"]


def in_stages(program: RankSchedule, every: int, work: Workload) -> RankSchedule:
    """A rank's program for `work.stages` kv heads of each rank at a time; each stage begins `every` steps after the one
    before. The messages and tiles of `program` are for all heads of their rank.
    """
    if len(work.stages) < 2:
        return program
    steps = [Step()] * ((len(work.stages) - 1) * every + len(program))
    for n, heads in enumerate(pairwise(accumulate(work.stages, initial=0))):
        for number, step in enumerate(program, n * every):
            steps[number] = _together(steps[number], _of_heads(step, heads, n * every, work.group_size))
    return tuple(steps)


def _together(one: Step, other: Step) -> Step:
    assert not len(one.tiles) or not len(other.tiles), "one stage attends at a time"
    return Step(one.sends + other.sends, one.recvs + other.recvs, one.tiles if len(one.tiles) else other.tiles)


def _of_heads(step: Step, heads: Heads, later: int, group_size: int) -> Step:
    """The step for these kv heads of each rank, counted from its first one, `later` steps later."""

    def cut(table: Pieces | Tiles, size: int) -> dict[str, np.ndarray]:
        own = int(table.head_start[0]) if len(table) else 0
        first, last = (constant(own + head * size, table.head_start) for head in heads)
        return {"head_start": first, "head_stop": last}

    def message(m: Message) -> Message:
        size = 1 if m.kind in ("kv", "dkv") else group_size
        return replace(m, tag=m.tag + later * len(KINDS), pieces=replace(m.pieces, **cut(m.pieces, size)))

    sends, recvs = (tuple(map(message, messages)) for messages in (step.sends, step.recvs))
    return Step(sends, recvs, replace(step.tiles, **cut(step.tiles, group_size)))
