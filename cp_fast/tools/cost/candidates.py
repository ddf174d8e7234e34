"""A problem in every layout and schedule, to choose from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from cp_ref.contract.read_problem import check_layout
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS, Unsupported

__all__ = ["Candidate", "candidates"]


class Candidate(NamedTuple):
    """The problem in one layout and schedule; `refused`: why it is impossible, or empty."""

    problem: Problem
    refused: str


def candidates(problem: Problem, domain: int, layouts: Iterable[str] = LAYOUTS) -> list[Candidate]:
    """The problem in every layout and schedule. In "a2a+p2p" the largest number of ranks exchange heads that its heads
    and a domain of GPUs allow.

    >>> from cp_ref.schedules.problem import Sequence
    >>> for found in candidates(Problem(4, (Sequence(64, 64, 64, 64),), heads_q=2, heads_kv=2), 8, ["dual_chunk"]):
    ...     print(found.problem.cp_comm_type, found.problem.a2a_size, found.refused or "taken")
    p2p 1 taken
    all_gather 1 taken
    a2a 4 2 query heads over 2 are not shared by 4 ranks
    a2a+p2p 2 taken
    """
    return [_candidate(problem, layout, name, domain) for layout in layouts for name in CP_COMM_TYPES]


def _candidate(problem: Problem, layout: str, name: str, domain: int) -> Candidate:
    ranks, q, kv = problem.cp_size, problem.heads_q, problem.heads_kv
    inner = [n for n in range(min(domain, ranks - 1), 1, -1) if ranks % n == 0]
    sizes = {"a2a": [ranks], "a2a+p2p": inner}.get(name, [1])
    legal = next((n for n in sizes if q % n == 0 and (kv % n == 0 or n % kv == 0)), None)
    size = legal or next(iter(sizes), 1)
    made = replace(problem, layout=layout, cp_comm_type=name, a2a_size=size)
    if not sizes:
        bounds = f"at least 2, less than {ranks}, at most a domain of {domain}"
        return Candidate(made, f"no size of groups ({bounds}) divides {ranks} ranks")
    if legal is None:
        return Candidate(made, f"{q} query heads over {kv} are not shared by {size} ranks")
    try:
        check_layout(made)
    except (ValueError, Unsupported) as error:
        return Candidate(made, str(error))
    return Candidate(made, "")
