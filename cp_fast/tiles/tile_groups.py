"""A step's tiles by heads, as launches.

Results are cached by tiles: both passes of the usual schedule have the same tiles, and so have the head chunks of an
a2a schedule, for other heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cp_fast.compile.index_tables import Key, Tables
from cp_fast.compile.program import Heads
from cp_fast.passes import names_of
from cp_fast.tiles.launches import SharedKeys, share_keys, sort_keys, tile_launches
from cp_fast.tiles.row_spans import Placement, SpanSets
from cp_fast.tiles.segments import Segments, WindowedTiles, WindowRule, with_windows
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import Tiles
from cp_ref.schedules.table import Spans, one_value

__all__ = [
    "LaunchRows",
    "SegmentKeys",
    "TileGroup",
    "TileGroups",
]

_MOST_TILES = 2048  # Of more tiles it takes seconds to find out which queries see the same keys.
_MOST_EMPTY = 1.05  # All rows of a launch's tiles over those with a query. More costs what a launch less saves.


class SegmentKeys(NamedTuple):
    """A launch's segments on the host: keys of cumulative lengths, and the window. `bounds`: in a plan updated in
    place, upper bounds of the lengths of q and kv. `starts`: keys of first rows and of lengths, of q and then of kv,
    where segments are not packed one after the other.
    """

    cu_q: Key
    cu_kv: Key
    left: int | None
    right: int | None
    bounds: tuple[int, int] | None = None
    starts: tuple[Key, Key, Key, Key] | None = None


@dataclass(frozen=True, eq=False)
class LaunchRows:
    """A launch: its segments, their lengths as keys, and the global rows of its queries and keys, segment after
    segment.

    Attributes:
        layers: the rows of keys again, in parts without repeated rows.
        apart: where the queries lie in the launch's tensors, and the global rows of all rows of these, between queries
            any ones; None where the tensors have the queries alone, one after the other.
    """

    segments: Segments
    batch: SegmentKeys
    q: Spans
    kv: Spans
    layers: tuple[Placement, ...]
    apart: tuple[Placement, Spans] | None = None

    @property
    def made_by(self) -> str:
        """The compiler passes that made it."""
        return ", ".join(names_of(int(np.bitwise_or.reduce(self.segments.made_by)))) or "lower"

    def rows(self, kind: str) -> Spans:
        """The rows of a kind of operands."""
        return self.kv if kind == "kv" else self.q


class TileGroup(NamedTuple):
    """Tiles of the same query heads, which share a kernel's launches; and the kv heads of these query heads.
    `sharing`: the same launches or fewer, whose segments lie anywhere and may have common keys; or None.
    """

    heads: Heads
    kv_heads: Heads
    tiles: WindowedTiles
    launches: list[LaunchRows]
    sharing: list[Segments] | None

    def heads_of(self, kind: str) -> Heads:
        """The heads of a kind of operands."""
        return self.kv_heads if kind == "kv" else self.heads

    def rows(self, kind: str) -> Spans:
        """The rows of a kind of operands, tile after tile: some of them more than once."""
        t = self.tiles
        return Spans(t.k_start, t.k_stop) if kind == "kv" else Spans(t.q_start, t.q_stop)


class TileGroups:
    """The tiles of a rank's steps. skipped: the compiler passes that do not run. shared_keys_tile: see `Backend`."""

    def __init__(
        self,
        work: Workload,
        rule: WindowRule,
        tables: Tables,
        sets: SpanSets,
        skipped: Collection[str] = (),
        *,
        shared_keys_tile: int = 0,
    ) -> None:
        a = work.areas
        self._skipped, self._shared_keys_tile = skipped, shared_keys_tile
        self._rule = rule._replace(disjoint=a.queries.disjoint and a.keys.disjoint)
        self._work, self._tables, self._sets = work, tables, sets
        self._in_order: dict[tuple[LaunchRows, Placement], LaunchRows] = {}
        self._groups: dict[int, tuple[Tiles, list[TileGroup]]] = {}  # By the tiles' id.
        self._launches: dict[tuple[int, ...], tuple[Tiles, _Launched]] = {}  # By their columns' ids.

    def of(self, tiles: Tiles) -> list[TileGroup]:
        """A step's tiles."""
        if id(tiles) not in self._groups:
            self._groups[id(tiles)] = tiles, list(self._new_groups(tiles))
        return self._groups[id(tiles)][1]

    def _new_groups(self, tiles: Tiles) -> Iterator[TileGroup]:
        ranges, size = _head_ranges(tiles), self._work.heads_per_kv
        for heads in ranges:
            some = tiles
            if len(ranges) > 1:
                some = tiles.take((tiles.head_start == heads[0]) & (tiles.head_stop == heads[1]))
            launched = self._launched(some)
            for part in aligned(heads, size):
                if len(launched[0]):
                    yield TileGroup(part, (part[0] // size, -(-part[1] // size)), *launched)

    def _launched(self, tiles: Tiles) -> _Launched:
        """Tiles with their diagonal bands, for any heads, and their launches."""
        rectangles = tuple(map(id, tiles.columns[:5]))  # The cached tiles keep these columns alive.
        if rectangles not in self._launches:
            banded = with_windows(self._work.areas, tiles)
            packed = tile_launches(banded, self._rule, self._skipped)
            sharing = packed if self._shared_keys_tile else None
            if self._shared_keys_tile and len(packed) > 1 and (self._rule.disjoint or len(banded) <= _MOST_TILES):
                fewer = tile_launches(banded, self._rule, self._skipped, shared_keys=True)
                sharing = fewer if len(fewer) < len(packed) and self._fills_tiles(fewer) else packed
            self._launches[rectangles] = tiles, (banded, list(map(self._launch, packed)), sharing)
        return self._launches[rectangles][1]

    def _fills_tiles(self, launches: list[Segments]) -> bool:
        """Whether tiles, which end with their segment, have few empty rows: weighted by the keys that they visit."""
        size, tile = self._work.heads_per_kv, self._shared_keys_tile
        cells = whole = 0
        for one in launches:
            rows, keys = (side.lengths(len(one)) for side in (one.q, one.k))
            cells += int((rows * size * keys).sum())
            whole += int((-(-rows * size // tile) * tile * keys).sum())
        return whole <= _MOST_EMPTY * cells

    def _launch(self, segments: Segments) -> LaunchRows:
        count, layer = len(segments), segments.layer
        cu_q, cu_kv = (self._tables.lengths(side.lengths(count)) for side in (segments.q, segments.k))
        left, right = (None if side[0] < 0 else int(side[0]) for side in (segments.left, segments.right))
        q, kv = (self._sets.of(side.start, side.stop) for side in (segments.q, segments.k))
        if layer is None:
            layers = (self._sets.packed(kv),)
        else:
            layer = layer[segments.k.segment]
            each = [np.flatnonzero(layer == n) for n in range(int(layer.max()) + 1)]
            layers = tuple(Placement(Spans(kv.start[some], kv.stop[some]), kv.begin[some]) for some in each)
        return LaunchRows(segments, SegmentKeys(cu_q, cu_kv, left, right), q, kv, layers)

    def sharing(self, group: TileGroup, q: Placement, kv: Placement) -> list[LaunchRows] | None:
        """The launches with common keys of a group, on buffers with these rows. None where rows do not lie together."""
        made = None if group.sharing is None else share_keys(group.sharing, q, kv)
        return made if made is None else list(map(self._sharing, made))

    def _sharing(self, one: SharedKeys) -> LaunchRows:
        segments = one.segments
        rows, keys = (side.lengths(len(segments)) for side in (segments.q, segments.k))
        columns = np.append(one.start_q, 0), rows, np.append(one.start_kv, 0), keys
        of_q, of_q_rows, of_kv, of_keys = map(self._tables.numbers_of, columns)
        batch = self._launch(replace(segments, layer=None)).batch._replace(starts=(of_q, of_q_rows, of_kv, of_keys))
        q, kv = (self._sets.of(side.start, side.stop) for side in (one.q.spans, one.kv))
        return LaunchRows(segments, batch, q, kv, (self._sets.packed(kv),), (Placement(q, one.q.row), one.rows_q))

    def in_buffer_order(self, launch: LaunchRows, rows: Placement) -> LaunchRows:
        """The launch with its keys in the best order to read from this buffer."""
        if "sort_keys" in self._skipped:
            return launch
        if (launch, rows) not in self._in_order:
            segments = sort_keys(launch.segments, rows, launch.kv)
            self._in_order[launch, rows] = launch if segments is launch.segments else self._launch(segments)
        return self._in_order[launch, rows]


_Launched = tuple[WindowedTiles, list[LaunchRows], list[Segments] | None]


def _head_ranges(tiles: Tiles) -> list[Heads]:
    """The ranges of heads that tiles have."""
    first, last = tiles.head_start, tiles.head_stop
    if len(tiles) and one_value(first) and one_value(last):
        return [(int(first[0]), int(last[0]))]
    return sorted({*zip(first.tolist(), last.tolist(), strict=True)})


def aligned(heads: Heads, heads_per_kv: int) -> list[Heads]:
    """Query heads as ranges for a kernel: all query heads of some kv heads, or some of one kv head.

    >>> aligned((1, 7), 2), aligned((0, 8), 4), aligned((1, 3), 4)
    ([(1, 2), (2, 6), (6, 7)], [(0, 8)], [(1, 3)])
    """
    first, last = heads
    begin, end = -(-first // heads_per_kv) * heads_per_kv, last // heads_per_kv * heads_per_kv
    if begin > end:  # inside one group
        return [heads]
    return list(pairwise(sorted({first, begin, end, last})))
