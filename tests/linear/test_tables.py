"""The table of one launch says what the waves say: the states that enter a rank's fragments."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_fast.linear.affine_maps import Maps, apply, compose_in_waves
from cp_fast.linear.linear_plan import LinearPlan
from cp_fast.linear.state_tables import ScanTable
from cp_ref.schedules.problem import Problem
from tests.linear.random_problems import linear_problems
from tests.marks import examples


def by_table(table: ScanTable, maps: Maps, states: torch.Tensor | None, count: int) -> torch.Tensor:
    """What a launch computes, step by step. A place that no step writes stays NaN."""
    found = maps.b.new_full((count, *maps.b.shape[1:]), torch.nan)
    bounds = table.first.tolist()
    for (low, high), start in zip(pairwise(bounds), table.starts.tolist(), strict=True):
        state = torch.zeros_like(found[:1]) if states is None or start < 0 else states[start : start + 1]
        for slot, place in table.steps[low:high].tolist():
            if place >= 0:
                found[place] = state[0]
            if slot >= 0:
                state = apply(maps.m[slot : slot + 1], state) + maps.b[slot : slot + 1]
    return found


@settings(max_examples=examples(200), deadline=None)
@given(linear_problems(), st.booleans())
def test_the_table_and_the_waves_are_one(problem: Problem, initial: bool) -> None:
    draw = torch.Generator().manual_seed(problem.cp_size)
    for rank in range(problem.cp_size):
        plan = LinearPlan(problem, rank, torch.device("cpu"))
        for tables in plan.passes:
            m, b, states = (
                torch.randn(n, 1, 2, 2, generator=draw, dtype=torch.float64)
                for n in (tables.slots, tables.slots, len(problem.sequences))
            )
            given = states if initial else None
            count = len(plan.sequences.packed)
            wanted = compose_in_waves(tables, Maps(m, b), given, count, transposed=False)
            torch.testing.assert_close(by_table(tables.scans, Maps(m, b), given, count), wanted)
