"""The constant part of a plan updated in place: its messages, copies and launches, and their sizes.

A captured CUDA graph fixes the messages, copies and launches, and their largest sizes. The first batch determines which
ones there are. The sizes follow from the plan's room, so that ranks agree on them: a launch may have all queries and
keys of a buffer, a message all rows of a ring member. With a window in self-attention a ring member sees fewer rows of
another: of each sequence, `left + right` keys next to each piece of its queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cp_fast.compile.executable_plan import ExecutablePlan
from cp_fast.compile.index_tables import RowKey, Tables
from cp_ref.contract.room import Room
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import side_of

__all__ = ["Shape"]

_PIECES = {"dual_chunk": 2, "contiguous": 1}  # At most, of one sequence on one rank.


@dataclass(frozen=True)
class Shape:
    """The shape of a plan: the first batch's plan and lengths, the rank, and the room."""

    plan: ExecutablePlan[RowKey]
    tables: Tables
    problem: Problem
    rank: int
    room: Room

    def side_rows(self, kind: str) -> int:
        """The rows of a rank's own buffer of a kind of operands or results."""
        return self.room.rows_kv if side_of(kind) == "kv" else self.room.rows_q

    def message_rows(self, kind: str, peer: int) -> int:
        """The most rows of a message: inside an a2a group those of one rank, else those that a ring member may see of
        another.
        """
        own, size = self.side_rows(kind), self.problem.a2a_size
        if peer // size == self.rank // size:
            return own
        problem, member = self.problem, own * size
        left, right = problem.window_size[0], 0 if problem.causal else problem.window_size[1]
        lengths = problem.lengths
        if left < 0 or right < 0 or lengths.len_q != lengths.len_kv or lengths.slots_q != lengths.slots_kv:
            return member
        if problem.layout_name not in _PIECES:
            return member
        pieces = _PIECES[problem.layout_name]
        return max(1, min(member, self.room.max_sequences * pieces * (left + right)))

    def segments(self, keys: Any) -> int:
        """The most segments of a launch: the first batch's average per sequence, rounded up."""
        found = len(self.tables.cumulative(keys.cu_q)) - 1
        sequences = sum(n > 0 for n in self.problem.lengths.len_q)
        return self.room.max_sequences * -(-found // sequences)
