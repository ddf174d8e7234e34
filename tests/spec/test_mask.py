"""The band's rows against its definition, on all small spans that Hypothesis can think of."""

from hypothesis import given
from hypothesis import strategies as st

from conformance.tensors import DiagonalBand

sides = st.one_of(st.none(), st.integers(-9, 9))


@given(sides, sides, st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))
def test_row(lo: int | None, hi: int | None, i: int, first: int, size: int) -> None:
    start, stop = DiagonalBand(lo, hi).row(i, first, first + size)
    seen = {j for j in range(first, first + size) if (lo is None or lo <= j - i) and (hi is None or j - i <= hi)}
    assert set(range(start, stop)) == seen
