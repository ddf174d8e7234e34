"""The schedule of a causal convolution: each rank receives the rows before its fragments that their outputs read.

It is a schedule of attention, with the window `(kernel_size - 1, 0)` in every document: rows of x are its keys, and the
gradients of rows that were received go back to their owner. So `verify_tables` proves it. All messages travel at once,
since every rank receives straight from the owners; a pair of groups (`a2a+p2p`) forwards them in a second step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cp_ref.spec.linear.deliveries import ALL_HEADS, HEADS, Deliveries, brought_back, delivered
from cp_ref.spec.linear.document_fragments import DocumentFragments, document_fragments
from cp_ref.spec.tables.problem import Problem
from cp_ref.spec.tables.schedule import RankSchedule, Schedule, Step, Tiles
from cp_ref.spec.tables.table import Column, constant, overlaps
from cp_ref.spec.tables.workload import Workload, areas_of

__all__ = ["halo_workload", "make_halo", "make_rank_halo"]


def halo_workload(problem: Problem, kernel_size: int) -> Workload:
    """The tables of a causal convolution: the window of each document, and the problem's ownership."""
    windows = replace(problem, window_size=(kernel_size - 1, 0), attn_mask_type="causal", areas=None)
    return Workload(areas_of(windows), problem.workload.ownership)


def make_halo(problem: Problem, kernel_size: int) -> Schedule:
    """The schedule of all ranks, for `verify_tables(halo_workload(problem, kernel_size), ...)`.

    >>> from cp_ref.spec.tables.problem import Sequence
    >>> one = Problem(2, (Sequence(8, 8, 8, 8),), layout="contiguous", qkv_format="thd")
    >>> print(str(make_halo(one, 3)).split("forward rank 1")[1].split("forward")[0].split("backward")[0].strip())
    step
        recv kv [2:4] from 0 tag 0
      step
        tile 0 q[4:8] k[2:4]
        tile 0 q[4:8] k[4:8]
    """
    fragments = document_fragments(problem)
    found = [_of_rank(problem, fragments, kernel_size, rank) for rank in range(problem.cp_size)]
    return Schedule("halo", HEADS, tuple(f for f, _ in found), tuple(b for _, b in found), ("kv",))


def make_rank_halo(problem: Problem, kernel_size: int, rank: int) -> tuple[RankSchedule, RankSchedule]:
    """One rank's forward and backward schedule, as in `make_halo`."""
    return _of_rank(problem, document_fragments(problem), kernel_size, rank)


def _of_rank(
    problem: Problem, fragments: DocumentFragments, kernel_size: int, rank: int
) -> tuple[RankSchedule, RankSchedule]:
    a2a_size = problem.a2a_size if problem.cp_comm_type == "a2a+p2p" else 1
    reader, source, start, stop = _read(fragments, kernel_size, fragments.start)
    needs = Deliveries(fragments.rank[source], fragments.rank[reader], start, stop)
    tiles = Step(tiles=_tiles(fragments, kernel_size, rank))
    return (
        (*delivered(needs, rank, "kv", a2a_size), tiles),
        (tiles, *brought_back(needs, rank, "dkv", a2a_size)),
    )


def _read(fragments: DocumentFragments, kernel_size: int, stop: Column) -> tuple[Column, Column, Column, Column]:
    """The rows of each fragment's document from `kernel_size - 1` before the fragment to `stop`: (number of the
    fragment, number of the fragment that has the rows, start, stop).
    """
    first = fragments.start[fragments.place == 0][np.unique(fragments.document, return_inverse=True)[1]]
    start = np.maximum(fragments.start - min(kernel_size - 1, int(stop.max(initial=0))), first)
    return overlaps(start, stop, fragments.start, fragments.stop)


def _tiles(fragments: DocumentFragments, kernel_size: int, rank: int) -> Tiles:
    """A rank's tiles: its fragments' rows, of the rows that they read. Documents without tokens have no area."""
    reader, _, start, stop = _read(fragments, kernel_size, fragments.stop)
    own = fragments.rank[reader] == rank
    reader, start, stop = reader[own], start[own], stop[own]
    area = np.unique(fragments.document, return_inverse=True)[1][reader]
    heads = (constant(head, start) for head in ALL_HEADS)
    return Tiles(area, fragments.start[reader], fragments.stop[reader], start, stop, *heads)
