"""Gradients that are one launch's own travel as the launch rounded them: half the bytes, and the same bits.

A partial result travels in float32, since it may be a sum. Where it is just what one launch yielded in the input's
dtype, widening it adds nothing: its receiver adds it in float32 all the same. Only the sender knows from how many
launches its rows come, so the ranks tell each other once, when a plan is made.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TypeVar

from cp_fast.program import LoweredProgram, LoweredStep, ResultRecv
from cp_ref.spec import Group, Problem

__all__ = ["agree_on_narrow", "may_be_narrow", "of_one_launch"]

R = TypeVar("R")


def may_be_narrow(problem: Problem) -> bool:
    """Whether partial gradients of a planner's schedule travel, and in a wider dtype than the input's; so on all ranks.

    In a2a they come complete.
    """
    half = problem.dtype in ("float16", "bfloat16")
    return half and problem.cp_size > 1 and problem.a2a_size < problem.cp_size


def of_one_launch(program: LoweredProgram[R]) -> frozenset[str]:
    """The sums of gradients that are sent, not complete, and have one launch's results in them and no others."""
    parts: Counter[str] = Counter()
    launched: set[str] = set()
    for step in program.backward:
        for launch in step.launches:
            for contribution in (*launch.results, *launch.results_kv):
                parts[contribution.sums] += 1
                launched.add(contribution.sums)
        for recv in step.result_recvs:
            parts.update(contribution.sums for contribution in recv.into)
    return frozenset(
        name
        for name, sums in program.sums.items()
        if parts[name] == 1 and name in launched and not sums.home and not sums.complete and sums.kind != "out"
    )


def agree_on_narrow(comm: Group, program: LoweredProgram[R], *, rounded: bool) -> LoweredProgram[R]:
    """The program with these sums, and what arrives of the other ranks', marked. Collective.

    Args:
        rounded: whether this rank's kernel library yields gradients in the input's dtype, always.
    """
    single = of_one_launch(program) if rounded else frozenset[str]()
    mine = [(s.peer, s.tag) for step in program.backward for s in step.result_sends if s.sums in single]
    arriving = {
        (rank, tag) for rank, its in enumerate(comm.all_gather_object(mine)) for peer, tag in its if peer == comm.rank
    }

    def marked(recv: ResultRecv[R]) -> ResultRecv[R]:
        return replace(recv, narrow=True) if (recv.peer, recv.tag) in arriving else recv

    def with_marks(step: LoweredStep[R]) -> LoweredStep[R]:
        return replace(step, result_recvs=tuple(map(marked, step.result_recvs))) if step.result_recvs else step

    sums = {name: replace(x, narrow=True) if name in single else x for name, x in program.sums.items()}
    return replace(program, backward=tuple(map(with_marks, program.backward)), sums=sums)
