"""Heads as few ranges, for `verify`: what a schedule does to one head of a range, it does to all of them."""

from __future__ import annotations

from cp_ref.spec.problem import Problem
from cp_ref.spec.schedule import Schedule

__all__ = ["HeadCuts"]


class HeadCuts:
    """Heads as few ranges: the schedule's own cuts, so that a schedule that never splits heads has one range for
    all.
    """

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.group_size, self.heads_q = problem.group_size, problem.heads_q
        cuts = {0, problem.heads_q}
        for program in schedule.forward + schedule.backward:
            for step in program:
                cuts.update(h for tile in step.tiles for h in tile.heads or ())
                for message in step.sends + step.recvs:
                    scale = self.group_size if message.what in ("kv", "dkv") else 1
                    cuts.update(h * scale for piece in message.pieces for h in piece.heads or ())
        self.cuts = sorted(cuts)
        # kv heads, counted in query heads: a tile of some of a group's query heads needs the group's whole kv head
        self.kv_cuts = sorted({c // self.group_size for c in cuts} | {-(-c // self.group_size) for c in cuts})

    def of(self, what: str, heads: tuple[int, int] | None) -> range:
        """The numbers of the ranges that `heads` (query heads, or kv heads for kv and dkv) consists of."""
        cuts = self.kv_cuts if what in ("kv", "dkv") else self.cuts
        first, last = (cuts[0], cuts[-1]) if heads is None else heads
        return range(cuts.index(first), cuts.index(last))

    def kv_of_tile(self, heads: tuple[int, int] | None) -> range:
        """The kv ranges that a tile of these query heads reads."""
        if heads is None:
            return range(len(self.kv_cuts) - 1)
        return range(
            self.kv_cuts.index(heads[0] // self.group_size), self.kv_cuts.index(-(-heads[1] // self.group_size))
        )
