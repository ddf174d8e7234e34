"""Problems whose heads are exchanged in head chunks, and the sizes of these."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from cp_ref.schedules.problem import Problem
from tests.spec.problems import problems

__all__ = ["chunked_problems"]


@st.composite
def chunked_problems(draw: st.DrawFn) -> tuple[Problem, tuple[int, ...]]:
    """Problems in which heads are exchanged, and any cut of the kv heads of a rank."""
    problem = draw(problems((2, 3, 4), ("a2a", "a2a+p2p")).filter(lambda p: p.a2a_size > 1))
    group = draw(st.integers(1, 2))
    head_chunks = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    heads_kv = sum(head_chunks) * problem.a2a_size
    return replace(problem, heads_kv=heads_kv, heads_q=group * heads_kv), head_chunks
