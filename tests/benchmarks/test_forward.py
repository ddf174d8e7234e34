"""What a forward pass is made of, as `benchmarks/forward` counts it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.forward import counts, times
from benchmarks.forward.cases import SCHEDULES, cases_of

CASES = cases_of(64)


@pytest.mark.parametrize(("schedule", "launches", "merged"), [("p2p", 2, 256), ("all_gather", 2, 256), ("a2a", 1, 0)])
def test_block_causal_attention_has_one_launch_a_step(schedule: str, launches: int, merged: int) -> None:
    problem = counts.problem_of(CASES["block-causal"], schedule)
    found = counts.count(problem, 1)
    assert (len(found.kernels), found.merged, found.gathered) == (launches, merged, (0, 0))
    assert found.kernels[0].segments == (16 if schedule == "a2a" else 8)


def test_a_line_for_each_rank(tmp_path: Path) -> None:
    out = tmp_path / "counts.csv"
    counts.main("dense;window 4,096", SCHEDULES, "-", 64, out)
    with out.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(one["case"], one["schedule"], one["rank"]) for one in lines] == [
        (case, schedule, rank)
        for case in ("dense", "window 4,096")
        for schedule in SCHEDULES.split(",")
        for rank in "01"
    ]
    assert all(0 < float(one["share"]) < 2 for one in lines)


@pytest.mark.parametrize("name", CASES)
def test_what_a_case_sees(name: str) -> None:
    """The check's attention slices have the problem's pairs."""
    case = CASES[name]
    seen = sum(
        max(min(k1 - 1, q + hi) - max(k0, q + lo) + 1, 0)
        for q0, q1, k0, k1, lo, hi in times.areas_of(case)
        for q in range(q0, q1)
    )
    assert seen == counts.problem_of(case, "p2p").pairs
