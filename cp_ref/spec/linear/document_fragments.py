"""The fragments of each document, in the order of its tokens: who holds which part of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ref.spec.tables.problem import Problem
from cp_ref.spec.tables.table import Column, Table, overlaps

__all__ = ["DocumentFragments", "document_fragments"]


@dataclass(frozen=True, eq=False)
class DocumentFragments(Table):
    """Real tokens [start, stop) of a document, rows of the global buffer, that lie together at `row` of the buffer of
    `rank`. `place` counts the fragments of a document from 0. Sorted by document, then by place.
    """

    document: Column
    place: Column
    rank: Column
    start: Column
    stop: Column
    row: Column

    def of(self, rank: int) -> DocumentFragments:
        """The fragments of one rank."""
        return self.take(self.rank == rank)


def document_fragments(problem: Problem) -> DocumentFragments:
    """The fragments of all documents. A document is a sequence of the problem, without its padding; a document without
    tokens has no fragment.

    >>> from cp_ref.spec.tables.problem import Sequence
    >>> two = Problem(2, (Sequence(4, 4, 4, 4), Sequence(3, 3, 4, 4)), qkv_format="thd")
    >>> list(document_fragments(two).rows())          # (document, place, rank, start, stop, row)
    [(0, 0, 0, 0, 1, 0), (0, 1, 1, 1, 3, 0), (0, 2, 0, 3, 4, 1), (1, 0, 0, 4, 5, 2), (1, 1, 1, 5, 7, 2)]
    """
    rows = problem.workload.ownership.q.sorted()
    first = np.array(problem.starts_q[:-1], dtype=np.int64)
    last = first + np.array(problem.lengths.len_q, dtype=np.int64)
    some = np.flatnonzero(first < last)
    n, span, start, stop = overlaps(rows.start, rows.stop, first[some], last[some])
    document, rank = some[span], rows.rank[n]
    row = rows.row[n] + start - rows.start[n]

    together = (document[1:] == document[:-1]) & (rank[1:] == rank[:-1])
    together &= row[1:] == row[:-1] + stop[:-1] - start[:-1]  # the rows of a document follow on each other
    begins, ends = np.append(True, ~together)[: len(n)], np.append(~together, True)[: len(n)]
    document = document[begins]
    place = np.arange(len(document)) - np.searchsorted(document, document)
    return DocumentFragments(document, place, rank[begins], start[begins], stop[ends], row[begins])
