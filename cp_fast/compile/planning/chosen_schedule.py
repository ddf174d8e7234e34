"""The schedule that `cp_fast` runs: the planner's, in the chosen head chunks, and with own keys that wait."""

from __future__ import annotations

from dataclasses import replace

from cp_fast.compile.pass_table import is_on
from cp_fast.compile.planning.waiting_keys import own_keys_wait
from cp_ref.schedules.planners.make_schedule import make_rank_schedule, make_schedule
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import RankSchedule, Schedule

__all__ = ["Schedules", "chosen_rank_schedule", "chosen_schedule"]

Schedules = tuple[RankSchedule, RankSchedule]  # of the forward and the backward pass


def chosen_rank_schedule(problem: Problem, rank: int, head_chunks: tuple[int, ...]) -> Schedules:
    """One rank's forward and backward schedule."""
    return _with_waiting_keys(problem, make_rank_schedule(problem, rank, head_chunks))


def chosen_schedule(problem: Problem, head_chunks: tuple[int, ...], known: dict[int, Schedules]) -> Schedule:
    """The schedule of all ranks. `known`: the results of `chosen_rank_schedule` for some of them."""
    made = make_schedule(problem, known, head_chunks)
    others = enumerate(zip(made.forward, made.backward, strict=True))
    rank_schedules = [known.get(rank) or _with_waiting_keys(problem, both) for rank, both in others]
    forward, backward = zip(*rank_schedules, strict=True)
    return replace(made, forward=forward, backward=backward)


def _with_waiting_keys(problem: Problem, rank_schedules: Schedules) -> Schedules:
    if problem.areas is None or not is_on("delay_keys"):
        return rank_schedules
    return own_keys_wait(problem, rank_schedules)
