"""Own keys that wait for the others: an attention slice that hides nothing is attended once, when more of its keys have
arrived.

For example, two ranks share a prompt, and their answers see all of it and, causally, themselves. Without this rewrite
the answers of a rank attend to the prompt twice: to the rank's own part, and to the part that arrives. Each of these is
a kernel launch with an output to merge and gradients to add:

                step 0, while keys travel                         step 1
    before      answers x themselves, x prompt's own keys         answers x prompt's other keys
    after       answers x themselves                              answers x all of the prompt's keys

Nothing of the prompt is hidden, so its keys need no order, and both parts are one segment of one launch. The messages
do not change: gradients of own keys stay on the rank, at any step. Tiles of the first step wait if all of this holds:

- They are of attention slices that hide nothing. All such tiles of the step wait together, so their launch is saved. A
  part of a causal attention slice stays: without it the slice's square would not be one.
- Their attention slices have arrived keys at a later step. They wait for the first one: in all_gather for all keys, in
  a ring for the next unit's, as gradients of received keys have to leave one step after these came.
- Any two of these attention slices have the same keys or no keys in common; otherwise one launch could become two.
- Several tiles that stay have queries that see these keys. With only one, the keys would be the first of its segment.
- Their queries are more than half of the later step's. Otherwise the queries of that step are one segment with the
  arriving keys, and these few are another segment with the own keys at either step.
- The tiles that stay still hide the step's messages in the forward pass, the shorter one, by `machine_costs.py`.
"""

from __future__ import annotations

import numpy as np

from cp_fast.compile.planning import machine_costs
from cp_ref.schedules.attention_slices import AttentionSlices
from cp_ref.schedules.planners.ring_members import merged
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import RankSchedule, Step, Tiles
from cp_ref.schedules.table import Column
from cp_ref.schedules.verify.costs import message_bytes, tile_pairs

__all__ = ["own_keys_wait"]


def own_keys_wait(
    problem: Problem, rank_schedules: tuple[RankSchedule, RankSchedule]
) -> tuple[RankSchedule, RankSchedule]:
    """A rank's forward and backward schedule with own keys waiting, or the unchanged schedules. Each step has the same
    tiles in both.
    """
    forward, backward = rank_schedules
    areas, own = problem.workload.areas, forward[0].tiles
    waits, arrives = _hides_nothing(areas)[own.area], _first_steps(areas, forward)[own.area]
    waiting, stays = own.take(waits), own.take(~waits)
    if not len(waiting) or not arrives[waits].all() or bool((tile_pairs(areas, stays) == _cells(stays)).any()):
        return rank_schedules
    if not _apart(areas.take(waiting.area)) or _in_front(waiting, stays) or not _hidden(problem, forward[0], stays):
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


def _first_steps(areas: AttentionSlices, rank_schedule: RankSchedule) -> Column:
    """The first step after step 0 at which each attention slice has tiles; 0 for none."""
    found = np.zeros(len(areas), dtype=np.int64)
    for n in range(len(rank_schedule) - 1, 0, -1):
        found[rank_schedule[n].tiles.area] = n
    return found


def _hides_nothing(areas: AttentionSlices) -> Column:
    """Whether all of an area's rectangle is seen.

    >>> _hides_nothing(AttentionSlices.parse("area q[0:4] k[0:4] band *:0\\narea q[4:8] k[0:4] band *:*")).tolist()
    [False, True]
    """
    return areas.pairs == _cells(areas)


def _cells(rectangles: AttentionSlices | Tiles) -> Column:
    return (rectangles.q_stop - rectangles.q_start) * (rectangles.k_stop - rectangles.k_start)


def _apart(areas: AttentionSlices) -> bool:
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
    start, stop = merged(tiles.q_start, tiles.q_stop)
    return int((stop - start).sum())


def _hidden(problem: Problem, step: Step, tiles: Tiles) -> bool:
    """Whether these tiles take as long as the step's messages, forward."""
    costs = machine_costs.costs()
    seen = int(tile_pairs(problem.workload.areas, tiles).sum())
    computed = 2 * problem.heads_q * seen * (problem.d_qk + problem.d_v) / costs.flops_per_us
    travels = max(sum(message_bytes(problem, m) for m in messages) for messages in (step.sends, step.recvs))
    return computed >= costs.exchange_us + travels / costs.bytes_per_us
