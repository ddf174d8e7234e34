"""From a problem to its schedule, by cp_comm_type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from cp_ref.spec.planners.a2a import plan_a2a_rank
from cp_ref.spec.planners.all_gather import plan_all_gather_rank
from cp_ref.spec.planners.p2p import plan_p2p_rank
from cp_ref.spec.planners.ring_members import Units
from cp_ref.spec.planners.waiting_keys import own_keys_wait
from cp_ref.spec.tables.problem import Problem
from cp_ref.spec.tables.schedule import RankSchedule, Schedule
from cp_ref.spec.tables.workload import Workload

__all__ = ["make_program", "make_schedule", "saved_kinds"]

_RANK_PLANNERS: dict[str, Callable[[Units, int], tuple[RankSchedule, RankSchedule]]] = {
    "p2p": plan_p2p_rank,
    "all_gather": plan_all_gather_rank,
    "a2a": plan_a2a_rank,
    "a2a+p2p": plan_a2a_rank,
}
_SAVED = {"p2p": (), "all_gather": (), "a2a": ("q", "kv"), "a2a+p2p": ("q", "kv")}


def make_schedule(
    problem: Problem,
    known: Mapping[int, tuple[RankSchedule, RankSchedule]] | None = None,
    stages: tuple[int, ...] | None = None,
) -> Schedule:
    """The schedule of all ranks. `known`: the results of `make_program` for some of them, with the same `stages`.

    >>> from cp_ref.spec.tables.problem import Sequence
    >>> print(str(make_schedule(Problem(2, (Sequence(4, 4, 4, 4),)))).split("forward rank 1")[0].strip())
    schedule p2p cp_size 2 heads 1/1 saved -
    forward rank 0
      step
        send kv [0:1] to 1 tag 0
        recv kv [1:3] from 1 tag 0
        tile 0 q[0:1] k[0:1]
        tile 0 q[3:4] k[0:1]
        tile 0 q[3:4] k[3:4]
      step
        tile 0 q[3:4] k[1:2]
        tile 0 q[3:4] k[2:3]
    """
    units, known = Units(_staged(problem, stages)), known or {}
    programs = [known.get(rank) or _of_rank(problem, units, rank) for rank in range(problem.cp_size)]
    heads = problem.heads_q, problem.heads_kv
    forward, backward = tuple(f for f, _ in programs), tuple(b for _, b in programs)
    return Schedule(problem.cp_comm_type, heads, forward, backward, saved_kinds(problem))


def saved_kinds(problem: Problem) -> tuple[str, ...]:
    """The kinds of operands that the problem's schedule keeps between the passes: `Schedule.saved`."""
    return _SAVED[problem.cp_comm_type]


def make_program(
    problem: Problem, rank: int, stages: tuple[int, ...] | None = None
) -> tuple[RankSchedule, RankSchedule]:
    """One rank's forward and backward program, as in `make_schedule`, without planning the other ranks. `stages`: kv
    heads at a time in an a2a schedule; None for those of the least time (`stage_costs.py`).
    """
    return _of_rank(problem, Units(_staged(problem, stages)), rank)


def _of_rank(problem: Problem, units: Units, rank: int) -> tuple[RankSchedule, RankSchedule]:
    programs = _RANK_PLANNERS[problem.cp_comm_type](units, rank)
    return programs if problem.areas is None else own_keys_wait(problem, programs)


def _staged(problem: Problem, stages: tuple[int, ...] | None) -> Workload:
    return problem.workload if stages is None else replace(problem.workload, stages=stages)
