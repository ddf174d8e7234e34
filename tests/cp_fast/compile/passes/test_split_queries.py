"""Few keys that many queries see: every pair once, and right results of all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from hypothesis import given, settings

import cp_fast
from conformance.case import Case
from conformance.checks.values import check_logic
from cp_fast import masks
from cp_fast.compile import launches
from cp_fast.compile.launches import tile_launches
from cp_fast.compile.pipeline import compiled
from cp_fast.compile.program import Launch
from cp_fast.compile.segments import WindowedTiles, WindowRule
from cp_ref.schedules.problem import Problem, Sequence
from tests.cp_fast.compile.brute_force import band_pairs, kernel_pairs, rows_twice, segments_of
from tests.cp_fast.compile.passes.test_sharing import tiles_of_areas
from tests.marks import examples
from tests.masks.problems import problems


@contextmanager
def always() -> Iterator[None]:
    """Launches of up to eight keys are spread, in parts of two queries and more."""
    with patch.multiple(launches, _BLOCK=2, _ROWS=2):
        yield


@given(tiles_of_areas())
def test_every_pair_once(tiles: WindowedTiles) -> None:
    with always():
        launches = tile_launches(tiles, WindowRule((-1, 0), 2048))
    pairs = [kernel_pairs(segments_of(launch)) for launch in launches]
    assert sum(pairs, start=type(band_pairs(tiles))()) == band_pairs(tiles)
    assert not any(list(rows_twice(launch)) for launch in launches)


@settings(max_examples=examples(30))
@given(problems((1, 2, 3)))
def test_results_meet_the_oracle(problem: Problem) -> None:
    with always():
        assert check_logic(cp_fast, Case(problem, use_plan=True, return_lse=True, loss="out+lse")) == []  # type: ignore[arg-type]


def test_the_first_tokens_of_many_are_spread() -> None:
    """And not those of few rows, or of many keys."""

    def segments(rows: int, first: int) -> int:
        areas = tuple(map(tuple, masks.first_tokens_and_window(rows, first, 512).tolist()))
        problem = Problem(1, (Sequence(*[rows] * 4),), qkv_format="thd", areas=areas)
        draft = compiled(problem, 0)
        return len(draft.tables.cumulative(list(draft.plan.forward.of(Launch))[1].batch.cu_kv)) - 1

    assert [segments(8192, 64), segments(8192, 200), segments(8192, 512), segments(2048, 64)] == [4, 2, 1, 1]
