"""The order in which messages travel: that in which `verify` matched them, whatever their tags are.

A lowered program's messages are posted by their tags. A planner's tags say the order. Those of a user's schedule need
not: between two ranks the n-th message that one sends is the n-th that the other receives, and so it gets n as its tag.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from cp_fast.compile.sums import RANGES
from cp_ref.spec import Message, RankSchedule

__all__ = ["in_order"]


def in_order(program: RankSchedule) -> RankSchedule:
    """One rank's steps of one pass with tags that rise from message to message between two ranks. A message with more
    ranges of heads than a tag has room for takes the tags behind its own, too.

    >>> from cp_ref.spec import Pieces, Step
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
        for step in program
    )
