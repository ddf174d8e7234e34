"""The schedule that `cp_fast` runs: the planner's, by choices that are the same on all ranks.

    1. own keys first       the passes in which own keys attend while the others travel (`own_keys`)
    2. head chunks          how many heads are exchanged at a time (`chosen_head_chunks`)
    3. own keys that wait   tiles of own keys that attend together with keys that arrive (`own_keys`)

The planner itself is the problem's: `cp_comm_type="auto"` has become a name where the arguments were read
(`cp_ref.schedules.planners.choose_schedule`).
"""

from __future__ import annotations

from typing import NamedTuple

from cp_fast.compile.chosen_head_chunks import choose_head_chunks
from cp_fast.compile.own_keys import choose_own_first, own_keys_first, own_keys_wait
from cp_fast.passes import is_on
from cp_ref.schedules.areas import UNBOUNDED
from cp_ref.schedules.planners.make_schedule import plan_rank, saved_kinds
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import RankPasses, Schedule

__all__ = ["Choices", "choose", "chosen_rank_schedule", "chosen_schedule"]


class Choices(NamedTuple):
    """How the schedule of a problem is made, on all ranks.

    Attributes:
        own_first: the passes of all_gather in which own keys attend first.
        head_chunks: the kv heads of every rank that are exchanged at a time; () for all at once.
        key_block: the keys of a tile begin at a multiple of so many rows of their area; 0 for anywhere.
    """

    own_first: tuple[str, ...] = ()
    head_chunks: tuple[int, ...] = ()
    key_block: int = 0


def choose(problem: Problem, *, deterministic: bool = False, in_place: bool = False, key_block: int = 0) -> Choices:
    """The choices for a problem.

    Args:
        deterministic: whether gradients are asked for in a fixed order.
        in_place: whether the plan is updated in place.
        key_block: of the kernel library (`Backend`).
    """
    own_first = choose_own_first(problem, deterministic=deterministic, in_place=in_place)
    head_chunks = () if "forward" in own_first else choose_head_chunks(problem)
    return Choices(own_first, head_chunks, 0 if in_place else key_block)


def chosen_rank_schedule(problem: Problem, rank: int, choices: Choices) -> RankPasses:
    """One rank's forward and backward schedule."""
    return _RankPlanner(problem, choices).passes(rank)


def chosen_schedule(problem: Problem, choices: Choices, known: dict[int, RankPasses]) -> Schedule:
    """The schedule of all ranks. `known`: the results of `chosen_rank_schedule` for some of them."""
    planner = _RankPlanner(problem, choices)
    passes = [known.get(rank) or planner.passes(rank) for rank in range(problem.cp_size)]
    forward, backward = zip(*passes, strict=True)
    return Schedule(problem.cp_comm_type, (problem.heads_q, problem.heads_kv), forward, backward, saved_kinds(problem))


class _RankPlanner:
    """Plans the ranks of one problem by the same choices; what they see of each other is found once."""

    def __init__(self, problem: Problem, choices: Choices) -> None:
        self.problem, self.choices = problem, choices
        self.visibility = self.in_blocks = Visibility(problem.workload)
        windows = bool((problem.workload.areas.lo > -UNBOUNDED).any())  # Other keys begin with a block.
        if choices.key_block > 1 and windows:
            self.in_blocks = Visibility(problem.workload, key_block=choices.key_block)

    def passes(self, rank: int) -> RankPasses:
        """One rank's, forward and backward: own keys first, or all keys that a query sees at once, in whole blocks."""
        problem, (own_first, head_chunks, _) = self.problem, self.choices
        if not own_first:
            found = plan_rank(problem, self.in_blocks, rank, head_chunks)
        else:
            whole = cut = plan_rank(problem, self.visibility, rank)
            if head_chunks or self.in_blocks is not self.visibility:
                cut = plan_rank(problem, self.in_blocks, rank, head_chunks)
            forward, backward = (
                own_keys_first(self.visibility, rank, at_once) if name in own_first else in_chunks
                for name, at_once, in_chunks in zip(("forward", "backward"), whole, cut, strict=True)
            )
            found = forward, backward
        return own_keys_wait(problem, found) if problem.areas is not None and is_on("delay_keys") else found
