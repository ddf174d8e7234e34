"""The schedule of a linear layer's states: who sends the map of which fragment to whom, and the order of composition.

Forward, the map of a fragment goes to every other rank that holds a later fragment of its document. Backward, the map
of the state's gradient goes to every other rank that holds an earlier one. The messages do not depend on
`cp_comm_type`, except that a pair of groups (`a2a+p2p`) forwards what goes to another row and column.

    one document of 8 tokens, dual_chunk, cp_size 2: fragments [0:2] and [6:8] of rank 0, [2:6] of rank 1

    rank 0   [0:2] --state--.              .--> [6:8]        state [6:8] = map [2:6] after map [0:2]
    rank 1                  '--> [2:6] --state               state [2:6] = map [0:2]

An associative scan over chunks (Blelloch, 1990), spread over ranks as in LASP-2 (Sun et al., 2025) and in the
context-parallel form of flash-linear-attention; here for any fragments of any documents.
"""

from __future__ import annotations

import numpy as np

from cp_ref.spec.linear.deliveries import HEADS, Deliveries, delivered
from cp_ref.spec.linear.document_fragments import DocumentFragments, document_fragments
from cp_ref.spec.tables.problem import Problem
from cp_ref.spec.tables.schedule import RankSchedule, Scans, Schedule, Step
from cp_ref.spec.tables.table import Column, ranges

__all__ = ["make_rank_states", "make_states"]


def make_states(problem: Problem) -> Schedule:
    """The schedule of states of all ranks, for `verify_states`, and to be printed.

    >>> from cp_ref.spec.tables.problem import Sequence
    >>> one = Problem(2, (Sequence(8, 8, 8, 8),), qkv_format="thd")
    >>> print(str(make_states(one)).split("backward")[0].strip())
    schedule state cp_size 2 heads 1/1 saved -
    forward rank 0
      step
        send state [0:2] to 1 tag 0
        recv state [2:6] from 1 tag 0
      step
        scan 0 [0:2] [2:6] [6:8]
    forward rank 1
      step
        send state [2:6] to 0 tag 0
        recv state [0:2] from 0 tag 0
      step
        scan 0 [0:2] [2:6]
    """
    fragments = document_fragments(problem)
    found = [_of_rank(problem, fragments, rank) for rank in range(problem.cp_size)]
    return Schedule("state", HEADS, tuple(f for f, _ in found), tuple(b for _, b in found))


def make_rank_states(problem: Problem, rank: int) -> tuple[RankSchedule, RankSchedule]:
    """One rank's forward and backward schedule, as in `make_states`."""
    return _of_rank(problem, document_fragments(problem), rank)


def _of_rank(problem: Problem, fragments: DocumentFragments, rank: int) -> tuple[RankSchedule, RankSchedule]:
    forwards = problem.cp_comm_type == "a2a+p2p"  # what others send to others too
    a2a_size, ranks = (problem.a2a_size, None) if forwards else (1, rank)
    back = fragments.take(slice(None, None, -1))
    return (
        (*delivered(_readers(fragments, ranks), rank, "state", a2a_size), Step(scans=_scans(fragments, rank))),
        (*delivered(_readers(back, ranks), rank, "dstate", a2a_size), Step(scans=_scans(back, rank))),
    )


def _readers(fragments: DocumentFragments, rank: int | None) -> Deliveries:
    """The ranks that each fragment's map goes to: those with a fragment behind it in the table's order.

    rank: of this rank's messages alone; None for all.
    """
    if not len(fragments):
        return Deliveries.of_rows([])
    pair = fragments.document * (int(fragments.rank.max()) + 1) + fragments.rank
    _, from_end = np.unique(pair[::-1], return_index=True)
    last = np.sort(len(fragments) - 1 - from_end)  # the last fragment of each rank in each document
    document, begin, count = np.unique(fragments.document[last], return_index=True, return_counts=True)
    sent = np.arange(len(fragments)) if rank is None else np.flatnonzero(fragments.rank == rank)
    here = np.searchsorted(document, fragments.document[sent])
    fragment, reader = np.repeat(sent, count[here]), last[ranges(begin[here], count[here])]
    if rank is not None:
        others = np.flatnonzero(fragments.rank != rank)
        fragment = np.append(fragment, others)
        reader = np.append(reader, _last_of(fragments, rank)[fragments.document[others]])
    later = reader > fragment
    fragment, reader = fragment[later], reader[later]
    return Deliveries(
        fragments.rank[fragment], fragments.rank[reader], fragments.start[fragment], fragments.stop[fragment]
    )


def _scans(fragments: DocumentFragments, rank: int) -> Scans:
    """The maps that a rank composes: of each document up to its own last fragment in the table's order."""
    last = _last_of(fragments, rank)
    some = fragments.take(np.arange(len(fragments)) <= last[fragments.document])
    return Scans(some.document, some.start, some.stop)


def _last_of(fragments: DocumentFragments, rank: int) -> Column:
    """The place in the table of a rank's last fragment of each document; -1 where it has none."""
    own = np.flatnonzero(fragments.rank == rank)
    last = np.full(int(fragments.document.max(initial=-1)) + 1, -1)
    last[fragments.document[own]] = own  # of equal documents the last counts
    return last
