"""The place of each message's bytes between two ranks: both ends compute it without communication.

A staging buffer is a ring of bytes in the sender's memory, for one receiver. All messages to it in one exchange form
one block. Both ends place the same blocks in the same order, so both know the place of each. A large block has several
parts: the first can be pulled while the next ones are still copied into the staging buffer.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from cp_ref.schedules.planners.ring_members import RingMembers
from cp_ref.schedules.problem import Problem

__all__ = ["ALIGNMENT", "PART", "BlockPlace", "StagingBuffer", "rounded", "staging_sizes"]

ALIGNMENT = 256  # Bytes, of tensors in a block.
PART = 2**25  # Bytes of each part except a block's last one.


class BlockPlace(NamedTuple):
    """A block: its start, the number of its last part (parts of a staging buffer are counted from 1), and that of the
    last earlier block at this place, 0 for none.
    """

    start: int
    number: int
    over: int


class StagingBuffer:
    """The staging buffer from one rank to another.

    >>> staging = StagingBuffer(1000)
    >>> [staging.place(400, 1), staging.place(400, 2), staging.place(300, 1), staging.place(300, 1)]
    [BlockPlace(start=0, number=1, over=0), BlockPlace(start=400, number=3, over=0), \
BlockPlace(start=0, number=4, over=1), BlockPlace(start=300, number=5, over=3)]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._end = self._number = 0
        self._lying: deque[tuple[int, int, int]] = deque()  # Start, stop, number; the oldest first.

    def place(self, size: int, parts: int) -> BlockPlace:
        """The place of the next block, which must fit in the staging buffer."""
        over, start = 0, self._end
        if start + size > self.size:
            start = 0
            while self._lying and self._lying[0][0] >= self._end:  # Of the lap before, past the free bytes.
                over = self._lying.popleft()[2]
        while self._lying and self._lying[0][0] < start + size and start < self._lying[0][1]:
            over = self._lying.popleft()[2]
        self._end, self._number = start + size, self._number + parts
        self._lying.append((start, start + size, self._number))
        return BlockPlace(start, self._number, over)


def rounded(size: int) -> int:
    """Bytes, rounded up to the alignment; never zero, so that every block has a place.

    >>> rounded(0), rounded(256), rounded(257)
    (256, 256, 512)
    """
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT


def staging_sizes(problem: Problem, rows: tuple[int, int], way: str, ranks: int) -> tuple[int, ...]:
    """Bytes of the staging buffers to the ranks at distance 1, 2, ... for one exchange of a planner's schedule. This is
    the largest exchange if all ranks own equal numbers of rows. Otherwise one may be larger: then the group's own
    messages carry it.

    Args:
        rows: of q and of k and v on a rank, padding included.
        way: "ring" (a block and the gradients of another, to the next rank; where they go straight, what each rank may
            see of another), "gather" (either of them) or "heads" (all kinds, for a share of the heads).

    >>> from cp_ref.schedules.problem import Problem
    >>> sizes = dict(heads_q=4, heads_kv=2, d_qk=64, d_v=64, dtype="bfloat16", qkv_format="thd")
    >>> problem = Problem(cp_size=2, cp_comm_type="p2p", sequences=((64, 64, 64, 64),), **sizes)
    >>> [staging_sizes(problem, (32, 32), way, 2) for way in ("ring", "gather", "heads")]
    [(57344,), (40960,), (25088,)]
    """
    element = {"float64": 8, "float32": 4}.get(problem.dtype, 2)
    wide = max(element, 4)
    q, kv = rows
    head, slack = problem.d_qk + problem.d_v, 32 * ALIGNMENT
    heads_kv = max(problem.heads_kv, problem.a2a_size)  # Replicated if there are fewer heads than ranks.
    if way == "heads":
        partial = wide if heads_kv > problem.heads_kv else element
        sized = q * problem.heads_q * (max(problem.d_qk, problem.d_v) * element + 2 * wide)
        return (rounded((sized + kv * heads_kv * head * partial) // ranks) + slack,) * (ranks - 1)
    block = rounded(kv * heads_kv * head * (wide + (element if way == "ring" else 0)) + slack)
    if way == "gather" or ranks == 2:
        return (block,) * (ranks - 1)
    members = RingMembers(problem.workload)
    if not members.sends_directly:
        return (block, *(0,) * (ranks - 2))
    row = heads_kv // problem.a2a_size * head
    lent, here = members.rows_lent, np.arange(ranks)
    sizes = list[int]()
    for distance in range(1, ranks):  # keys to a reader, and gradients of keys to their owner
        peer = (here + distance) % ranks
        most = int((lent[here, peer] * row * element + lent[peer, here] * row * wide).max()) + slack
        sizes.append(min(block, 1 << (max(most, PART // 16) - 1).bit_length()))  # A new size is shared anew: few sizes.
    return tuple(sizes)
