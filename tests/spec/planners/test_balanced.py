"""The layout "balanced" on integers: every row once, equal rows, equal work, little that travels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.problems.strategies import areas as drawn_areas
from cp_ref.schedules.attention_slices import AttentionSliceRow, AttentionSlices, areas_of_rows
from cp_ref.schedules.balanced import balanced, pairs_before
from cp_ref.schedules.ownership import Fragments, contiguous
from cp_ref.schedules.problem import Sequence as Lengths
from cp_ref.schedules.table import Column
from tests.marks import examples


def solve(lengths: list[int], cp_size: int, padding: int = 0, window: int = 2**40) -> tuple[Fragments, Column, Column]:
    """(ownership, what the rows before each row see, where documents begin) under a causal mask."""
    starts = np.append(0, np.cumsum(np.array(lengths, dtype=np.int64) + padding))
    tokens = np.array(lengths, dtype=np.int64)
    rows = [(a, a + n, a, a + n, -window, 0) for a, n in zip(starts[:-1].tolist(), lengths, strict=True)]
    areas = AttentionSlices.of_rows(rows)
    return balanced(starts, tokens, areas, cp_size), pairs_before(areas, int(starts[-1])), starts


def work(own: Fragments, before: Column, cp_size: int) -> Column:
    """The pairs that each rank's rows see."""
    seen = np.zeros(cp_size, dtype=np.int64)
    np.add.at(seen, own.rank, before[own.stop] - before[own.start])
    return seen


def check(lengths: list[int], cp_size: int, **more: int) -> float:
    """Every row once, in each rank's buffer one behind the other; rows equal; no worse than equal parts of the buffer.

    Returns the largest rank's pairs over the mean.
    """
    own, before, starts = solve(lengths, cp_size, **more)
    rows = int(starts[-1])
    held = np.concatenate([np.arange(a, b) for _, a, b, _ in own.rows()] or [np.zeros(0, dtype=np.int64)])
    assert np.array_equal(np.sort(held), np.arange(rows))
    count = [int((part.stop - part.start).sum()) for part in map(own.of, range(cp_size))]
    assert max(count) == -(-rows // cp_size)
    for part in map(own.of, range(cp_size)):
        assert np.array_equal(part.row, np.cumsum(part.stop - part.start) - (part.stop - part.start))
        assert (part.start[1:] > part.stop[:-1]).all()  # in the order of the buffer, and what touches is one
    seen = work(own, before, cp_size)
    assert seen.max() <= work(contiguous(starts[[0, -1]], cp_size), before, cp_size).max(initial=0)
    return float(seen.max() * cp_size / max(seen.sum(), 1))


@settings(max_examples=examples(200))
@given(
    st.lists(st.integers(0, 60), max_size=30),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sampled_from([2**40, 0, 5]),
)
def test_any_documents(lengths: list[int], cp_size: int, padding: int, window: int) -> None:
    check(lengths, cp_size, padding=padding, window=window)


@given(drawn_areas((Lengths(12, 12, 12, 12), Lengths(9, 9, 10, 10))))
def test_pairs_of_rows(rows: tuple[AttentionSliceRow, ...]) -> None:
    areas = areas_of_rows(rows)
    seen = [
        max(0, min(k1, i + hi + 1) - max(k0, i + lo)) if q0 <= i < q1 else 0
        for i in range(22)
        for q0, q1, k0, k1, lo, hi in areas.rows()
    ]
    by_row = np.array(seen, dtype=np.int64).reshape(22, len(areas)).sum(axis=1)
    assert pairs_before(areas, 22).tolist() == [0, *np.cumsum(by_row).tolist()]


@pytest.mark.parametrize("cp_size", [1, 4, 7])
@pytest.mark.parametrize(
    "lengths",
    [[4096], [1] * 300, [4000, *[1] * 20], [1, 2] * 5000, [0, 512, 0, 0, 700, 0], [2, 1], [], [0]],
    ids=["one", "of length 1", "nearly all", "10,000", "empty ones", "fewer than ranks", "none", "nothing"],
)
def test_special_cases(lengths: list[int], cp_size: int) -> None:
    ratio = check(lengths, cp_size)
    assert ratio < 1.03 or sum(lengths) < cp_size * 100


@pytest.mark.parametrize(("median", "sigma"), [(900, 1.1), (1000, 1.5), (10_000, 1.2)])
def test_real_batches_are_balanced(median: int, sigma: float) -> None:
    generator = np.random.default_rng(0)
    for cp_size in (4, 8, 16):
        lengths, room = [], cp_size * 16_384
        while room:
            drawn = int(min(max(1, generator.lognormal(np.log(median), sigma)), 131_072, room))
            lengths.append(drawn)
            room -= drawn
        assert check(lengths, cp_size) <= 1.02
