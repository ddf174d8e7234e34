"""Where rows go when every sequence is shifted by some rows inside itself.

shifts -1, dual_chunk of sequences of 4 and 3 on 2 ranks     a row takes what lay one row behind it
rank 0: a0 a3 b0 b2  ->  a1 -- b1 --     a1 and b1 come from rank 1; -- has no row behind it
rank 1: a1 a2 b1  0  ->  a2 a3 b2 --     a3 and b2 come from rank 0
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ref.spec.layouts.cuts import Cut
from cp_ref.spec.tables.table import Column

__all__ = ["Roll", "roll_of"]


@dataclass(frozen=True, eq=False)
class Roll:
    """One rank's share of a roll.

    Attributes:
        sends: for every rank, itself included, the rows of this rank's slice that it takes.
        recvs: for every rank, itself included, the rows of the result that take its rows; in the order of its sends.
        most: the rows that any rank sends to any other.
    """

    sends: tuple[Column, ...]
    recvs: tuple[Column, ...]
    most: int


def roll_of(cut: Cut, starts: Column, shifts: int, rank: int) -> Roll:
    """The roll of a slice.

    Args:
        starts: where each sequence begins among the rows that are cut, and where the last ends, [b + 1].
        shifts: how many rows each row moves on; negative: back.

    >>> from cp_ref.spec.tables.ownership import dual_chunk
    >>> cut = Cut(dual_chunk(np.array([0, 4, 7]), 2), 2, "thd", 7, 4)
    >>> roll = roll_of(cut, np.array([0, 4, 7]), -1, 0)
    >>> [x.tolist() for x in roll.sends], [x.tolist() for x in roll.recvs]
    ([[], [1, 3]], [[], [0, 2]])
    """
    rows = [cut.of(r) for r in range(cut.cp_size)]
    holder = np.zeros(sum(map(len, rows)), dtype=np.int64)
    place = np.zeros_like(holder)
    for r, own in enumerate(rows):
        holder[own], place[own] = r, np.arange(len(own))
    sequence = np.searchsorted(starts, np.arange(len(holder)), side="right") - 1  # after all of them: b
    edges = np.append(starts, len(holder))

    def taken_by(receiver: int) -> tuple[Column, Column]:
        """(rows of its result, the lined-up rows that they take)."""
        own = rows[receiver]
        source, n = own - shifts, sequence[own]
        there = (n < len(starts) - 1) & (source >= edges[n]) & (source < edges[n + 1])
        return np.flatnonzero(there), source[there]

    taken = [taken_by(r) for r in range(cut.cp_size)]
    counts = [np.bincount(holder[source], minlength=cut.cp_size) for _, source in taken]
    most = max(int(np.delete(count, r).max(initial=0)) for r, count in enumerate(counts))
    sends = tuple(place[source[holder[source] == rank]] for _, source in taken)
    into, source = taken[rank]
    return Roll(sends, tuple(into[holder[source] == r] for r in range(cut.cp_size)), most)
