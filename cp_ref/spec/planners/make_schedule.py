"""From a problem to its schedule, by cp_comm_type."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cp_ref.spec.planners.a2a import plan_a2a_rank
from cp_ref.spec.planners.all_gather import plan_all_gather_rank
from cp_ref.spec.planners.head_chunks import check_head_chunks, in_head_chunks
from cp_ref.spec.planners.p2p import plan_p2p_rank
from cp_ref.spec.planners.ring_members import RingMembers
from cp_ref.spec.tables.problem import Problem
from cp_ref.spec.tables.schedule import RankSchedule, Schedule

__all__ = ["make_rank_schedule", "make_schedule", "saved_kinds"]

_RANK_PLANNERS: dict[str, Callable[[RingMembers, int], tuple[RankSchedule, RankSchedule]]] = {
    "p2p": plan_p2p_rank,
    "all_gather": plan_all_gather_rank,
    "a2a": plan_a2a_rank,
    "a2a+p2p": plan_a2a_rank,
}
_SAVED = {"p2p": (), "all_gather": (), "a2a": ("q", "kv"), "a2a+p2p": ("q", "kv")}


def make_schedule(
    problem: Problem,
    known: Mapping[int, tuple[RankSchedule, RankSchedule]] | None = None,
    head_chunks: tuple[int, ...] = (),
) -> Schedule:
    """The schedule of all ranks.

    Args:
        known: the results of `make_rank_schedule` for some ranks, with the same `head_chunks`.
        head_chunks: the kv heads of each rank that an a2a schedule exchanges at a time; () for all at once.

    Raises:
        ValueError: `head_chunks` does not fit; see `check_head_chunks`.

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
    check_head_chunks(problem, head_chunks)
    members, known = RingMembers(problem.workload), known or {}
    rank_schedules = [
        known.get(rank) or _of_rank(problem, members, rank, head_chunks) for rank in range(problem.cp_size)
    ]
    heads = problem.heads_q, problem.heads_kv
    forward, backward = tuple(f for f, _ in rank_schedules), tuple(b for _, b in rank_schedules)
    return Schedule(problem.cp_comm_type, heads, forward, backward, saved_kinds(problem))


def saved_kinds(problem: Problem) -> tuple[str, ...]:
    """The kinds of operands that the problem's schedule keeps between the passes: `Schedule.saved`."""
    return _SAVED[problem.cp_comm_type]


def make_rank_schedule(
    problem: Problem, rank: int, head_chunks: tuple[int, ...] = ()
) -> tuple[RankSchedule, RankSchedule]:
    """One rank's forward and backward schedule, as in `make_schedule`, without planning the other ranks."""
    check_head_chunks(problem, head_chunks)
    return _of_rank(problem, RingMembers(problem.workload), rank, head_chunks)


def _of_rank(
    problem: Problem, members: RingMembers, rank: int, head_chunks: tuple[int, ...]
) -> tuple[RankSchedule, RankSchedule]:
    forward, backward = _RANK_PLANNERS[problem.cp_comm_type](members, rank)
    chunks = members.count, problem.group_size, head_chunks
    return in_head_chunks(forward, *chunks), in_head_chunks(backward, *chunks)
