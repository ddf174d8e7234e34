"""Is each line of a schedule well-formed? Errors that show in single lines, before messages are rehearsed: numbers
without a meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from numbers import Integral
from typing import TypeGuard, cast

import numpy as np

from cp_ref.schedules.areas import Areas
from cp_ref.schedules.problem import Workload
from cp_ref.schedules.schedule import KINDS, MOST_TAGS, RESULTS, Message, Schedule, Step, Tiles
from cp_ref.schedules.table import Column, Table

__all__ = [
    "malformed",
]


def malformed(work: Workload, schedule: Schedule, kinds: Collection[str] = KINDS) -> Iterator[str]:
    """One sentence for each message and tile that means nothing, and for sizes that are not the workload's. `kinds`:
    of messages; those of states go with scans.
    """
    if {schedule.cp_size, len(schedule.backward)} != {work.cp_size}:
        sizes = f"{schedule.cp_size} forward and {len(schedule.backward)} backward"
        yield f"the schedule has rank schedules for {sizes} ranks, but cp_size is {work.cp_size}"
        return
    if schedule.heads != (work.heads_q, work.heads_kv):
        yield f"the schedule is for {schedule.heads} heads, but there are {(work.heads_q, work.heads_kv)}"
        return
    if unknown := [kind for kind in schedule.saved if kind not in ("q", "kv")]:
        yield f"the schedule saves {', '.join(unknown)}; there is q and kv to save"
    for direction, rank, number, step in schedule.steps():
        for error in _step_errors(step, rank, work, schedule, kinds):
            yield f"{direction} rank {rank} step {number}: {error}"


def _step_errors(step: Step, rank: int, work: Workload, schedule: Schedule, kinds: Collection[str]) -> Iterator[str]:
    for name, table in (("tiles", step.tiles), ("scans", step.scans)):
        if not _is_table(table):
            yield f"the {name} are no columns of integers, equally long"
            return
    if len(step.scans) and kinds is KINDS:
        yield "a schedule of attention has no scans"
    for verb, messages in (("send", step.sends), ("recv", step.recvs)):
        for message in messages:
            if not _is_table(message.pieces):
                yield f"the pieces of a {verb} are no columns of integers, equally long"
            elif error := _message_error(message, rank, schedule, kinds):
                yield f"{schedule.message_text(message, verb)!r}: {error}"
    for tile, error in _wrong_tiles(step.tiles, work.areas, work.heads_q):
        yield f"{schedule.tile_text(tile)} {error}"


def _is_one_of(number: object, size: int) -> bool:
    return isinstance(number, Integral) and 0 <= int(number) < size


def _is_table(table: Table) -> bool:
    """Whether all columns are vectors of integers of 32 or 64 bits, of one length."""
    columns = [x for x in cast(tuple[object, ...], table.columns) if _is_column(x)]  # A user may have made them.
    return len(columns) == len(table.columns) and len({len(x) for x in columns}) == 1


def _is_column(x: object) -> TypeGuard[Column]:
    if not isinstance(x, np.ndarray):
        return False
    column = cast(Column, x)
    return column.ndim == 1 and column.dtype.kind == "i" and column.dtype.itemsize >= 4


def _message_error(message: Message, rank: int, schedule: Schedule, kinds: Collection[str]) -> str:
    """An error of one of the rank's messages, or nothing."""
    if message.kind not in kinds:
        return f"there is no kind {message.kind!r}"
    if not _is_one_of(message.peer, schedule.cp_size) or message.peer == rank:
        return f"rank {message.peer} is no peer"
    if not _is_one_of(message.tag, MOST_TAGS):
        return f"tag {message.tag} is not among 0:{MOST_TAGS}"
    if message.complete and message.kind not in RESULTS:
        return f"only {', '.join(RESULTS)} can be complete"
    pieces, heads = message.pieces, schedule.all_heads(message.kind)[1]
    if not len(pieces):
        return "it has no rows"
    if bool((pieces.start >= pieces.stop).any() or (pieces.start < 0).any()):
        return "a piece is empty, or begins before row 0"
    if bool(_no_heads(pieces.head_start, pieces.head_stop, heads).any()):
        return f"there are heads 0:{heads}"
    if len(pieces) == 1 or bool((pieces.start[1:] >= pieces.stop[:-1]).all()):  # Sorted and disjoint.
        return ""
    return "it has the same rows twice" if _overlap(*pieces.columns) else ""


def _overlap(start: Column, stop: Column, head_start: Column, head_stop: Column) -> bool:
    """Whether two boxes have a row and a head in common: boxes that do are found with others that begin between them.

    >>> _overlap(*(np.array(x) for x in ([0, 0, 4], [4, 4, 8], [0, 1, 0], [1, 2, 2])))
    False
    >>> _overlap(*(np.array(x) for x in ([0, 3, 4], [4, 4, 8], [0, 0, 0], [1, 2, 2])))
    True
    """
    # If two boxes have a head in common, the higher first head of both is one.
    for head in np.unique(head_start).tolist():
        here = (head_start <= head) & (head < head_stop)
        order = np.argsort(start[here], kind="stable")
        if bool((start[here][order][1:] < stop[here][order][:-1]).any()):
            return True
    return False


def _no_heads(start: Column, stop: Column, heads: int) -> Column:
    return (start < 0) | (start >= stop) | (stop > heads)


def _wrong_tiles(tiles: Tiles, areas: Areas, heads: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """Tiles that are not rectangles of an area, each with its error."""
    there = (tiles.area >= 0) & (tiles.area < len(areas))
    of = areas.take(np.where(there, tiles.area, 0)) if len(areas) else Areas.of_rows([[0] * 6] * len(tiles))
    empty = (tiles.q_start >= tiles.q_stop) | (tiles.k_start >= tiles.k_stop)
    outside = (tiles.q_start < of.q_start) | (tiles.q_stop > of.q_stop)
    outside |= (tiles.k_start < of.k_start) | (tiles.k_stop > of.k_stop)
    no_heads = _no_heads(tiles.head_start, tiles.head_stop, heads)
    rows = list(tiles.rows())
    for n in np.flatnonzero(~there | empty | outside | no_heads).tolist():
        area = str(of.take(slice(n, n + 1))).strip()
        if not there[n]:
            yield rows[n], f"is of no area: there are {len(areas)}"
        elif empty[n]:
            yield rows[n], "is empty"
        elif no_heads[n]:
            yield rows[n], f"has heads that are not among 0:{heads}"
        else:
            yield rows[n], f"reaches outside its area, {area}"
