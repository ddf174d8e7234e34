"""Compressed keys on integers: windows of tokens, who owns them, who sees them, and the tokens that each is made of.

A **window** is `rate` tokens of a document that follow one another. Windows are counted from the document's first
token. An **entry** is the one key that is made of a window. A window that is not full gives none.

    two documents of 9 and 3 tokens, rate 4      a a a a b b b b .   . . .      two entries, a and b, of the first one
    the entries that its queries see             0 0 0 1 1 1 1 2 2

So query t sees entry w iff (w + 1) * rate <= t + 1: once the last token of the window is not behind the query. The
rank that holds this token owns the entry. The rows of the entries' global buffer are all entries, document after
document. A rank's own buffer has its entries in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_ref.schedules.areas import UNBOUNDED, Areas
from cp_ref.schedules.ownership import Fragments, Ownership
from cp_ref.schedules.problem import Problem, Sequences, Workload
from cp_ref.schedules.table import Column, Table, constant, ranges, runs

__all__ = ["EntryProblem", "EntryTable", "entries_of", "entry_problem", "window_workload"]


@dataclass(frozen=True, eq=False)
class EntryTable(Table):
    """All entries of a batch, in the order of their global buffer.

    Attributes:
        document, number: which window of which document it is made of.
        start: the window's first token, a row of the tokens' global buffer.
        rank: its owner.
    """

    document: Column
    number: Column
    start: Column
    rank: Column

    @property
    def fragments(self) -> Fragments:
        """The owners of the rows of the entries' global buffer."""
        first, count = runs(self.rank[1:] != self.rank[:-1], len(self))
        order = np.argsort(self.rank[first], kind="stable")
        first, count = first[order], count[order]
        rank, before = self.rank[first], np.cumsum(count) - count
        return Fragments(rank, first, first + count, before - before[np.searchsorted(rank, rank)])


def entries_of(problem: Problem, rate: int) -> EntryTable:
    """The entries of a batch of tokens.

    >>> from cp_ref.schedules.problem import Sequence
    >>> two = Problem(2, (Sequence(9, 9, 9, 9), Sequence(3, 3, 3, 3)), layout="contiguous", qkv_format="thd")
    >>> list(entries_of(two, 4).rows())          # rank 0 has tokens 0 to 5 of the first document
    [(0, 0, 0, 0), (0, 1, 4, 1)]
    """
    count = np.array(problem.lengths.len_q, dtype=np.int64) // rate
    document, number = np.repeat(np.arange(len(count)), count), ranges(np.zeros_like(count), count)
    start = np.array(problem.starts_q, dtype=np.int64)[document] + rate * number
    owned = problem.workload.ownership.q.sorted()
    rank = owned.rank[np.searchsorted(owned.start, start + rate - 1, side="right") - 1]
    return EntryTable(document, number, start, rank)


def seen_from(start: Column, rate: int) -> Column:
    """The first query that sees each window: that of its last token."""
    return start + rate - 1


@dataclass(frozen=True)
class EntryProblem(Problem):
    """Attention of a batch of tokens to its entries: `sequences` have them as keys, without padding.

    Attributes:
        rate: tokens of a window.
        tokens: the batch, with queries and keys of equal lengths.
    """

    rate: int = 1
    tokens: Problem | None = None

    @cached_property
    def entries(self) -> EntryTable:
        """Its keys."""
        assert self.tokens is not None
        return entries_of(self.tokens, self.rate)

    @cached_property
    def workload(self) -> Workload:
        """The tables: each entry, and all before it, are seen by the `rate` queries from its last token on."""
        assert self.tokens is not None
        held, owners = self.entries, self.tokens.workload.ownership
        first = np.array(self.starts_kv, dtype=np.int64)[held.document]
        end = np.array(self.starts_q, dtype=np.int64)[:-1] + np.array(self.lengths.len_q, dtype=np.int64)
        begin = seen_from(held.start, self.rate)
        areas = Areas(
            begin,
            np.minimum(begin + self.rate, end[held.document]),
            first,
            first + held.number + 1,
            constant(-UNBOUNDED, begin),
            constant(UNBOUNDED, begin),
        )
        ownership = Ownership(self.cp_size, owners.q, held.fragments)
        return Workload(areas, ownership, self.heads_q, self.heads_kv, self.a2a_size)


def entry_problem(problem: Problem, rate: int) -> EntryProblem:
    """Attention of a batch's tokens to its entries, made once for each rate.

    >>> from cp_ref.schedules.problem import Sequence
    >>> of = entry_problem(Problem(1, (Sequence(9, 9, 9, 9),), qkv_format="thd"), 4)
    >>> print(of.workload.areas, end="")
    area q[3:7] k[0:1] band *:*
    area q[7:9] k[0:2] band *:*
    """
    known: dict[int, EntryProblem] = vars(problem).setdefault("entry_problems", {})
    if (found := known.get(rate)) is None:
        tokens, slots = problem.lengths.len_q, problem.lengths.slots_q
        entries = [length // rate for length in tokens]
        options = {name: getattr(problem, name) for name in _COMMON}
        sequences = Sequences(tokens, entries, slots, entries)
        found = known[rate] = EntryProblem(sequences=sequences, rate=rate, tokens=problem, **options)
    return found


_COMMON = (
    *("cp_size", "cp_comm_type", "a2a_size", "layout", "qkv_format", "heads_q", "heads_kv", "d_qk", "d_v"),
    *("softmax_scale", "softmax_type", "dtype"),
)


def window_workload(problem: Problem, rate: int, *, overlap: bool) -> Workload:
    """Which tokens an entry is made of: the entries are the queries here, and the tokens the keys.

    overlap: an entry reads the window before its own too, if there is one.

    >>> from cp_ref.schedules.problem import Sequence
    >>> one = Problem(1, (Sequence(9, 9, 9, 9),), qkv_format="thd")
    >>> print(window_workload(one, 4, overlap=True).areas, end="")
    area q[0:1] k[0:4] band *:*
    area q[1:2] k[0:8] band *:*
    """
    of = entry_problem(problem, rate)
    held, ownership = of.entries, of.workload.ownership
    row = np.arange(len(held))
    before = np.where(held.number > 0, rate, 0) if overlap else 0
    edges = constant(-UNBOUNDED, row), constant(UNBOUNDED, row)
    areas = Areas(row, row + 1, held.start - before, held.start + rate, *edges)
    return Workload(areas, Ownership(problem.cp_size, ownership.kv, ownership.q))
