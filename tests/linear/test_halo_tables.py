"""The tables that kernels of convolutions read: what they say about neighbours is what the slots say."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_fast.linear.linear_plan import LinearPlan
from cp_ref.schedules.problem import Problem
from tests.linear.random_problems import linear_problems
from tests.marks import examples


@settings(max_examples=examples(100), deadline=None)
@given(linear_problems((1, 2, 4)), st.integers(1, 6), st.integers(0, 3))
def test_a_run_is_read_from_its_first_row_and_the_rows_before_it(problem: Problem, size: int, rank: int) -> None:
    tables = LinearPlan(problem, rank % problem.cp_size, torch.device("cpu")).halo(size)
    slots, stops, after = (table.tolist() for table in tables.reads)
    n, row = len(slots), 0
    assert all(0 <= slot <= tables.zeros for table in (slots, after) for some in table for slot in some)
    while row < n:
        stop = stops[row]
        assert row < stop <= n
        assert stops[row:stop] == [stop] * (stop - row)
        held = [*slots[row][: size - 1], *range(row, stop), *after[stop - 1]]  # what a kernel marches through
        for here in range(row, stop):
            assert slots[here] == held[here - row : here - row + size]
            assert after[here] == held[here - row + size :][: size - 1]
        row = stop


@settings(max_examples=examples(100), deadline=None)
@given(linear_problems((1, 2, 4)), st.integers(1, 6), st.integers(0, 3))
def test_the_next_rows_of_a_document_are_those_that_read_a_row(problem: Problem, size: int, rank: int) -> None:
    tables = LinearPlan(problem, rank % problem.cp_size, torch.device("cpu")).halo(size)
    slots, n = tables.reads.slots.tolist(), len(tables.reads.slots)
    for row, after in enumerate(tables.reads.after.tolist()):
        for distance, slot in enumerate(after, 1):
            readers = [reader for reader in range(n) if slots[reader][size - 1 - distance] == row]
            assert readers == ([slot] if slot < n else [])
    rows = [*tables.edges.tolist(), *range(n, tables.zeros)]
    for row, readers in zip(rows, tables.edges_read_by.tolist(), strict=True):
        for k, reader in enumerate(readers):
            assert [reader] == ([i for i in range(n) if slots[i][k] == row] or [n])
