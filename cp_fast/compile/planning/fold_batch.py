"""Equal sequences folded into heads: sbhd without padding is one sequence of b * h heads, which needs no copy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Message, Pieces, RankSchedule, Step, Tiles, side_of

__all__ = ["fold_batch"]


def fold_batch(steps: tuple[RankSchedule, RankSchedule], problem: Problem) -> tuple[RankSchedule, RankSchedule]:
    """A rank's steps, which treat all sequences of the batch alike, as those of the first one for the heads of all.

    The schedule is then one of `Packing.packed_problem`. Only for messages and tiles of all heads.
    """
    return _folded(steps[0], problem), _folded(steps[1], problem)


def _folded(rank_schedule: RankSchedule, problem: Problem) -> RankSchedule:
    batch = len(problem.sequences)
    slots = {"q": problem.sequences[0].slots_q, "kv": problem.sequences[0].slots_kv}

    def message(m: Message) -> Message:
        p = m.pieces
        end = slots[side_of(m.kind)]
        first = p.take(p.start < end)  # a piece may go on in the next sequence
        stop = np.minimum(first.stop, end)
        return replace(m, pieces=Pieces(first.start, stop, first.head_start, first.head_stop * batch))

    def tiles(t: Tiles) -> Tiles:
        first = t.take(t.q_start < slots["q"])
        return replace(first, area=np.zeros_like(first.area), head_stop=first.head_stop * batch)

    return tuple(
        Step(tuple(map(message, s.sends)), tuple(map(message, s.recvs)), tiles(s.tiles)) for s in rank_schedule
    )
