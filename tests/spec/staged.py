"""Problems whose heads are exchanged in stages, and costs by which they always are, or never."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hypothesis import strategies as st

from cp_ref.spec import Problem
from cp_ref.spec.planners import stage_costs as rule
from cp_ref.spec.planners.stage_costs import COSTS, Costs
from tests.spec.problems import problems

__all__ = ["ALWAYS", "NEVER", "costs", "staged"]

# much to hide behind, and for nothing
ALWAYS = replace(
    COSTS,
    flops_per_us=1e-3,
    bytes_per_us=1.0,
    exchange_us=1.0,
    launch_us=0.0,
    idle_rows=0.0,
    host_us=0.0,
    least_gain=0.0,
)
NEVER = replace(COSTS, launch_us=1e9)


@contextmanager
def costs(of: Costs) -> Iterator[None]:
    """Plans are made as if things took this long."""
    before, rule.COSTS = rule.COSTS, of
    try:
        yield
    finally:
        rule.COSTS = before


@st.composite
def staged(draw: st.DrawFn) -> tuple[Problem, tuple[int, ...]]:
    """Problems in which heads are exchanged, and any cut of the kv heads of a rank."""
    problem = draw(problems((2, 3, 4)).filter(lambda p: p.a2a_size > 1))
    group = draw(st.integers(1, 2))
    stages = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    heads_kv = sum(stages) * problem.a2a_size
    return replace(problem, heads_kv=heads_kv, heads_q=group * heads_kv), stages
