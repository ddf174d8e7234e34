"""Proof by integers that a schedule computes its problem: no tensor, no float, no knowledge of how it was planned.

`verify` rehearses the schedule on sets of rows. Every rank starts with what it owns; messages are matched in order
between each pair of ranks and cost a rendezvous, as on a real wire. A result never vanishes: it is at a rank, or in a
message that has met its receive. So where every pair is computed once and no result ends anywhere but at its owner,
every share is in its owner's sum. (Results carry the name of a tile that they come from, for error messages alone.)

It finds

    a pair computed twice or never          a receive without a send, a send without a receive
    an operand that is not there            messages that do not agree
    a result that does not reach its owner  a result that is marked complete and is not
    a deadlock

and names rank and step of each. A schedule without an error gets a report: work, balance and bytes. `verify_tables`
knows only the three tables: areas, ownership and the schedule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from cp_ref.schedules.problem import Problem, Workload
from cp_ref.schedules.schedule import Pieces, Schedule, side_of
from cp_ref.schedules.table import Column
from cp_ref.schedules.verify.costs import Report, report
from cp_ref.schedules.verify.coverage import Pair, coverage_errors, grids
from cp_ref.schedules.verify.rehearsal import Rehearsal, Store
from cp_ref.schedules.verify.well_formed import malformed

__all__ = [
    "InvalidSchedule",
    "verify",
    "verify_tables",
]

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
    """Check that `schedule` computes all areas of `work`, each row starting and ending at its owner.

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
