"""Which results of a plan have the bits of one launch over the whole batch on one GPU: a proof on its launches.

A row's result has them if one segment of one launch has all keys that the row sees, in the order of the document, and
begins with the first key of the row's area, or a whole number of blocks behind it. Then a kernel meets the same keys in
the same blocks. Neighbouring rows and documents do not matter, and nothing is added to the result. For example, one
document of 16 tokens over two ranks, on rank 1:

    all_gather    queries [4:12), keys [0:12)                          the row's keys, from the first one on
    p2p           queries [4:12), keys [4:12); then the same, [0:4)    two partial results, which are added

A gradient has them only where out and lse have them, from which it is computed. A gradient of keys has them where a
segment also has all queries that see the keys, of one area: in a2a.

The proof knows nothing of schedules: it reads the launches of this rank's programs, and the areas of the problem.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cp_fast.compile.program import BufferSpec, Launch, Program, Programs, Recv
from cp_ref.schedules.areas import Areas
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.table import Column, Spans, ranges, runs, starts_of

__all__ = [
    "from_first_keys",
    "same_bits",
]


def same_bits(programs: Programs[Any], problem: Problem, *, deterministic: bool, key_block: int) -> tuple[str, ...]:
    """The results, of "out", "lse", "dq", "dk" and "dv", that have the bits of one launch over all areas.

    Args:
        programs: of one rank, with their batches on the host.
        problem: the packed one.
        deterministic: whether backward launches give equal bits in every run; else no gradient has them.
        key_block: of the kernel library (`Backend`).
    """
    areas = problem.workload.areas
    if not areas.queries.disjoint or not from_first_keys(problem):
        return ()
    forward = _judged(programs.forward, areas, key_block)
    repeats = deterministic and forward.rows  # Gradients are computed from out and lse.
    backward = _judged(programs.backward, areas, key_block) if repeats else _Judged(False, False)
    received = (programs.backward.buffers[one.buffer] for one in programs.backward.of(Recv))
    added = not areas.keys.disjoint or any(map(_is_added, received))
    found = ("out", "lse") if forward.rows else ()
    return (*found, *(("dq",) if backward.rows else ()), *(("dk", "dv") if backward.keys and not added else ()))


def _is_added(received: BufferSpec) -> bool:
    """Whether what arrives is a share of dk and dv: other ranks have queries that see the keys."""
    return received.kind == "dkv" and not received.parts


def from_first_keys(problem: Problem) -> bool:
    """Whether all areas begin with the first key of a sequence. If nobody sees that one, they do not."""
    if problem.areas is not None:
        return True  # One launch over areas has a segment for each.
    return bool(np.isin(problem.workload.areas.k_start, starts_of(problem.lengths.slots("kv"))).all())


class _Judged(NamedTuple):
    """Whether all segments of a pass have all keys of their rows, and all rows of their keys too."""

    rows: bool
    keys: bool


def _judged(program: Program[Any], areas: Areas, key_block: int) -> _Judged:
    """Judge each piece of queries of each segment by the area that it lies in."""
    by_rows = areas.take(np.argsort(areas.q_start, kind="stable"))
    rows = keys = True
    for launch in program.of(Launch):
        found = _segments(launch)
        if found is None:
            return _Judged(False, False)
        q, k = found
        area = np.searchsorted(by_rows.q_start, q.start, side="right") - 1
        a = by_rows.take(np.maximum(area, 0))
        inside = (area >= 0) & (q.stop <= a.q_stop)
        start, stop = k.start[q.segment], k.stop[q.segment]
        # The first of its rows sees keys from here on, the last one up to there.
        first_key, last_key = q.start + a.lo, np.minimum(a.k_stop, q.stop + a.hi)
        whole = (start == a.k_start) | ((start <= first_key) & ((start - a.k_start) % key_block == 0))
        rows = rows and bool((inside & whole & (stop >= last_key)).all())
        # The queries that see any key of the area.
        first_query, last_query = np.maximum(a.q_start, a.k_start - a.hi), np.minimum(a.q_stop, a.k_stop - a.lo)
        keys = keys and rows and bool(((q.start <= first_query) & (q.stop >= last_query)).all())
    return _Judged(rows, keys)


class _Pieces(NamedTuple):
    """Consecutive global rows [start, stop), and the segment that has them."""

    segment: Column
    start: Column
    stop: Column


def _segments(launch: Launch[Any]) -> tuple[_Pieces, _Pieces] | None:
    """The global rows of each segment's queries, in one piece or several, and of its keys. None: the keys of a segment
    are not consecutive.
    """
    batch, rows = launch.batch, (launch.q_rows, launch.kv_rows)
    q, k = map(_pieces, rows, (batch.cu_q, batch.cu_kv), batch.first_rows)
    return (q, k) if np.array_equal(k.segment, np.arange(len(batch.cu_kv) - 1)) else None


def _pieces(spans: Spans, cumulative: Any, first_rows: Any) -> _Pieces:
    """The global rows of segments that begin at these rows of a buffer; `spans` are the buffer's global rows."""
    size, first = np.diff(np.asarray(cumulative)), np.asarray(first_rows)
    begin, count = runs(spans.start[1:] != spans.stop[:-1], len(spans))  # Spans that touch are one.
    start = spans.start[begin]
    length = spans.stop[begin + count - 1] - start
    row = np.cumsum(length) - length
    n, last = (np.searchsorted(row, x, side="right") - 1 for x in (first, first + size - 1))
    segment, span = np.repeat(np.arange(len(n)), last - n + 1), ranges(n, last - n + 1)
    low = np.maximum(row[span], first[segment])
    high = np.minimum(row[span] + length[span], (first + size)[segment])
    return _Pieces(segment, start[span] + low - row[span], start[span] + high - row[span])
