"""Windows, joins and launches of tiles: the same pairs before and after, by brute force."""

from __future__ import annotations

import sys
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cp_fast.compile.lower import lower
from cp_fast.compile.own_keys import own_keys_first
from cp_fast.compile.pipeline import optimized
from cp_fast.compile.program import Launch
from cp_fast.tiles.launches import tile_launches
from cp_fast.tiles.merge_tiles import merge_causal, merge_dense
from cp_fast.tiles.segments import WindowedTiles, WindowRule, one_each, split_windows, windowed, with_windows
from cp_ref.schedules.areas import UNBOUNDED, Areas
from cp_ref.schedules.ownership import Fragments, Ownership
from cp_ref.schedules.planners.all_gather import plan_all_gather_rank
from cp_ref.schedules.planners.p2p import plan_p2p_rank
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import Tiles
from tests.cp_fast.compile.brute_force import (
    Segment,
    band_pairs,
    disjoint,
    kernel_pairs,
    rows_twice,
    ruled_tiles,
    segments_of,
    window_pairs,
)
from tests.marks import examples

Ruled = tuple[WindowedTiles, WindowRule]


def parts_of(tiles: WindowedTiles) -> list[WindowedTiles]:
    return [tiles.take(np.array([n])) for n in range(len(tiles))]


@given(st.tuples(*[st.integers(0, 9)] * 4), st.integers(-12, 12), st.integers(-12, 12), st.integers(0, 3))
def test_windows_of_bands(edges: tuple[int, int, int, int], lo: int, hi: int, unbounded: int) -> None:
    """The kernel's window, aligned to the cropped tile's corner, lets through what the diagonal band does."""
    q, k = sorted(edges[:2]), sorted(edges[2:])
    lo, hi = -UNBOUNDED if unbounded & 1 else lo, UNBOUNDED if unbounded & 2 else hi
    areas = Areas.of_rows([(0, 9, 0, 9, lo, hi)])
    tiles = with_windows(areas, Tiles.of_rows([(0, *q, *k, 0, 1)]))
    visible = {(i, j) for i, j in product(range(*q), range(*k)) if lo <= j - i <= hi}
    assert set(band_pairs(tiles)) == visible
    assert window_pairs(tiles) == band_pairs(tiles)
    if visible:
        for side, edge in (
            (tiles.left, lo - tiles.k_start + tiles.q_stop - 1),
            (tiles.right, tiles.k_stop - 1 - tiles.q_start - hi),
        ):
            assert (side[0] >= 0) == (edge[0] > 0)  # where nothing is hidden there is no window
        rows, columns = (sorted({pair[axis] for pair in visible}) for axis in (0, 1))
        assert (rows[0], rows[-1]) == (tiles.q_start[0], tiles.q_stop[0] - 1)
        assert (k[0], columns[-1]) == (tiles.k_start[0], tiles.k_stop[0] - 1)  # first keys stay where a block begins


@given(ruled_tiles())
def test_split_windows(drawn: Ruled) -> None:
    """The same pairs; windows are the problem's own, or one of four that all tiles of a diagonal band share."""
    tiles, rule = drawn
    cut = split_windows(tiles, rule)
    assert window_pairs(cut) == band_pairs(cut) == band_pairs(tiles)
    whole = {row[1:5] for row in tiles.rows()}
    for row in cut.rows():
        (_, q0, q1, k0, k1, lo, hi), window = row[:7], row[7:9]
        width = -1 if lo <= -UNBOUNDED else hi - lo
        large = (q0, q1, k0, k1) in whole and q1 - q0 >= rule.large  # one launch of it rather than several
        assert window in {(width, 0), (0, -1), (-1, -1), rule.own} or large


@given(ruled_tiles())
def test_a_tile_is_cut_alone(drawn: Ruled) -> None:
    """Into at most three, whatever other tiles there are, which keep their order."""
    tiles, rule = drawn
    parts = [split_windows(tile, rule) for tile in parts_of(tiles)]
    assert all(1 <= len(part) <= 3 for part in parts)
    assert split_windows(tiles, rule) == WindowedTiles.concat(parts)


@given(ruled_tiles())
def test_squares(drawn: Ruled) -> None:
    """The tiles that are part of squares, and the squares, have the same pairs; the window is the causal one."""
    tiles, rule = drawn
    found, part = merge_causal(tiles, rule)
    event(f"{len(found)} squares")
    assert kernel_pairs(segments_of(found)) == band_pairs(tiles.take(part))
    assert {(left, right) for (left, right), _, _ in segments_of(found)} <= {(-1, 0), rule.own}
    assert len(set(found.area.tolist())) == len(found)


@st.composite
def own_chunks(draw: st.DrawFn) -> tuple[Areas, list[list[tuple[int, int]]]]:
    """Causal sequences, and the chunks of each that a rank has."""
    table: list[tuple[int, ...]] = []
    chunks: list[list[tuple[int, int]]] = []
    q_begin, k_begin = 0, draw(st.integers(0, 5))
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(2, 12))
        table.append((q_begin, q_begin + size, k_begin, k_begin + size, -UNBOUNDED, k_begin - q_begin))
        chunks.append([(q_begin + a, q_begin + b) for a, b in disjoint(draw, size, 3)])
        q_begin, k_begin = q_begin + size, k_begin + size
    return Areas.of_rows(table), chunks


@given(own_chunks(), st.randoms(use_true_random=False))
def test_own_chunks_are_one_square(
    drawn: tuple[Areas, list[list[tuple[int, int]]]], random: np.random.Generator
) -> None:
    """All chunks of a causal sequence that a rank has, in any order of the tiles, are one segment; so a whole rank is
    one launch.
    """
    areas, chunks = drawn
    rows = [
        (n, *q, k[0] + shift, k[1] + shift, 0, 1)
        for n, of_area in enumerate(chunks)
        for shift in [int(areas.hi[n])]
        for q, k in product(of_area, of_area)
        if k <= q
    ]
    random.shuffle(rows)  # type: ignore[arg-type]
    tiles = with_windows(areas, Tiles.of_rows(rows))
    found, part = merge_causal(tiles, WindowRule((-1, 0), 0))
    several = [n for n, of_area in enumerate(chunks) if len(of_area) > 1]
    assert found.area.tolist() == several
    assert part.tolist() == [area in several for area in tiles.area.tolist()]
    launches = tile_launches(tiles, WindowRule((-1, 0), 0))
    assert len(launches) == bool(len(tiles))
    for launch in launches:
        assert (launch.left[0], launch.right[0]) == (-1, 0)
        assert len(launch) == sum(bool(x) for x in chunks)


@given(own_chunks(), st.data())
def test_chunks_that_lack_a_tile_are_no_square(
    drawn: tuple[Areas, list[list[tuple[int, int]]]], data: st.DataObject
) -> None:
    """Nothing is computed that is not asked for."""
    areas, chunks = drawn
    rows = [
        (n, *q, k[0] + int(areas.hi[n]), k[1] + int(areas.hi[n]), 0, 1)
        for n, of_area in enumerate(chunks)
        for q, k in product(of_area, of_area)
        if k <= q
    ]
    rows = [row for row in rows if data.draw(st.integers(0, 3))]
    tiles = with_windows(areas, Tiles.of_rows(rows))
    found, part = merge_causal(tiles, WindowRule((-1, 0), 0))
    assert kernel_pairs(segments_of(found)) == band_pairs(tiles.take(part))


def full_tiles(rows: list[tuple[int, ...]]) -> WindowedTiles:
    area, *edges = np.array(rows, dtype=np.int64).reshape(-1, 5).T.copy()
    q0, q1, k0, k1 = edges
    edge = np.full(len(area), UNBOUNDED)
    return windowed(area, q0, q1, k0, k1, -edge, edge)


@st.composite
def rectangles(draw: st.DrawFn) -> WindowedTiles:
    """Tiles with nothing hidden, in any order."""
    rows: list[tuple[int, ...]] = []
    begin = draw(st.sampled_from([0, 20]))  # 0: areas of the same keys
    k = disjoint(draw, 12, 4)
    for number in range(draw(st.integers(1, 3))):
        q, k = disjoint(draw, 12, 4), k if draw(st.booleans()) else disjoint(draw, 12, 4)
        most = draw(st.sampled_from([0, 3]))  # of four of them one is missing, or none
        rows += [
            (number, number * 20 + a, number * 20 + b, number * begin + c, number * begin + d)
            for (a, b), (c, d) in product(q, k)
            if not most or draw(st.integers(0, most))
        ]
    return full_tiles(draw(st.permutations(rows)))


@given(rectangles())
def test_strips(tiles: WindowedTiles) -> None:
    """The same pairs; each span of queries is in one segment, and neighbours with the same keys are in the same."""
    found = merge_dense(tiles)
    segments = segments_of(found)
    assert kernel_pairs(segments) == band_pairs(tiles)
    queries = sorted({row[1:3] for row in tiles.rows()})
    assert [row[1:] for row in found.q.rows()] == queries
    keys = {q: sorted(row[3:5] for row in tiles.rows() if row[1:3] == q) for q in queries}
    changes = sum(keys[a] != keys[b] for a, b in pairwise(queries))
    assert len(found) == (changes + 1 if queries else 0)


@given(ruled_tiles(), st.randoms(use_true_random=False))
def test_launches(drawn: Ruled, random: np.random.Generator) -> None:
    """The launches of tiles in any order have the same pairs as the tiles, and no row twice."""
    tiles, rule = drawn
    order = list(range(len(tiles)))
    random.shuffle(order)  # type: ignore[arg-type]
    tiles = tiles.take(np.array(order, dtype=np.int64))
    launches = tile_launches(tiles, rule)
    pairs = [kernel_pairs(segments_of(launch)) for launch in launches]
    assert sum(pairs, start=type(band_pairs(tiles))()) == band_pairs(tiles)
    for launch in launches:
        assert not list(rows_twice(launch))
        segments = segments_of(launch)
        assert [len(q) for _, q, _ in segments] == launch.q.lengths(len(launch)).tolist()
        assert [len(k) for _, _, k in segments] == launch.k.lengths(len(launch)).tolist()


@given(ruled_tiles())
def test_a_sequence_is_launched_as_if_it_were_alone(drawn: Ruled) -> None:
    """The same segments in the same order, so that its results have the same bits in every batch."""
    tiles, rule = drawn

    def of_area(area: int, of: WindowedTiles) -> list[Segment]:
        rows = {row for r in tiles.take(tiles.area == area).rows() for row in range(r[1], r[2])}
        return [s for launch in tile_launches(of, rule) for s in segments_of(launch) if s[1][0] in rows]

    for area in sorted(set(tiles.area.tolist())):
        assert of_area(area, tiles) == of_area(area, tiles.take(tiles.area == area))


@given(ruled_tiles())
def test_one_each(drawn: Ruled) -> None:
    tiles = drawn[0]
    tiles = drawn[0]
    assert kernel_pairs(segments_of(one_each(tiles))) == band_pairs(tiles)


def test_areas_that_share_rows_are_launched_apart() -> None:
    """Two areas of the same queries: their tiles never meet in one launch, as results are added by rows."""
    areas = Areas.of_rows([(0, 4, 0, 4, -UNBOUNDED, UNBOUNDED), (0, 4, 6, 9, -UNBOUNDED, UNBOUNDED)])
    tiles = with_windows(areas, Tiles.of_rows([(0, 0, 4, 0, 4, 0, 1), (1, 0, 2, 6, 9, 0, 1), (1, 2, 4, 6, 9, 0, 1)]))
    launches = tile_launches(tiles, WindowRule((-1, -1), 0))
    assert not any(list(rows_twice(launch)) for launch in launches)
    got = [kernel_pairs(segments_of(launch)) for launch in launches]
    assert sum(got, start=type(got[0])()) == band_pairs(tiles)


@st.composite
def stairs(draw: st.DrawFn) -> WindowedTiles:
    """Tiles of documents whose rows some ranks have in turn: one rank's queries, and the keys of one or more."""
    rows: list[tuple[int, ...]] = []
    areas: list[tuple[int, ...]] = []
    for number in range(draw(st.integers(1, 3))):
        cp_size, size, length = draw(st.integers(2, 4)), draw(st.sampled_from([1, 1, 1, 2])), draw(st.integers(0, 70))
        window, begin = draw(st.sampled_from([UNBOUNDED, UNBOUNDED, 30])), 100 * number
        queries, *keys = (draw(st.integers(0, cp_size - 1)) for _ in range(draw(st.integers(2, 3))))
        spans = [(n, begin + a, begin + min(a + size, length)) for n, a in enumerate(range(0, length, size))]
        areas.append((begin, begin + length, begin, begin + length, -window, 0))
        rows += [
            (number, *q, *k, 0, 1)
            for (m, *q), (n, *k) in product(spans, spans)
            if m % cp_size == queries and n % cp_size in keys
        ]
    return with_windows(Areas.of_rows(areas), Tiles.of_rows(rows))


@settings(max_examples=examples(100), deadline=None)
@given(stairs(), st.sets(st.sampled_from(["merge_causal", "factor_keys"])))
def test_stripes(tiles: WindowedTiles, off: set[str]) -> None:
    """Few launches have the pairs of many tiles, no row twice; those of a document do not depend on the others."""
    rule = WindowRule((-1, 0), 2048, disjoint=True)
    launches = tile_launches(tiles, rule, off)
    pairs = [kernel_pairs(segments_of(launch)) for launch in launches]
    assert sum(pairs, start=type(band_pairs(tiles))()) == band_pairs(tiles)
    assert not any(list(rows_twice(launch)) for launch in launches)
    for area in set(tiles.area.tolist()):
        alone = tile_launches(tiles.take(tiles.area == area), rule, off)
        here = {row for some in alone for segment in segments_of(some) for row in segment[1]}
        together = [s for some in launches for s in segments_of(some) if s[1][0] in here]
        assert together == [s for some in alone for s in segments_of(some)]


@pytest.mark.parametrize(
    ("comm", "window", "most"), [("p2p", UNBOUNDED, 8), ("p2p", 200, 9), ("all_gather", UNBOUNDED, 16)]
)
def test_the_work_for_stripes_does_not_grow_with_them(comm: str, window: int, most: int) -> None:
    """Twice as many rows, each a fragment, take as many calls of Python's and NumPy's functions."""

    def planned(tokens: int) -> tuple[int, int]:
        rows = Fragments.of_rows([(rank, n, n + 1, n // 8) for rank in range(8) for n in range(rank, tokens, 8)])
        areas = Areas.of_rows([(0, tokens, 0, tokens, -window, 0)])
        work = Workload(areas, Ownership(8, rows, rows))
        planners = {"p2p": plan_p2p_rank, "all_gather": plan_all_gather_rank}
        visibility = Visibility(work)
        calls = 0

        def count(*event: Any) -> None:
            nonlocal calls
            calls += event[1] in ("call", "c_call")

        sys.setprofile(count)
        try:
            forward, backward = planners[comm](visibility, 3)
            if comm == "all_gather":  # a rank has many pieces of the document
                forward, backward = (own_keys_first(visibility, 3, steps) for steps in (forward, backward))
            draft = lower(work, 3, forward, backward, (), WindowRule((-1, 0), 2048))
        finally:
            sys.setprofile(None)
        return calls, len(list(optimized(draft).programs.forward.of(Launch)))

    planned(80)  # Caches of classes and functions are then full.
    (few, launches), (many, more) = planned(480), planned(960)
    assert many < 1.3 * few, (few, many)
    assert launches <= more <= most
