"""The tables that kernels of convolutions read: which rows are near is what the slots say."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_fast.linear.convolution.halo_tables import ReadTable
from cp_fast.linear.linear_plan import LinearPlan
from cp_ref.spec import Problem
from tests.linear.random_problems import linear_problems
from tests.marks import examples


def check_far(table: ReadTable, n: int) -> None:
    """n: own rows. A kernel reads what near rows read without looking at slots, so it must be there."""
    slots, rows = table.slots.tolist(), len(table.slots)
    for row, far in enumerate(table.far.tolist()):
        last = len(slots[row]) - 1
        for near in range(row, far):
            assert slots[near] == [near + table.step * (last - k) for k in range(last + 1)]
            assert all(0 <= slot < n for slot in slots[near])
        if far < rows:
            neighbours = [far + table.step * (last - k) for k in range(last + 1)]
            assert slots[far] != neighbours or max(neighbours) >= n


@settings(max_examples=examples(100), deadline=None)
@given(linear_problems((1, 2, 4)), st.integers(1, 6), st.integers(0, 3))
def test_rows_are_near_up_to_the_next_one_that_is_far(problem: Problem, kernel_size: int, rank: int) -> None:
    tables = LinearPlan(problem, rank % problem.cp_size, torch.device("cpu")).halo(kernel_size)
    for table in (tables.reads, tables.read_by, tables.edges_read_by):
        check_far(table, len(tables.reads.slots))
    n = len(tables.reads.slots)
    assert (tables.reads.slots <= tables.zeros).all()
    assert (tables.read_by.slots <= n).all()
    for row, readers in enumerate(tables.read_by.slots.tolist()):
        for k, reader in enumerate(readers):
            assert reader == n or int(tables.reads.slots[reader, k]) == row
