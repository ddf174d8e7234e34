"""Tiles, segments and launches as sets of (query row, key row), and tiles to try them on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cp_fast.compile.program import Launch
from cp_fast.movers.mover_protocol import Rows
from cp_fast.tiles.segments import Segments, WindowedTiles, WindowRule, with_windows
from cp_ref.schedules.areas import UNBOUNDED, Areas
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import Tiles
from cp_ref.schedules.table import Spans

__all__ = [
    "Cells",
    "PairCounts",
    "Pairs",
    "Segment",
    "band_pairs",
    "disjoint",
    "kernel_pairs",
    "rows_of",
    "rows_twice",
    "ruled_tiles",
    "segments_of",
    "spans",
    "window_pairs",
]

PairCounts = Counter[tuple[int, int]]
Segment = tuple[tuple[int, int], list[int], list[int]]  # the window, -1 for unbounded; query rows; key rows


def band_pairs(tiles: WindowedTiles) -> PairCounts:
    """What is visible in tiles, by their diagonal bands."""
    found: PairCounts = Counter()
    for _, q0, q1, k0, k1, lo, hi, *_ in tiles.rows():
        found.update((i, j) for i, j in product(range(q0, q1), range(k0, k1)) if lo <= j - i <= hi)
    return found


def window_pairs(tiles: WindowedTiles) -> PairCounts:
    """What a kernel computes of tiles, by their windows."""
    rows = tiles.rows()
    return kernel_pairs(((row[7], row[8]), [*range(row[1], row[2])], [*range(row[3], row[4])]) for row in rows)


def kernel_pairs(segments: Iterable[Segment]) -> PairCounts:
    """What a kernel computes, by the rule of `VarlenBatch`; every row has to see a key."""
    found: PairCounts = Counter()
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
    """Tiles of several areas, which share no rows and no keys; tiles of an area share no pair. All areas have the
    problem's window, aligned anywhere, or any diagonal bands. In some of them queries and keys are cut alike, as the
    own chunks of a sequence are.
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
    return with_windows(Areas.of_rows(table), Tiles.of_rows(tiles)), rule


def rows_twice(launch: Segments) -> Iterator[int]:
    """Rows of queries that a launch has more than once, and rows of keys that a layer of it has more than once."""
    layer = np.zeros(len(launch), dtype=np.int64) if launch.layer is None else launch.layer
    for spans, number in ((launch.q, np.zeros_like(layer)), (launch.k, layer)):
        counted = Counter((int(number[n]), row) for n, a, b in spans.rows() for row in range(a, b))
        yield from (row for (_, row), times in counted.items() if times > 1)


# ---- Pairs
#
# Names of rows and heads, and how often each pair was computed into the cell of a result.


Names = np.ndarray  # [rows, heads]: row * number of heads + head


@dataclass
class Cells:
    """Cells of a buffer; in front of a stacked one's rows are its parts."""

    names: Names
    counts: np.ndarray | None = None  # [rows, heads, pairs], of results

    def of(self, rows: Any, first: int = 0, last: int | None = None, *, copied: bool = True) -> Cells:
        """Rows (or a part) and heads of these."""
        part = isinstance(rows, int)
        found = [x if x is None else x[rows] if part else x[rows][:, first:last] for x in (self.names, self.counts)]
        names, counts = (x.copy() if x is not None and copied else x for x in found)
        assert names is not None
        return Cells(names, counts)


@dataclass(frozen=True)
class Pairs:
    """The pairs of a problem: what is visible, whether a sink is, and how many counts a cell has by kind of result."""

    work: Workload
    visible: np.ndarray
    sink: bool
    sizes: dict[str, int]

    @staticmethod
    def of(work: Workload, *, sink: bool) -> Pairs:
        """Those of a workload."""
        areas = work.areas
        keys, queries = (int(x.max(initial=0)) for x in (areas.k_stop, areas.q_stop))
        visible = np.zeros((queries, keys), dtype=np.int64)
        for q0, q1, k0, k1, lo, hi in areas.rows():
            diagonal = np.arange(k0, k1)[None] - np.arange(q0, q1)[:, None]
            visible[q0:q1, k0:k1] += (lo <= diagonal) & (diagonal <= hi)
        return Pairs(work, visible, sink, {"out": keys + 1, "dq": keys, "dkv": queries * work.heads_q})

    def nothing(self, kind: str, names: Names) -> Cells:
        """Cells into which nothing was computed."""
        if kind not in self.sizes:
            return Cells(names)
        return Cells(names, np.zeros((*names.shape, self.sizes[kind]), dtype=np.int64))

    def add_sink(self, into: Cells, rows: np.ndarray) -> None:
        """Count the sink in rows of out."""
        assert into.counts is not None
        into.counts[rows, :, -1] += into.names[rows] >= 0

    def check_whole(self, kind: str, cells: Cells) -> None:
        """All that is visible of these cells is there, once."""
        assert cells.counts is not None
        on_kv = kind == "dkv"
        heads = self.work.heads_kv if on_kv else self.work.heads_q
        for row, head in np.argwhere(cells.names >= 0).tolist():
            name = int(cells.names[row, head])
            if on_kv:
                want = np.zeros((len(self.visible), self.work.heads_q), dtype=np.int64)
                if name // heads < self.visible.shape[1]:
                    group = slice(name % heads * self.work.heads_per_kv, (name % heads + 1) * self.work.heads_per_kv)
                    want[:, group] = self.visible[:, name // heads, None]
            else:
                want = np.zeros(self.sizes[kind], dtype=np.int64)
                if name // heads < len(self.visible):
                    want[: self.visible.shape[1]] = self.visible[name // heads]
                if kind == "out":
                    want[-1] = self.sink
            assert cells.counts[row, head].tolist() == want.ravel().tolist(), f"{kind} of row {name // heads}"

    def of_launch(self, launch: Launch[Rows], operands: list[Names], *, padded: bool) -> tuple[Cells, Cells]:
        """What a launch computes: out or dq, and dkv. `padded`: operands may have rows behind the last segment. Rows of
        queries between segments have no name: nothing is computed for them.
        """
        (q, kv, *others), s = operands, launch.batch
        heads, heads_kv = self.work.heads_q, self.work.heads_kv
        rows, keys = ([b - a for a, b in pairwise(cumulative)] for cumulative in (s.cu_q, s.cu_kv))
        used = np.zeros(len(q), dtype=bool)
        for a, size in zip(s.first_rows[0], rows, strict=True):
            assert not used[a : a + size].any()
            used[a : a + size] = True
        q = np.where(used[:, None], q, -1) if s.starts else q
        live_q, live_kv = (q[used], kv) if s.starts else (q[: s.cu_q[-1]], kv[: s.cu_kv[-1]])
        assert (s.device_cu_q.tolist(), s.device_cu_kv.tolist()) == (list(s.cu_q), list(s.cu_kv))
        assert padded or s.starts or (len(q), len(kv)) == (len(live_q), len(live_kv))
        for names in (live_q, live_kv):
            assert (names >= 0).all(), "a launch reads what is not there"
        for names in others:
            assert (names[: len(live_q)] == live_q).all(), "rows of other queries"
        rows_q = np.array(rows_of(launch.q_rows))
        assert (live_q[:, 0] // heads).tolist() == (rows_q[used] if s.starts else rows_q).tolist()
        assert (live_kv[:, 0] // heads_kv).tolist() == rows_of(launch.kv_rows)
        assert len(np.unique(live_q)) == live_q.size, "a row of queries twice in one launch"
        assert (live_q % heads == launch.first_head + np.arange(q.shape[1])).all()
        shared = q.shape[1] // kv.shape[1]  # the kernel's rule: so many query heads use one kv head
        by_q = np.zeros((*q.shape, self.sizes["out" if len(operands) == 2 else "dq"]), dtype=np.int64)
        by_kv = np.zeros((*kv.shape, self.sizes["dkv"]), dtype=np.int64)
        if s.starts:
            given = (
                s.starts.device_q[:-1],
                s.starts.device_rows,
                s.starts.device_kv[:-1],
                s.starts.device_columns,
            )
            assert [x.tolist() for x in given] == [list(s.starts.q), rows, list(s.starts.kv), keys]
        for a, c, size_q, size_kv in zip(*s.first_rows, rows, keys, strict=True):
            diagonal = np.arange(size_kv)[None] - np.arange(size_q)[:, None] - (size_kv - size_q)
            seen = np.ones_like(diagonal, dtype=bool)
            seen &= diagonal >= -s.left if s.left is not None else True
            seen &= diagonal <= s.right if s.right is not None else True
            assert seen.any(axis=1).all(), "a row that sees nothing"
            for i, j in np.argwhere(seen).tolist():
                for h in range(q.shape[1]):
                    query, key = int(q[a + i, h]), int(kv[c + j, h // shared])
                    assert query % heads // self.work.heads_per_kv == key % heads_kv, "another head's keys"
                    by_q[a + i, h, key // heads_kv] += 1
                    by_kv[c + j, h // shared, query] += 1
        return Cells(q, by_q), Cells(kv, by_kv)


def rows_of(spans: Spans) -> list[int]:
    """The rows of spans, one by one."""
    return [row for a, b in zip(spans.start.tolist(), spans.stop.tolist(), strict=True) for row in range(a, b)]
