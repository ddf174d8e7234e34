"""Linear layers on integers: fragments of documents, the messages of their states, and halos of convolutions.

A linear layer carries a state from token to token of a document. The rows of a fragment act on it as one affine map,
`S -> M S + B`, whatever their number. So a rank sends the maps of its fragments to the ranks that hold later fragments
of the document. Each of those composes the maps in the order of the document, and has the state that enters its own
fragments. In the backward pass the state's gradient goes the other way, by maps of the same form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cp_ref.schedules.problem import Problem, Workload, areas_of
from cp_ref.schedules.schedule import Message, Pieces, RankPasses, RankSchedule, Scans, Schedule, Step, Tiles
from cp_ref.schedules.table import Column, Spans, Table, constant, ranges, runs

__all__ = [
    "ALL_HEADS",
    "HEADS",
    "Deliveries",
    "DocumentFragments",
    "brought_back",
    "conv_rank_schedule",
    "conv_schedule",
    "conv_workload",
    "delivered",
    "document_fragments",
    "make_rank_states",
    "make_states",
]

HEADS = (1, 1)  # of a schedule: the heads of a linear layer travel together, and count as one
ALL_HEADS = (0, 1)


@dataclass(frozen=True, eq=False)
class Deliveries(Table):
    """Global rows [start, stop) that rank `reader` needs and rank `source` has."""

    source: Column
    reader: Column
    start: Column
    stop: Column


def delivered(needs: Deliveries, rank: int, kind: str, a2a_size: int) -> RankSchedule:
    """One rank's messages that bring the rows to their readers, step by step.

    >>> needs = Deliveries.of_rows([(0, 3, 4, 6), (0, 2, 4, 6)])
    >>> for step in delivered(needs, 2, "state", a2a_size=2):
    ...     for message in (*step.recvs, *step.sends):
    ...         print(message.peer, list(message.pieces.rows()))
    0 [(4, 6, 0, 1)]
    3 [(4, 6, 0, 1)]
    """
    steps: list[Step] = []
    for number, hop in enumerate(_hops(needs, a2a_size)):
        sends = _messages(kind, number, hop.take(hop.source == rank), "reader")
        steps.append(Step(sends, _messages(kind, number, hop.take(hop.reader == rank), "source")))
    return tuple(steps)


def brought_back(needs: Deliveries, rank: int, a2a_size: int) -> RankSchedule:
    """The messages of `delivered` backwards: gradients of the rows that were read go to the rows' owner."""
    there = delivered(needs, rank, "dkv", a2a_size)
    return tuple(Step(step.recvs, step.sends) for step in reversed(there))


def _hops(needs: Deliveries, a2a_size: int) -> list[Deliveries]:
    """The ways between two ranks that have a group in common, step by step; a step without any is left out."""
    between = needs.reader // a2a_size * a2a_size + needs.source % a2a_size
    hops = (needs.source, between), (between, needs.reader)
    found = [_distinct(Deliveries(*hop, needs.start, needs.stop)) for hop in hops]
    return [hop for hop in found if len(hop)]


def _distinct(needs: Deliveries) -> Deliveries:
    """The deliveries from rank to rank, each row once: sorted by source, reader and row. Spans that overlap are one."""
    needs = needs.take(needs.source != needs.reader)
    needs = needs.take(np.lexsort((needs.start, needs.reader, needs.source)))
    if not len(needs):
        return needs
    apart = (needs.source[1:] != needs.source[:-1]) | (needs.reader[1:] != needs.reader[:-1])
    shift = np.append(0, np.cumsum(apart)) * int(needs.stop.max())  # so that spans of other pairs of ranks lie behind
    end = np.maximum.accumulate(needs.stop + shift)
    new = np.append(True, apart | (needs.start[1:] + shift[1:] >= end[:-1]))
    last = np.append(new[1:], True)
    return Deliveries(needs.source[new], needs.reader[new], needs.start[new], (end - shift)[last])


def _messages(kind: str, number: int, rows: Deliveries, peer: str) -> tuple[Message, ...]:
    """One message for each rank in the column `peer`. Both ends have its pieces in the order of the rows."""
    rows = rows.take(np.argsort(getattr(rows, peer), kind="stable"))
    peers: Column = getattr(rows, peer)
    found: list[Message] = []
    for first, count in zip(*runs(peers[1:] != peers[:-1], len(peers)), strict=True):
        of_peer = slice(int(first), int(first + count))
        pieces = Pieces.of(Spans(rows.start[of_peer], rows.stop[of_peer]), ALL_HEADS)
        found.append(Message(kind, int(peers[first]), number, pieces))
    return tuple(found)


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

    @property
    def spans(self) -> Spans:
        """The rows of the global buffer."""
        return Spans(self.start, self.stop)

    def of(self, rank: int) -> DocumentFragments:
        """The fragments of one rank."""
        return self.take(self.rank == rank)


def document_fragments(problem: Problem) -> DocumentFragments:
    """The fragments of all documents. A document is a sequence of the problem, without its padding; a document without
    tokens has no fragment.

    >>> from cp_ref.schedules.problem import Sequence
    >>> two = Problem(2, (Sequence(4, 4, 4, 4), Sequence(3, 3, 4, 4)), qkv_format="thd")
    >>> list(document_fragments(two).rows())          # (document, place, rank, start, stop, row)
    [(0, 0, 0, 0, 1, 0), (0, 1, 1, 1, 3, 0), (0, 2, 0, 3, 4, 1), (1, 0, 0, 4, 5, 2), (1, 1, 1, 5, 7, 2)]
    """
    rows = problem.workload.ownership.q.sorted()
    first = np.array(problem.starts_q[:-1], dtype=np.int64)
    last = first + np.array(problem.lengths.len_q, dtype=np.int64)
    some = np.flatnonzero(first < last)
    n, span, start, stop = rows.spans.overlaps(Spans(first[some], last[some]))
    document, rank = some[span], rows.rank[n]
    row = rows.row[n] + start - rows.start[n]

    together = (document[1:] == document[:-1]) & (rank[1:] == rank[:-1])
    together &= row[1:] == row[:-1] + stop[:-1] - start[:-1]  # the rows of a document follow on each other
    begins, ends = np.append(True, ~together)[: len(n)], np.append(~together, True)[: len(n)]
    document = document[begins]
    place = np.arange(len(document)) - np.searchsorted(document, document)
    return DocumentFragments(document, place, rank[begins], start[begins], stop[ends], row[begins])


def make_states(problem: Problem) -> Schedule:
    """The schedule of states of all ranks, for `verify_states`, and to be printed.

    >>> from cp_ref.schedules.problem import Sequence
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
    found = [_states_of_rank(problem, fragments, rank) for rank in range(problem.cp_size)]
    return Schedule("state", HEADS, tuple(f for f, _ in found), tuple(b for _, b in found))


def make_rank_states(problem: Problem, rank: int) -> RankPasses:
    """One rank's forward and backward schedule, as in `make_states`."""
    return _states_of_rank(problem, document_fragments(problem), rank)


def _states_of_rank(problem: Problem, fragments: DocumentFragments, rank: int) -> RankPasses:
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


def conv_workload(problem: Problem, kernel_size: int) -> Workload:
    """The tables of a causal convolution: the window of each document, and the problem's ownership."""
    windows = replace(problem, window_size=(kernel_size - 1, 0), attn_mask_type="causal", areas=None)
    return Workload(areas_of(windows), problem.workload.ownership)


def conv_schedule(problem: Problem, kernel_size: int) -> Schedule:
    """The schedule of all ranks, for `verify_tables(conv_workload(problem, kernel_size), ...)`.

    >>> from cp_ref.schedules.problem import Sequence
    >>> one = Problem(2, (Sequence(8, 8, 8, 8),), layout="contiguous", qkv_format="thd")
    >>> print(str(conv_schedule(one, 3)).split("forward rank 1")[1].split("forward")[0].split("backward")[0].strip())
    step
        recv kv [2:4] from 0 tag 0
      step
        tile 0 q[4:8] k[2:4]
        tile 0 q[4:8] k[4:8]
    """
    fragments = document_fragments(problem)
    found = [_halos_of_rank(problem, fragments, kernel_size, rank) for rank in range(problem.cp_size)]
    return Schedule("halo", HEADS, tuple(f for f, _ in found), tuple(b for _, b in found), ("kv",))


def conv_rank_schedule(problem: Problem, kernel_size: int, rank: int) -> RankPasses:
    """One rank's forward and backward schedule, as in `conv_schedule`."""
    return _halos_of_rank(problem, document_fragments(problem), kernel_size, rank)


def _halos_of_rank(problem: Problem, fragments: DocumentFragments, kernel_size: int, rank: int) -> RankPasses:
    a2a_size = problem.a2a_size if problem.cp_comm_type == "a2a+p2p" else 1
    reader, source, start, stop = _read(fragments, kernel_size, fragments.start)
    needs = Deliveries(fragments.rank[source], fragments.rank[reader], start, stop)
    tiles = Step(tiles=_tiles(fragments, kernel_size, rank))
    return (
        (*delivered(needs, rank, "kv", a2a_size), tiles),
        (tiles, *brought_back(needs, rank, a2a_size)),
    )


def _read(fragments: DocumentFragments, kernel_size: int, stop: Column) -> tuple[Column, Column, Column, Column]:
    """The rows of each fragment's document from `kernel_size - 1` before the fragment to `stop`: (number of the
    fragment, number of the fragment that has the rows, start, stop).
    """
    first = fragments.start[fragments.place == 0][np.unique(fragments.document, return_inverse=True)[1]]
    start = np.maximum(fragments.start - min(kernel_size - 1, int(stop.max(initial=0))), first)
    return Spans(start, stop).overlaps(fragments.spans)


def _tiles(fragments: DocumentFragments, kernel_size: int, rank: int) -> Tiles:
    """A rank's tiles: its fragments' rows, of the rows that they read. Documents without tokens have no area."""
    reader, _, start, stop = _read(fragments, kernel_size, fragments.stop)
    own = fragments.rank[reader] == rank
    reader, start, stop = reader[own], start[own], stop[own]
    area = np.unique(fragments.document, return_inverse=True)[1][reader]
    heads = (constant(head, start) for head in ALL_HEADS)
    return Tiles(area, fragments.start[reader], fragments.stop[reader], start, stop, *heads)
