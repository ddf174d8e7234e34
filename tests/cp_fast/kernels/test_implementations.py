"""The suite on the CPU, for PyTorch's operators and for native code."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from cp_fast.movers.select_movers import why_not
from tests.cp_fast.kernels.checks.suite import (
    CHECKS,
    MERGED_SHAPES,
    ROW_SIZES,
    Case,
    Where,
    cases,
    many_sequences,
    merged_shapes,
    row_sizes,
)


@pytest.fixture(params=["torch", "native"])
def where(request: pytest.FixtureRequest) -> Where:
    if (reason := why_not(request.param, "cpu")) is not None:
        pytest.skip(f"needs the kernels {request.param!r}: {reason}")
    return Where(request.param, "cpu")


@pytest.mark.parametrize("check", list(CHECKS))
@pytest.mark.one_in(2)
def test_properties(where: Where, check: str) -> None:
    @settings(max_examples=30)
    @given(cases())
    def run(case: Case) -> None:
        CHECKS[check](where, case)

    run()


@pytest.mark.parametrize("size", ROW_SIZES)
def test_row_sizes(where: Where, size: int) -> None:
    row_sizes(where, size)


@pytest.mark.parametrize(("heads", "dim"), MERGED_SHAPES[::3])
def test_merged_shapes(where: Where, heads: int, dim: int) -> None:
    merged_shapes(where, heads, dim)


def test_many_sequences(where: Where) -> None:
    many_sequences(where, 100_000)
