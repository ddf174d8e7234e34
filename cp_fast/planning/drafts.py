"""A rank's program before its tables are uploaded: rows and lengths are slices or keys of `Tables`.

The fields are those of `cp_fast.program`, which these become.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cp_fast.planning.loops.base import Tiles
from cp_fast.planning.tables import Key, RowKey, Tables

__all__ = ["DraftGive", "DraftLaunch", "DraftStep", "DraftTake", "draft_launch"]


@dataclass(frozen=True, slots=True)
class DraftGive:
    """See `Give`."""

    peer: int
    tag: int
    rows: RowKey
    own: bool


@dataclass(frozen=True, slots=True)
class DraftTake:
    """See `Take`."""

    peer: int
    tag: int
    size: int
    rows: RowKey
    home: bool


@dataclass(frozen=True, slots=True)
class DraftLaunch:
    """See `Launch`."""

    q_rows: RowKey
    out_rows: RowKey
    kv_rows: RowKey
    grad_rows: RowKey
    left: int | None
    right: int | None
    cu_q: Key
    cu_kv: Key
    bounds: tuple[int, int] | None = None  # of the lengths of segments, where these are to be replaced by others


@dataclass(slots=True)
class DraftStep:
    """See `KVStep`."""

    give_kv: list[DraftGive] = field(default_factory=list)
    take_kv: list[DraftTake] = field(default_factory=list)
    give_dkv: list[DraftGive] = field(default_factory=list)
    take_dkv: list[DraftTake] = field(default_factory=list)
    launches: list[DraftLaunch] = field(default_factory=list)
    own: bool = False
    grad_size: int = 0


def draft_launch(tables: Tables, window: tuple[int | None, int | None], tiles: Tiles) -> DraftLaunch:
    """A launch of tiles, each of them a segment."""
    q_rows, kv_rows = tables.spans(tiles.q), tables.spans(tiles.kv)
    return DraftLaunch(
        q_rows=q_rows,
        out_rows=q_rows,
        kv_rows=kv_rows,
        grad_rows=kv_rows if tiles.grad is None else tables.spans(tiles.grad),
        left=window[0],
        right=window[1],
        cu_q=tables.sums(tiles.cu_q),
        cu_kv=tables.sums(tiles.cu_kv),
    )
