"""Messages are sent in the order in which `verify` matched them, for any tags.

A plan's messages are posted by their tags. A planner's tags give the order. The tags of a user's schedule
may not: between two ranks the n-th message sent is the n-th received, so it gets n as its tag.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from cp_fast.compile.lowering.sums import RANGES
from cp_ref.schedules.schedule import Message, RankSchedule

__all__ = ["in_order"]


def in_order(rank_schedule: RankSchedule) -> RankSchedule:
    """One rank's steps of one pass with tags that rise from message to message between two ranks. A message with too
    many ranges of heads for one tag also takes the following tags.

    >>> from cp_ref.schedules.schedule import Pieces, Step
    >>> pieces = Pieces.of_rows([(0, 4, 0, 1)])
    >>> first, last = (Step(sends=(Message("q", 1, tag, pieces), Message("kv", 2, tag, pieces))) for tag in (7, 3))
    >>> [[(m.peer, m.tag) for m in step.sends] for step in in_order((first, last))]
    [[(1, 0), (2, 0)], [(1, 1), (2, 1)]]
    """
    sent, received = Counter[int](), Counter[int]()

    def numbered(message: Message, so_far: Counter[int]) -> Message:
        tag = so_far[message.peer]
        so_far[message.peer] += -(-len(message.by_heads) // RANGES)
        return replace(message, tag=tag)

    return tuple(
        step._replace(
            sends=tuple(numbered(message, sent) for message in step.sends),
            recvs=tuple(numbered(message, received) for message in step.recvs),
        )
        for step in rank_schedule
    )
