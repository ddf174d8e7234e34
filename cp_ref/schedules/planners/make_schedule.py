"""From a problem to its schedule, by cp_comm_type: `SCHEDULES` has all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from cp_ref.schedules.planners.a2a import plan_a2a_rank
from cp_ref.schedules.planners.all_gather import plan_all_gather_rank
from cp_ref.schedules.planners.head_chunks import check_head_chunks, in_head_chunks
from cp_ref.schedules.planners.p2p import plan_p2p_rank
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import RankPasses, Schedule

__all__ = [
    "SCHEDULES",
    "Planner",
    "chunked_heads",
    "make_rank_schedule",
    "make_schedule",
    "plan_rank",
    "saved_kinds",
]


@dataclass(frozen=True)
class Planner:
    """How one `cp_comm_type` is planned. A new schedule is one planner, one entry of `SCHEDULES`, and its name in
    `ScheduleName` and `CPCommType` (`words.py`), for type checkers.

    Attributes:
        plan_rank: one rank's forward and backward steps.
        text: what it does, in a few words, for `python -m cp_ref explain`.
        saved: the kinds of operands that ranks keep from the forward pass for the backward pass: `Schedule.saved`.
        exchanging: the ranks that exchange heads for sequence: none, all, or those of an inner group, where the
            context's group is a pair of groups.
        chunked: whether the heads of its messages may be cut into head chunks.
    """

    plan_rank: Callable[[Visibility, int], RankPasses]
    text: str
    saved: tuple[str, ...] = ()
    exchanging: Literal["none", "all", "inner"] = "none"
    chunked: bool = True

    def a2a_size(self, ranks: int, inner: int) -> int:
        """How many of `ranks` ranks exchange heads, if inner groups have `inner` ranks."""
        return {"none": 1, "all": ranks, "inner": inner}[self.exchanging]


SCHEDULES: dict[str, Planner] = {
    "p2p": Planner(
        plan_p2p_rank,
        "Ring attention: queries stay, keys and values travel round a ring of ranks. Each rank merges its partial "
        "outputs by their log-sum-exp (LSE).",
        chunked=False,
    ),
    "all_gather": Planner(
        plan_all_gather_rank,
        "Queries stay; every rank gathers the keys and values that its queries see, and attends to all of them at "
        "once. In the backward pass the gradients of keys and values return to their owners and are added up.",
    ),
    "a2a": Planner(
        plan_a2a_rank,
        "Heads are exchanged for sequence (Ulysses): each rank gets all rows of some heads, computes these heads "
        "alone, and returns the results.",
        saved=("q", "kv"),
        exchanging="all",
    ),
    "a2a+p2p": Planner(
        plan_a2a_rank,
        "Two levels (USP): inside a group the ranks exchange heads for sequence; across the groups the keys and values "
        "of these heads travel round a ring.",
        saved=("q", "kv"),
        exchanging="inner",
    ),
}


def make_schedule(
    problem: Problem,
    known: Mapping[int, RankPasses] | None = None,
    head_chunks: tuple[int, ...] = (),
) -> Schedule:
    """The schedule of all ranks.

    Args:
        known: the results of `make_rank_schedule` for some ranks, with the same `head_chunks`.
        head_chunks: the kv heads of each rank that all_gather and the a2a schedules exchange at a time; () for all at
            once.

    Raises:
        ValueError: `head_chunks` does not fit; see `check_head_chunks`.

    >>> from cp_ref.schedules.problem import Sequence
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
    check_head_chunks(chunked_heads(problem), head_chunks)
    visibility, known = Visibility(problem.workload), known or {}
    rank_schedules = [
        known.get(rank) or plan_rank(problem, visibility, rank, head_chunks) for rank in range(problem.cp_size)
    ]
    heads = problem.heads_q, problem.heads_kv
    forward, backward = tuple(f for f, _ in rank_schedules), tuple(b for _, b in rank_schedules)
    return Schedule(problem.cp_comm_type, heads, forward, backward, saved_kinds(problem))


def saved_kinds(problem: Problem) -> tuple[str, ...]:
    """The kinds of operands that the problem's schedule keeps between the passes: `Schedule.saved`."""
    return SCHEDULES[problem.cp_comm_type].saved


def chunked_heads(problem: Problem) -> int:
    """Return how many kv heads of each rank may be exchanged in head chunks. 0: ranks share kv heads, or exchange no
    heads.
    """
    size, heads_kv = problem.a2a_size, problem.heads_kv
    return heads_kv // size if SCHEDULES[problem.cp_comm_type].chunked and heads_kv % size == 0 else 0


def make_rank_schedule(problem: Problem, rank: int, head_chunks: tuple[int, ...] = ()) -> RankPasses:
    """One rank's forward and backward schedule, as in `make_schedule`, without planning the other ranks."""
    check_head_chunks(chunked_heads(problem), head_chunks)
    return plan_rank(problem, Visibility(problem.workload), rank, head_chunks)


def plan_rank(problem: Problem, visibility: Visibility, rank: int, head_chunks: tuple[int, ...] = ()) -> RankPasses:
    """As `make_rank_schedule`, for several ranks with the same ring members of the problem. Checks nothing."""
    planner = SCHEDULES[problem.cp_comm_type]
    forward, backward = planner.plan_rank(visibility, rank)
    every = 1 if planner.exchanging == "none" else visibility.member_count  # steps: one for each tile of a chunk
    chunks = every, problem.heads_per_kv, head_chunks
    return in_head_chunks(forward, *chunks), in_head_chunks(backward, *chunks)
