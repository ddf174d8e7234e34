"""Tiles, segments and launches as sets of (query row, key row), and tiles to try them on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np
from hypothesis import strategies as st

from cp_fast.compile.row_spans import Spans
from cp_fast.compile.segments import Segments, WindowedTiles, WindowRule, with_windows
from cp_ref.schedules.attention_slices import UNBOUNDED, AttentionSlices
from cp_ref.schedules.schedule import Tiles

__all__ = [
    "Segment",
    "band_pairs",
    "disjoint",
    "kernel_pairs",
    "rows_twice",
    "ruled_tiles",
    "segments_of",
    "spans",
    "window_pairs",
]

Pairs = Counter[tuple[int, int]]
Segment = tuple[tuple[int, int], list[int], list[int]]  # the window, -1 for unbounded; query rows; key rows


def band_pairs(tiles: WindowedTiles) -> Pairs:
    """What is visible in tiles, by their diagonal bands."""
    found: Pairs = Counter()
    for _, q0, q1, k0, k1, lo, hi, *_ in tiles.rows():
        found.update((i, j) for i, j in product(range(q0, q1), range(k0, k1)) if lo <= j - i <= hi)
    return found


def window_pairs(tiles: WindowedTiles) -> Pairs:
    """What a kernel computes of tiles, by their windows."""
    rows = tiles.rows()
    return kernel_pairs(((row[7], row[8]), [*range(row[1], row[2])], [*range(row[3], row[4])]) for row in rows)


def kernel_pairs(segments: Iterable[Segment]) -> Pairs:
    """What a kernel computes, by the rule of `cp_fast.backends.Segments`; every row has to see a key."""
    found: Pairs = Counter()
    for (left, right), q, k in segments:
        assert q
        assert k
        corner = len(k) - len(q)
        seen = [
            (i, j)
            for i, j in product(range(len(q)), range(len(k)))
            if (left < 0 or j >= i + corner - left) and (right < 0 or j <= i + corner + right)
        ]
        assert {i for i, _ in seen} == {*range(len(q))}, "a row sees nothing"
        found.update((q[i], k[j]) for i, j in seen)
    return found


def segments_of(what: Segments) -> list[Segment]:
    """Segments with their rows."""
    windows = list(zip(what.left.tolist(), what.right.tolist(), strict=True))
    sides: list[list[list[int]]] = [[[] for _ in windows] for _ in range(2)]
    for side, spans in zip(sides, (what.q, what.k), strict=True):
        for number, start, stop in spans.rows():
            side[number].extend(range(start, stop))
    return list(zip(windows, *sides, strict=True))


def disjoint(draw: st.DrawFn, end: int, most: int, least: int = 0) -> list[tuple[int, int]]:
    """Sorted spans of [0, end) that have no row in common, some of them touching."""
    edges = draw(st.lists(st.integers(0, end), min_size=least + 1, max_size=most + 1, unique=True))
    pieces = list(zip(sorted(edges), sorted(edges)[1:], strict=False))
    keep = draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    return [piece for piece, there in zip(pieces, keep, strict=True) if there or least]


@st.composite
def spans(draw: st.DrawFn, end: int = 30, most: int = 6) -> Spans:
    """Sorted spans of rows without common rows."""
    found = np.array(disjoint(draw, end, most), dtype=np.int64).reshape(-1, 2)
    return Spans(found[:, 0].copy(), found[:, 1].copy())


@st.composite
def ruled_tiles(draw: st.DrawFn) -> tuple[WindowedTiles, WindowRule]:
    """Tiles of several attention slices, which share no rows and no keys; tiles of an attention slice share no pair.
    All attention slices have the problem's window, aligned anywhere, or any diagonal bands. In some of them queries and
    keys are cut alike, as the own chunks of a sequence are.
    """
    window = draw(st.one_of(st.none(), st.sampled_from([(-1, 0), (-1, -1), (0, 0), (2, 0), (3, 1), (1, -1)])))
    table: list[tuple[int, ...]] = []
    tiles: list[tuple[int, ...]] = []
    q_begin, k_begin = 0, 0
    for number in range(draw(st.integers(1, 3))):
        size, diagonal = draw(st.integers(1, 12)), k_begin - q_begin
        size_k = size if draw(st.booleans()) else draw(st.integers(1, 12))
        if draw(st.booleans()):
            diagonal += draw(st.sampled_from([size_k - size, -1, 1, 3]))
        left, right = window or (draw(st.integers(-1, 6)), draw(st.integers(-1, 6)))
        lo = -UNBOUNDED if left < 0 else diagonal - left
        hi = UNBOUNDED if right < 0 else diagonal + right
        table.append((q_begin, q_begin + size, k_begin, k_begin + size_k, lo, hi))
        q_spans = disjoint(draw, size, 3, least=1)
        k_spans = q_spans if size_k == size and draw(st.booleans()) else disjoint(draw, size_k, 3, least=1)
        for (q0, q1), (k0, k1) in product(q_spans, k_spans):
            if draw(st.integers(0, 7)):
                tiles.append((number, q_begin + q0, q_begin + q1, k_begin + k0, k_begin + k1, 0, 1))
        q_begin += size + draw(st.integers(0, 2))
        k_begin += size_k + draw(st.integers(0, 2))
    rule = WindowRule(window or (-1, -1), draw(st.sampled_from([0, 3, 6, 2048])))
    return with_windows(AttentionSlices.of_rows(table), Tiles.of_rows(tiles)), rule


def rows_twice(launch: Segments) -> Iterator[int]:
    """Rows of queries that a launch has more than once, and rows of keys that a layer of it has more than once."""
    layer = np.zeros(len(launch), dtype=np.int64) if launch.layer is None else launch.layer
    for spans, number in ((launch.q, np.zeros_like(layer)), (launch.k, layer)):
        counted = Counter((int(number[n]), row) for n, a, b in spans.rows() for row in range(a, b))
        yield from (row for (_, row), times in counted.items() if times > 1)
