"""The schedule that `cp_fast` runs: the planner's, in the chosen head chunks, with own keys that come first or wait."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cp_fast.compile.machine import Costs, costs
from cp_fast.passes import is_on
from cp_ref.schedules.areas import UNBOUNDED, Areas
from cp_ref.schedules.planners.make_schedule import chunked_heads, plan_rank, saved_kinds
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import RankSchedule, Schedule, Step, Tiles
from cp_ref.schedules.table import Column, Spans
from cp_ref.schedules.verify.costs import ITEM_BYTES, message_bytes, tile_pairs

__all__ = [
    "Schedules",
    "choose_head_chunks",
    "choose_own_first",
    "chosen_rank_schedule",
    "chosen_schedule",
    "own_keys_first",
    "own_keys_wait",
    "ways_to_cut",
]

Schedules = tuple[RankSchedule, RankSchedule]  # of the forward and the backward pass


# ---- Head chunks
#
# The head chunks that take the least time (`cp_ref.schedules.planners.head_chunks`).
#
# In a2a head chunks hide all messages except the first chunk's inputs and the last chunk's results, so these two are
# small. Each chunk adds a launch, whose last tiles leave multiprocessors idle, and work for the host. So heads are cut
# where, by an estimate, the hidden messages take longer than that. On two H200s they do when every query head has its
# kv head. With four query heads per kv head and 16,384 tokens per GPU, three chunks take 0.4 % more time than one, and
# twice the host time. Two chunks of packed documents gain 1 % or lose 29 %, since the host launches the second one
# while the GPU waits (`benchmarks/results/head_chunks_2x_h100.json`).
#
# The estimate is a formula: compiling every cut and counting its instructions would take longer than the plan itself.
# It depends on the problem alone, so all ranks choose the same. Documents that stay at home are not exchanged, and hide
# the first chunk's inputs: the more of them there are, the less a cut gains.
#
# In all_gather the results of the forward pass stay, so only the first chunk is small, and the forward pass decides.


def choose_head_chunks(problem: Problem) -> tuple[int, ...]:
    """The kv heads of every rank that are exchanged at a time: the cut of the least time, of both passes in a2a, of the
    forward pass in all_gather.

    () means all at once. This may be fastest. It is also the answer where no heads are exchanged, or a kv head goes to
    several ranks.

    >>> from cp_ref.schedules.problem import Sequence
    >>> def chunks(tokens, cp_size, heads_kv):
    ...     sizes = {"heads_q": 32, "heads_kv": heads_kv, "d_qk": 128, "d_v": 128, "dtype": "bfloat16"}
    ...     problem = Problem(cp_size, (Sequence(tokens, tokens, tokens, tokens),), "a2a", cp_size, **sizes)
    ...     return choose_head_chunks(problem)
    >>> chunks(32_768, 2, 32), chunks(32_768, 2, 8), chunks(65_536, 2, 8), chunks(32_768, 8, 4)
    ((1, 14, 1), (), (), ())
    """
    heads = chunked_heads(problem)
    if problem.cp_size == 1 or heads < 2 or not is_on("split_heads"):
        return ()
    at, gathers = costs(), problem.cp_comm_type == "all_gather"
    if gathers and problem.qkv_format == "sbhd" and len(problem.sequences) > 1:  # `fold_batch` needs all heads.
        return ()
    if gathers and bool((problem.workload.areas.lo > -UNBOUNDED).any()):  # Halos are few rows.
        return ()
    passes = [_gathering_pass(problem, at)] if gathers else _passes(problem, at)
    rings = 1 if gathers else problem.cp_size // problem.a2a_size
    ways = ways_to_cut(heads, results_leave=not gathers)
    times = {cut: sum(_time(one, cut, rings, at) for one in passes) for cut in ways}
    best, whole = min(times, key=times.__getitem__), (heads,)
    least = _least_saved(problem) if gathers else at.least_saved
    return best if best != whole and times[best] <= (1 - least) * times[whole] else ()


def ways_to_cut(heads: int, *, results_leave: bool = True) -> list[tuple[int, ...]]:
    """The few ways to cut kv heads that are tried. Chunks are equal, or a small one comes before a large one. Where
    results leave, another small one follows the large one. Otherwise they may also be a small one, one of three
    times its heads, and the rest. Ways with few chunks come first.

    >>> ways_to_cut(1), ways_to_cut(6)
    ([(1,)], [(6,), (3, 3), (2, 2, 2), (1, 4, 1), (1, 1, 1, 1, 1, 1)])
    >>> ways_to_cut(6, results_leave=False)
    [(6,), (3, 3), (1, 5), (2, 4), (2, 2, 2), (1, 3, 2), (1, 1, 1, 1, 1, 1)]
    """
    equal = [(heads // count,) * count for count in range(1, heads + 1) if heads % count == 0]
    if results_leave:
        uneven = [(n, heads - 2 * n, n) for n in range(1, heads) if heads > 3 * n]
    else:
        uneven = [(n, heads - n) for n in range(1, heads) if heads > 2 * n]
        uneven += [(n, 3 * n, heads - 4 * n) for n in range(1, heads) if heads > 4 * n]
    return sorted(equal + uneven, key=len)


class _PassTimes(NamedTuple):
    """Microseconds of one pass, the first three for each kv head of a rank."""

    come: float  # Its rows, in an exchange.
    attend: float  # One step of the ring.
    leave: float  # Its results.
    tail: float  # The time lost at the end of a launch, for any number of heads.
    home: float  # Documents at home, with all heads, while the first rows come: of the rank that has most.
    host: float  # A step, on the host.
    slowed: float = 1.0  # The time of messages during a launch, as a multiple of their time alone.


def _passes(problem: Problem, at: Costs) -> tuple[_PassTimes, _PassTimes]:
    """The forward and the backward pass."""
    d_qk, d_v, group = problem.d_qk, problem.d_v, problem.heads_q // problem.heads_kv
    to_peers = (problem.a2a_size - 1) / problem.cp_size  # The share of all rows that a rank sends.
    a_number = ITEM_BYTES[problem.dtype] * to_peers / at.bytes_per_us
    visibility = Visibility(problem.workload)
    home, pairs = visibility.at_home, int(visibility.exchanged.areas.pairs.sum())
    tokens_q = sum(problem.lengths.len_q) - home.areas.queries.merged().total
    tokens_kv = sum(problem.lengths.len_kv) - home.areas.keys.merged().total
    q, do, kv = (n * a_number for n in (tokens_q * group * d_qk, tokens_q * group * d_v, tokens_kv * (d_qk + d_v)))
    own_pairs = pairs * (problem.a2a_size / problem.cp_size) ** 2  # Of one step.
    product = 2 * group * own_pairs / at.flops_per_us  # Of unit head dimension.
    dims = d_qk + d_v, 3 * d_qk + 2 * d_v
    forward, backward = (product * d for d in dims)
    alone = 2 * problem.heads_q * _most_pairs(home) / at.flops_per_us
    whole = [at.launch_us + alone * d if alone else 0.0 for d in dims]
    idle = at.idle_rows / max(tokens_q * group * problem.a2a_size / problem.cp_size, 1.0)
    return (
        _PassTimes(q + kv, forward, do, idle * forward, whole[0], at.host_us),
        _PassTimes(do, backward, q + kv, idle * backward, whole[1], at.host_us),
    )


# The shares of the time that head chunks of all_gather have to save, by the estimate; measured on two and four H200s,
# 16,384 tokens each (`benchmarks/results`: `by_heads_2x_h200.txt`, `head_chunks_4x_h200.txt`).
_LEAST_SAVED_ONE_DOCUMENT = 0.01  # It gained 2 % over four GPUs by (1, 7) where the estimate says 1.6 %.
_LEAST_SAVED_SEVERAL_DOCUMENTS = 0.1  # Five lost 9 % by (1, 7) where the estimate says that they gain 3 %.
_NEARLY_ALL = 0.9  # Of the visible pairs. A batch in which one document has them is taken for one document.
_STEPS_A_HOST_STEP = 3  # A step of all_gather has a launch and one kind of message: a third of one of a2a.
_SLOWED = 1.4  # Messages move 242 GB/s during a launch.


def _least_saved(problem: Problem) -> float:
    """The share of the time that head chunks of all_gather have to save, by the estimate."""
    pairs = problem.workload.areas.pairs
    one_document = pairs.max(initial=0) >= _NEARLY_ALL * pairs.sum()
    return _LEAST_SAVED_ONE_DOCUMENT if one_document else _LEAST_SAVED_SEVERAL_DOCUMENTS


def _gathering_pass(problem: Problem, at: Costs) -> _PassTimes:
    """The forward pass of all_gather: keys come, and all results stay. Of the rank that gets most."""
    visibility, group = Visibility(problem.workload), problem.heads_q // problem.heads_kv
    rows, pairs_at_home = visibility.arriving
    a_row = (problem.d_qk + problem.d_v) * ITEM_BYTES[problem.dtype] / at.bytes_per_us
    a_pair = 2 * group * (problem.d_qk + problem.d_v) / at.flops_per_us
    home = problem.heads_kv * pairs_at_home * a_pair
    hidden = float(home[rows > 0].min(initial=home.max()))
    attend = int(visibility.areas.pairs.sum()) / problem.cp_size * a_pair - hidden / problem.heads_kv
    idle = at.idle_rows / max(sum(problem.lengths.len_q) * group / problem.cp_size, 1.0)
    alone = at.launch_us + hidden if hidden else 0.0
    come = int(rows.max()) * a_row
    return _PassTimes(come, attend, 0.0, idle * attend, alone, at.host_us / _STEPS_A_HOST_STEP, _SLOWED)


def _most_pairs(home: Visibility) -> int:
    """The visible pairs of the rank that has most of them at home."""
    rank = np.zeros(len(home.areas), dtype=int)
    rank[home.query_rows.area] = home.query_rows.member
    return int(np.bincount(rank, home.areas.pairs, minlength=1).max())


def _time(one: _PassTimes, cut: tuple[int, ...], rings: int, at: Costs) -> float:
    """Microseconds of a pass: the computation of a step hides its messages."""
    come = [at.exchange_us + heads * one.come * (one.slowed if n else 1.0) for n, heads in enumerate(cut)]
    leave = [at.exchange_us + heads * one.leave for heads in cut]
    attend = [at.launch_us + one.tail + heads * one.attend for heads in cut]
    steps = zip(attend, [*come[1:], 0.0], [0.0, *leave[:-1]], strict=True)
    hidden = sum((rings - 1) * computed + max(computed, next_rows + last) for computed, next_rows, last in steps)
    return max(max(come[0], one.home) + hidden + leave[-1], (len(cut) * rings + 2) * one.host)


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


def own_keys_wait(problem: Problem, rank_schedules: Schedules) -> Schedules:
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


# ---- The chosen schedule


def chosen_rank_schedule(
    problem: Problem,
    rank: int,
    head_chunks: tuple[int, ...],
    own_first: tuple[str, ...] | None = None,
    *,
    key_block: int = 0,
) -> Schedules:
    """One rank's forward and backward schedule.

    Args:
        own_first: the passes in which own keys attend first; None for those of `choose_own_first`.
        key_block: of the kernel library (`Backend`).
    """
    return _Choices(problem, head_chunks, own_first, key_block).schedules(rank)


def chosen_schedule(
    problem: Problem,
    head_chunks: tuple[int, ...],
    known: dict[int, Schedules],
    own_first: tuple[str, ...] | None = None,
    *,
    key_block: int = 0,
) -> Schedule:
    """The schedule of all ranks. `known`: the results of `chosen_rank_schedule` for some of them."""
    choices = _Choices(problem, head_chunks, own_first, key_block)
    rank_schedules = [known.get(rank) or choices.schedules(rank) for rank in range(problem.cp_size)]
    forward, backward = zip(*rank_schedules, strict=True)
    return Schedule(problem.cp_comm_type, (problem.heads_q, problem.heads_kv), forward, backward, saved_kinds(problem))


class _Choices:
    """The choices of a schedule, which all its ranks have in common."""

    def __init__(
        self, problem: Problem, head_chunks: tuple[int, ...], own_first: tuple[str, ...] | None, key_block: int
    ) -> None:
        self.problem, self.head_chunks = problem, head_chunks
        self.own_first = choose_own_first(problem) if own_first is None else own_first
        self.visibility = self.in_blocks = Visibility(problem.workload)
        if key_block > 1 and bool((problem.workload.areas.lo > -UNBOUNDED).any()):  # Other keys begin with a block.
            self.in_blocks = Visibility(problem.workload, key_block=key_block)

    def schedules(self, rank: int) -> Schedules:
        """One rank's, forward and backward: own keys first, or all keys that a query sees at once, in whole blocks."""
        problem = self.problem
        if not self.own_first:
            found = plan_rank(problem, self.in_blocks, rank, self.head_chunks)
        else:
            whole = cut = plan_rank(problem, self.visibility, rank)
            if self.head_chunks or self.in_blocks is not self.visibility:
                cut = plan_rank(problem, self.in_blocks, rank, self.head_chunks)
            forward, backward = (
                own_keys_first(self.visibility, rank, at_once) if name in self.own_first else in_chunks
                for name, at_once, in_chunks in zip(("forward", "backward"), whole, cut, strict=True)
            )
            found = forward, backward
        return own_keys_wait(problem, found) if problem.areas is not None and is_on("delay_keys") else found
