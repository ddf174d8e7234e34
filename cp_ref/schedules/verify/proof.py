"""Proof by integers that a schedule computes its problem: no tensor, no float, no knowledge of how it was planned.

`verify` plays the schedule on sets of rows. Every rank starts with what it owns; messages are matched in order
between each pair of ranks and cost a rendezvous, as on a real wire. A result never vanishes: it is at a rank, or in a
message that has met its receive. So where every pair is computed once and no result ends anywhere but at its owner,
every share is in its owner's sum. (Results carry the name of a tile that they come from, for error messages alone.)

It finds

    a pair computed twice or never          a receive without a send, a send without a receive
    an operand that is not there            messages that do not agree
    a result that does not reach its owner  a result that is marked complete and is not
    a deadlock

and names rank and step of each. A schedule without an error gets a report: work, balance and bytes. `verify_tables`
knows only the three tables: attention slices, ownership and the schedule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import TypeGuard, cast

import numpy as np

from cp_ref.schedules.attention_slices import AttentionSlices
from cp_ref.schedules.problem import Problem, Workload
from cp_ref.schedules.schedule import KINDS, MOST_TAGS, RESULTS, Message, Pieces, Schedule, Step, Tiles, side_of
from cp_ref.schedules.table import Column, Table
from cp_ref.schedules.verify.costs import Report, report
from cp_ref.schedules.verify.coverage import Pair, coverage_errors, grids
from cp_ref.schedules.verify.rehearsal import Rehearsal, Store

__all__ = [
    "InvalidSchedule",
    "malformed",
    "verify",
    "verify_tables",
]

# ---- well-formed tables
#
# Errors that show in single lines of a schedule, before messages are played: numbers without a meaning.


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


def _wrong_tiles(tiles: Tiles, areas: AttentionSlices, heads: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """Tiles that are not rectangles of an attention slice, each with its error."""
    there = (tiles.area >= 0) & (tiles.area < len(areas))
    of = areas.take(np.where(there, tiles.area, 0)) if len(areas) else AttentionSlices.of_rows([[0] * 6] * len(tiles))
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


_MOST_ERRORS = 20

Place = Callable[[str, int], str]  # (side, row) -> its place in words of sequences; may be empty.


class InvalidSchedule(ValueError):
    """The schedule does not compute its problem. `errors` has one sentence for each finding."""

    def __init__(self, errors: list[str]) -> None:
        self.errors = errors
        more = [f"... and {len(errors) - _MOST_ERRORS} more"] if len(errors) > _MOST_ERRORS else []
        super().__init__("\n".join(["the schedule is wrong:", *errors[:_MOST_ERRORS], *more]))


def verify(problem: Problem, schedule: Schedule) -> Report:
    """Check that `schedule` computes `problem`, forward and backward.

    Returns:
        The costs: for every rank tokens, tiles, visible pairs and bytes, and the balance.

    Raises:
        InvalidSchedule: with every finding.
    """

    def place(side: str, row: int) -> str:
        starts = problem.starts(side)
        seq = bisect_right(starts, row) - 1
        return f"position {row - starts[seq]} of sequence {seq}"

    verify_tables(problem.workload, schedule, place)
    return report(problem, schedule)


def verify_tables(work: Workload, schedule: Schedule, place: Place = lambda side, row: "") -> None:
    """Check that `schedule` computes all attention slices of `work`, each row starting and ending at its owner.

    Args:
        place: (side, row) -> words for a row in addition to its number, such as "position 3 of sequence 0".

    Raises:
        InvalidSchedule: with every finding.
    """
    if errors := list(malformed(work, schedule)):
        raise InvalidSchedule(errors)
    names, sides = _Names(work, place), grids(work.ownership, schedule)
    owned = [
        {side: grid.owned(work.ownership.side(side).of(rank)) for side, grid in sides.items()}
        for rank in range(work.cp_size)
    ]

    def starts(*kinds: str) -> list[Store]:
        return [{kind: cells[side_of(kind)].copy() for kind in kinds} for cells in owned]

    forward = Rehearsal("forward", schedule, sides, starts("q", "kv"), names.rows)
    forward.run()
    begin = starts("q", "kv", "do")
    for store, had in zip(begin, forward.has, strict=True):
        for kind in schedule.saved:
            store[kind] |= had[kind]
    backward = Rehearsal("backward", schedule, sides, begin, names.rows)
    backward.run()
    for rehearsal in (forward, backward):
        errors += rehearsal.errors
        if not rehearsal.stuck:
            errors += _coverage(work, rehearsal, names)
            errors += _misplaced(rehearsal, owned, names)
            errors += rehearsal.contributions.errors(schedule, owned, names.rows)
    if errors:
        raise InvalidSchedule(errors)


@dataclass(frozen=True)
class _Names:
    """Rows in words, by their number and by the caller's words."""

    work: Workload
    place: Place

    def rows(self, kind: str, start: int, stop: int) -> str:
        """Rows of a kind of operand or result."""
        first = self.place(side_of(kind), start)
        return f"{kind} [{start}:{stop}]{first and f' (from {first} on)'}"

    def row(self, side: str, row: int) -> str:
        """One row."""
        place = self.place(side, row)
        return f"row {row}{place and f' ({place})'}"

    def owner(self, side: str, row: int) -> str:
        """The owner in words."""
        fragments = self.work.ownership.side(side)
        owners = fragments.rank[(fragments.start <= row) & (row < fragments.stop)].tolist()
        return f"rank {owners[0]}" if owners else "nobody"


def _coverage(work: Workload, rehearsal: Rehearsal, names: _Names) -> Iterator[str]:
    """Pairs that are computed twice or never."""

    def name(pair: Pair) -> str:
        heads = f" of heads {pair.head_start}:{pair.head_stop}"
        some = heads if (pair.head_start, pair.head_stop) != (0, work.heads_q) else ""
        query, key = names.row("q", pair.q), names.row("kv", pair.k)
        return f"{rehearsal.name}: area {pair.area}, query {query}, key {key}{some}"

    def holders(pair: Pair) -> str:
        """The ranks that have a pair's query and key, and the step at which the key arrives."""
        queries = work.ownership.q
        ranks: list[int] = queries.rank[(queries.start <= pair.q) & (pair.q < queries.stop)].tolist()
        steps = [
            f"rank {rank} step {number}"
            for rank in ranks
            for number, step in enumerate(rehearsal.ranks[rank].rank_schedule)
            if any(m.kind == "kv" and _has(m.pieces, pair.k) for m in step.recvs)
        ]
        met = f"; the key arrives during {', '.join(steps)}" if steps else ""
        return f"query of {names.owner('q', pair.q)}, key of {names.owner('kv', pair.k)}{met}"

    return coverage_errors(work.areas, work.heads_q, rehearsal.uses, name, holders)


def _has(pieces: Pieces, row: int) -> bool:
    return bool(((pieces.start <= row) & (row < pieces.stop)).any())


def _misplaced(rehearsal: Rehearsal, owned: list[dict[str, Column]], names: _Names) -> Iterator[str]:
    """Every result has to end at the rank that owns its rows."""
    uses = rehearsal.uses
    for rank, results in enumerate(rehearsal.results):
        for kind, tiles in results.items():
            grid = rehearsal.grids[side_of(kind)]
            wrong = np.flatnonzero((tiles >= 0) & ~owned[rank][side_of(kind)])
            said: set[tuple[int, int]] = set()  # Heads that share a row are one finding.
            for cell in wrong.tolist():
                start, stop = grid.rows_of(cell)
                if (start, stop) not in said:
                    said.add((start, stop))
                    yield (
                        f"{rehearsal.name} rank {rank} step {len(rehearsal.ranks[rank].rank_schedule)}: ends with "
                        f"{names.rows(kind, start, stop)} of {uses.where(int(tiles[cell]))}, "
                        "which belongs to another rank"
                    )
