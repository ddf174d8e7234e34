"""Areas that share rows: the same pairs in few segments and few launches, by brute force."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.planning_areas import measured
from conformance.problems.strategies import areas as drawn_areas
from cp_fast import masks
from cp_fast.compile.packing import Packing
from cp_fast.compile.pipeline import lowered
from cp_fast.compile.program import Launch
from cp_fast.tiles.launches import share_keys, tile_launches
from cp_fast.tiles.merge_tiles import merge_dense, merge_triangles
from cp_fast.tiles.row_spans import Placement
from cp_fast.tiles.segments import Segments, WindowedTiles, WindowRule, one_each, with_windows
from cp_fast.tiles.shared_rows import factor_keys, split_disjoint
from cp_ref.schedules.areas import areas_of_windows
from cp_ref.schedules.planners.make_schedule import make_rank_schedule, saved_kinds
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Tiles
from cp_ref.schedules.table import Spans
from tests.cp_fast.compile.brute_force import band_pairs, disjoint, kernel_pairs, rows_twice, segments_of, window_pairs

WINDOWS = [(-1, -1), (-1, 0), (2, 0), (0, -1), (1, 2)]


@st.composite
def tiles_of_areas(draw: st.DrawFn) -> WindowedTiles:
    """Areas that share rows, all cut along the same rows and keys; some tiles are missing."""
    areas = areas_of_windows(draw(drawn_areas((Sequence(16, 16, 16, 16),))))
    cuts = [[(0, 16)], [(0, 8), (8, 16)], disjoint(draw, 16, 4)]
    q, k = draw(st.sampled_from(cuts)), draw(st.sampled_from(cuts))
    tiles = [
        (n, max(q0, a), min(q1, b), max(k0, c), min(k1, d), 0, 1)
        for n, (q0, q1, k0, k1, _, _) in enumerate(areas.rows())
        for (a, b), (c, d) in product(q, k)
        if max(q0, a) < min(q1, b) and max(k0, c) < min(k1, d) and draw(st.integers(0, 7))
    ]
    return with_windows(areas, Tiles.of_rows(draw(st.permutations(tiles))))


@given(tiles_of_areas(), st.sampled_from(WINDOWS), st.sampled_from([0, 3, 2048]))
def test_launches(tiles: WindowedTiles, own: tuple[int, int], large: int) -> None:
    launches = tile_launches(tiles, WindowRule(own, large))
    pairs = [kernel_pairs(segments_of(launch)) for launch in launches]
    assert sum(pairs, start=type(band_pairs(tiles))()) == band_pairs(tiles)
    assert not any(list(rows_twice(launch)) for launch in launches)


@given(tiles_of_areas())
def test_passes(tiles: WindowedTiles) -> None:
    """Each keeps the pairs."""
    each = one_each(tiles)
    if len(each):
        launches = split_disjoint(each)
        assert launches is not None
        assert sum(map(len, launches)) == len(each)
        assert sum(
            (kernel_pairs(segments_of(some)) for some in launches), start=type(band_pairs(tiles))()
        ) == band_pairs(tiles)
    full = tiles.take(tiles.full)
    if len(full):
        found = factor_keys(merge_dense(full))
        assert kernel_pairs(segments_of(found)) == band_pairs(full)


@st.composite
def cut_masks(draw: st.DrawFn) -> WindowedTiles:
    """A causal mask and what it hides of some blocks, cut along rows and keys; some tiles are missing."""
    size = draw(st.integers(2, 16))
    mask = draw(
        st.sampled_from(
            [masks.block_causal(size, draw(st.integers(1, 6))), masks.prefix_lm(draw(st.integers(0, size)), size)]
        )
    )
    areas = areas_of_windows(tuple(map(tuple, mask.tolist())))
    cuts = disjoint(draw, size, 3, least=1)
    tiles = [
        (n, max(q0, a), min(q1, b), max(k0, c), min(k1, d), 0, 1)
        for n, (q0, q1, k0, k1, _, _) in enumerate(areas.rows())
        for (a, b), (c, d) in product(cuts, cuts)
        if max(q0, a) < min(q1, b) and max(k0, c) < min(k1, d) and draw(st.integers(0, 9))
    ]
    return with_windows(areas, Tiles.of_rows(draw(st.permutations(tiles))))


@given(st.one_of(tiles_of_areas(), cut_masks()))
def test_triangles(tiles: WindowedTiles) -> None:
    """Merged or not, the pairs are the same, by their bands and by their windows."""
    found = merge_triangles(tiles)
    assert band_pairs(found) == window_pairs(found) == band_pairs(tiles)


@given(st.one_of(tiles_of_areas(), cut_masks()), st.permutations(range(16)), st.integers(0, 3))
def test_common_keys(tiles: WindowedTiles, order: list[int], cuts: int) -> None:
    """The same pairs where segments of a launch have common keys; and where each reads them from a buffer, in which the
    rows lie in any order.
    """
    launches = tile_launches(tiles, WindowRule((-1, 0), 2048), shared_keys=True)
    pairs = [kernel_pairs(segments_of(launch)) for launch in launches]
    assert sum(pairs, start=type(band_pairs(tiles))()) == band_pairs(tiles)
    assert not any(times > 1 for one in launches for times in rows_of_queries(one).values())
    order = order if cuts else list(range(16))
    buffer = Placement(Spans(np.arange(16), np.arange(1, 17)), np.array(order))
    for launch, one in zip(launches, share_keys(launches, buffer, buffer) or (), strict=False):
        keys = [row for a, b in zip(one.kv.start, one.kv.stop, strict=True) for row in range(a, b)]
        assert [order[row] for row in keys] == list(range(order[keys[0]], order[keys[0]] + len(keys)))
        rows = [-1] * one.size_q
        for a, b, at in zip(one.q.spans.start, one.q.spans.stop, one.q.row, strict=True):
            rows[at : at + b - a] = range(a, b)
        places = [order[row] - n for n, row in enumerate(rows) if row >= 0]
        assert len(set(places)) == 1
        assert rows[0] >= 0
        assert rows[-1] >= 0
        assert sorted(row for row in rows if row >= 0) == sorted(rows_of_queries(launch))
        windows = zip(one.segments.left.tolist(), one.segments.right.tolist(), strict=True)
        lengths = (side.lengths(len(launch)).tolist() for side in (one.segments.q, one.segments.k))
        each = zip(windows, one.start_q.tolist(), one.start_kv.tolist(), *lengths, strict=True)
        read = [(window, rows[a : a + n], keys[c : c + m]) for window, a, c, n, m in each]
        assert kernel_pairs(read) == kernel_pairs(segments_of(launch))
        assert [len(k) for _, _, k in read] == sorted((len(k) for _, _, k in read), reverse=True)


def rows_of_queries(launch: Segments) -> Counter[int]:
    """How often a launch has each row of queries."""
    return Counter(row for _, start, stop in launch.q.rows() for row in range(start, stop))


def launches_of(
    areas: torch.Tensor, length: int, *, shared_keys_tile: int = 0
) -> list[list[tuple[int, int | None, int | None]]]:
    """The forward launches of one rank alone, by step: segments, and the window."""
    problem = Problem(1, (Sequence(*[length] * 4),), qkv_format="thd", areas=tuple(map(tuple, areas.tolist())))
    steps, saved = make_rank_schedule(problem, 0), saved_kinds(problem)
    draft = lowered(Packing(problem), 0, steps, saved, shared_keys_tile=shared_keys_tile)
    forward = draft.programs.forward
    batches = [(one.step, one.batch) for one in forward.of(Launch)]
    return [
        [(len(draft.tables.cumulative(x.cu_q)) - 1, x.left, x.right) for at, x in batches if at == step]
        for step in range(forward.steps)
    ]


BLOCKS = torch.tensor([(i, i + 8, 0, i + 8, -1, -1) for i in range(0, 128, 8)])
ANSWERS = [(i, i + 8, *x) for i in range(16, 64, 8) for x in ((0, 16, -1, -1), (i, i + 8, -1, 0))]
BEHIND = [(8, 16, 0, 4, -1, -1), (8, 16, 6, 8, -1, -1), (8, 16, 8, 16, -1, 0), (0, 8, 0, 8, -1, 0)]


@pytest.mark.parametrize(
    ("areas", "length", "expected"),
    [
        (masks.prefix_lm(16, 64), 64, [(1, None, 0), (1, 0, None)]),
        (masks.shared_prefix(16, [8] * 6), 64, [(7, None, 0), (1, None, None)]),
        (torch.tensor([(0, 16, 0, 16, -1, 0), *ANSWERS]), 64, [(7, None, 0), (1, None, None)]),
        (masks.block_causal(64, 8), 64, [(1, None, 0), (8, 0, None)]),
        (masks.chunked(64, 8), 64, [(8, None, 0)]),
        (masks.first_tokens_and_window(64, 4, 16), 64, [(2, 16, 0), (1, None, None)]),
        (torch.tensor(BEHIND), 16, [(2, None, 0), (1, None, None)]),
        (BLOCKS, 128, [(4, None, None), (7, None, None), (4, None, None), (1, None, None)]),
    ],
)  # fmt: skip
def test_no_area_costs_a_launch_of_its_own(
    areas: torch.Tensor, length: int, expected: list[tuple[int, int | None, int | None]]
) -> None:
    assert launches_of(areas, length) == [expected]


@pytest.mark.parametrize(
    ("areas", "length", "expected"),
    [
        (masks.block_causal(64, 8), 64, [(8, None, None)]),
        (BLOCKS, 128, [(16, None, None)]),
        (masks.prefix_lm(16, 64), 64, [(1, None, 0), (1, 0, None)]),
        (masks.shared_prefix(16, [8] * 6), 64, [(7, None, 0), (1, None, None)]),
    ],
)
def test_one_launch_where_segments_share_keys(
    areas: torch.Tensor, length: int, expected: list[tuple[int, int | None, int | None]]
) -> None:
    assert launches_of(areas, length, shared_keys_tile=1) == [expected]


@pytest.mark.parametrize("case", ["nested", "holes", "prefixes", "sparse"])
@pytest.mark.one_in(2)
def test_many_areas_that_share_rows_are_planned_in_time(case: str) -> None:
    """10,000 in two seconds of an idle core, as recorded; here within what a busy machine takes."""
    read, planned, launches = measured(case, 10_000, planned=True)
    assert read < 1
    assert planned < 8
    assert launches < 40
