"""The suite for Numba's kernels in its simulator, on the CPU: run by `test_numba.py` in a process of its own, since the
simulator is chosen when Numba is imported. Every CUDA thread is a Python thread there, so cases are small and few.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from cp_fast.movers.mover_protocol import RowRule
from cp_fast.movers.numba_cuda.memory_sim import SIMULATED
from cp_fast.movers.select_movers import why_not
from tests.cp_fast.kernels.checks.suite import CHECKS, Case, Where, cases, many_sequences, row_sizes

pytestmark = pytest.mark.skipif(not SIMULATED, reason="needs NUMBA_ENABLE_CUDASIM=1")
WHERE = Where("numba", "cpu")


@pytest.mark.parametrize("check", list(CHECKS))
def test_properties(check: str) -> None:
    assert why_not("numba", "cpu") is None

    @settings(max_examples=3)
    @given(cases(most_chunks=2, most_sequences=5, most_heads=2))
    def run(case: Case) -> None:
        CHECKS[check](WHERE, case)

    run()


@pytest.mark.parametrize("size", [1, 6, 34, 2048])
def test_row_sizes(size: int) -> None:
    row_sizes(WHERE, size)


def test_many_sequences() -> None:
    """Enough for two rounds of a block's search."""
    many_sequences(WHERE, 40)


BROKEN = {
    "not from 0": [4, 8, 12],
    "decreasing": [0, 12, 8],
    "not divisible": [0, 6, 12],
    "past the end": [0, 8, 16],
    "far past the end": [0, 8, 2**40],
    "negative": [0, -8, 12],
    "a difference past 64 bits": [0, 8, -(2**63)],
    "tail": [0, 8, 8],
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken_lengths_fail_by_name(name: str) -> None:
    """The operators look at lengths on the CPU first; these are the kernels' own assertions."""
    x = torch.zeros(12 if name != "tail" else 11, 3)
    with pytest.raises(AssertionError, match="cp_fast reorder: lengths must begin at 0"):
        WHERE.kernels.gather([x], RowRule("reorder", "rank_order", torch.tensor(BROKEN[name]), a=2))


def test_broken_indices_fail_by_name() -> None:
    with pytest.raises(AssertionError, match="cp_fast gather: row indices must lie inside the tensor"):
        WHERE.kernels.gather([torch.zeros(4, 3)], torch.tensor([0, 4]))
