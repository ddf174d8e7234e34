"""When a rank attends to its own keys: first, while the others travel, or later, with those that arrive."""

from __future__ import annotations

import numpy as np

from cp_fast.compile.machine import costs
from cp_fast.passes import is_on
from cp_ref.schedules.areas import Areas
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import RankPasses, RankSchedule, Step, Tiles
from cp_ref.schedules.table import Column, Spans
from cp_ref.schedules.verify.costs import message_bytes, tile_pairs

__all__ = ["choose_own_first", "own_keys_first", "own_keys_wait"]

# ---- Own keys first
#
# All_gather attends to all keys of a query at once (`cp_ref.schedules.planners.all_gather`), behind its messages. Own
# keys first is the other way: the own keys of a query attend while the others travel, and the two partial results are
# added in float32. It hides all messages, and costs a launch and the sums. So it runs where it is faster, or where rows
# have several segments of keys anyway:
#
# - in the backward pass: the sums of dq cost less there than more segments for nested keys do (0.988 of the kernel
#   alone on two H200s; with all keys at once its launches alone reach 0.96);
# - where a query sees keys of several areas, or a rank has many short pieces of a document: these are tiles for few
#   rows of queries each, and their own keys make causal squares;
# - in a plan that is updated in place: it has the same launches for every batch.
#
# With `deterministic=True` dq has the bits of one GPU wherever it can. There the first does not count.


_MOST_PIECES = 4  # Of a document on one rank: each is a launch of the backward pass.


def choose_own_first(problem: Problem, *, deterministic: bool = False, in_place: bool = False) -> tuple[str, ...]:
    """The passes of all_gather in which own keys attend first; the same on all ranks.

    >>> from cp_ref.schedules.problem import Sequence
    >>> one = (Sequence(64, 64, 64, 64),)
    >>> problem = Problem(2, one, "all_gather")
    >>> choose_own_first(problem), choose_own_first(problem, deterministic=True)
    (('backward',), ())
    >>> choose_own_first(problem, in_place=True)
    ('forward', 'backward')
    """
    if problem.cp_comm_type != "all_gather" or problem.cp_size == 1 or not is_on("own_keys_first"):
        return ()
    if in_place or not _one_segment_a_row(problem):
        return "forward", "backward"
    return () if deterministic else ("backward",)


def _one_segment_a_row(problem: Problem) -> bool:
    """Whether each query sees keys of one area, and a rank has few pieces of each area."""
    visibility = Visibility(problem.workload)
    rows = visibility.query_rows
    if not visibility.areas.queries.disjoint or not len(rows):
        return not len(rows)
    rows = rows.take(np.lexsort((rows.start, rows.member, rows.area)))
    piece = rows.member * len(visibility.areas) + rows.area
    apart = np.append(True, (piece[1:] != piece[:-1]) | (rows.start[1:] != rows.stop[:-1]))
    return int(np.bincount(piece[apart]).max()) <= _MOST_PIECES


def own_keys_first(visibility: Visibility, rank: int, rank_schedule: RankSchedule) -> RankSchedule:
    """A rank's schedule of one pass of all_gather, all heads at once, with own keys that attend first."""
    everybody, heads = np.arange(visibility.member_count), (0, visibility.workload.heads_q)
    theirs, own = visibility.sees(rank, (everybody == rank).astype(int))
    return _with_tiles(rank_schedule, [own.tiles(heads), theirs.tiles(heads)])


# ---- Own keys that wait
#
# Own keys that wait for the others: an area that hides nothing is attended once, when more of its keys have arrived.
#
# For example, two ranks share a prompt, and their answers see all of it and, causally, themselves. Without this rewrite
# the answers of a rank attend to the prompt twice: to the rank's own part, and to the part that arrives. Each of these
# is a kernel launch with an output to merge and gradients to add:
#
#                 step 0, while keys travel                         step 1
#     before      answers x themselves, x prompt's own keys         answers x prompt's other keys
#     after       answers x themselves                              answers x all of the prompt's keys
#
# Nothing of the prompt is hidden, so its keys need no order, and both parts are one segment of one launch. The messages
# do not change: gradients of own keys stay on the rank, at any step. Tiles of the first step wait if all of this holds:
#
# - They are of areas that hide nothing. All such tiles of the step wait together, so their launch is saved. A part of a
#   causal area stays: without it the area's square would not be one.
# - Their areas have arrived keys at a later step. They wait for the first one: in all_gather for all keys, in a ring
#   for those of the next ring member, as gradients of received keys have to leave one step after these came.
# - Any two of these areas have the same keys or no keys in common; otherwise one launch could become two.
# - Several tiles that stay have queries that see these keys. With only one, the keys would be the first of its segment.
# - Their queries are more than half of the later step's. Otherwise the queries of that step are one segment with the
#   arriving keys, and these few are another segment with the own keys at either step.
# - The tiles that stay still hide the step's messages in the forward pass, the shorter one, by `costs`.


def own_keys_wait(problem: Problem, rank_schedules: RankPasses) -> RankPasses:
    """A rank's forward and backward schedule with own keys waiting, or the unchanged schedules. Each step has the same
    tiles in both.
    """
    forward, backward = rank_schedules
    areas, own = problem.workload.areas, forward[0].tiles
    waits, arrives = _hides_nothing(areas)[own.area], _first_steps(areas, forward)[own.area]
    waiting, stays = own.take(waits), own.take(~waits)
    if not len(waiting) or not arrives[waits].all() or bool((tile_pairs(areas, stays) == _cells(stays)).any()):
        return rank_schedules
    if (
        not _same_or_disjoint_keys(areas.take(waiting.area))
        or _in_front(waiting, stays)
        or not _hidden(problem, forward[0], stays)
    ):
        return rank_schedules
    tiles: list[Tiles] = [stays, *(step.tiles for step in forward[1:])]
    for n in map(int, np.unique(arrives[waits])):
        some = own.take(waits & (arrives == n))
        if 2 * _queries(some) <= _queries(tiles[n]):
            return rank_schedules
        tiles[n] = Tiles.concat([some, tiles[n]])
    return _with_tiles(forward, tiles), _with_tiles(backward, tiles)


def _with_tiles(rank_schedule: RankSchedule, tiles: list[Tiles]) -> RankSchedule:
    some = (step._replace(tiles=its) for step, its in zip(rank_schedule, tiles, strict=False))
    return *some, *rank_schedule[len(tiles) :]


def _first_steps(areas: Areas, rank_schedule: RankSchedule) -> Column:
    """The first step after step 0 at which each area has tiles; 0 for none."""
    found = np.zeros(len(areas), dtype=np.int64)
    for n in range(len(rank_schedule) - 1, 0, -1):
        found[rank_schedule[n].tiles.area] = n
    return found


def _hides_nothing(areas: Areas) -> Column:
    """Whether all of an area's rectangle is seen.

    >>> _hides_nothing(Areas.parse("area q[0:4] k[0:4] band *:0\\narea q[4:8] k[0:4] band *:*")).tolist()
    [False, True]
    """
    return areas.pairs == _cells(areas)


def _cells(rectangles: Areas | Tiles) -> Column:
    return (rectangles.q_stop - rectangles.q_start) * (rectangles.k_stop - rectangles.k_start)


def _same_or_disjoint_keys(areas: Areas) -> bool:
    """Whether any two of these have the same keys or none in common."""
    start, stop = np.unique(np.stack([areas.k_start, areas.k_stop]), axis=1)
    return bool((start[1:] >= stop[:-1]).all())


def _in_front(waiting: Tiles, stays: Tiles) -> bool:
    """Whether one tile that stays, alone, has the queries that see some of the keys."""
    queries: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for _, *q, k_start, k_stop, _, _ in waiting.rows():
        queries.setdefault((k_start, k_stop), set()).add((q[0], q[1]))
    alone = {min(some) for some in queries.values() if len(some) == 1}
    return not alone.isdisjoint(zip(stays.q_start.tolist(), stays.q_stop.tolist(), strict=True))


def _queries(tiles: Tiles) -> int:
    """The number of query rows."""
    return Spans(tiles.q_start, tiles.q_stop).merged().total


def _hidden(problem: Problem, step: Step, tiles: Tiles) -> bool:
    """Whether these tiles take as long as the step's messages, forward."""
    at = costs()
    seen = int(tile_pairs(problem.workload.areas, tiles).sum())
    computed = 2 * problem.heads_q * seen * (problem.d_qk + problem.d_v) / at.flops_per_us
    travels = max(sum(message_bytes(problem, m) for m in messages) for messages in (step.sends, step.recvs))
    return computed >= at.exchange_us + travels / at.bytes_per_us
