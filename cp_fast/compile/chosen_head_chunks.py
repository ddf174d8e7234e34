"""The head chunks that take the least time (`cp_ref.schedules.planners.head_chunks`).

In a2a head chunks hide all messages except the first chunk's inputs and the last chunk's results, so these two are
small. Each chunk adds a launch, whose last tiles leave multiprocessors idle, and work for the host. So heads are cut
where, by an estimate, the hidden messages take longer than that. On two H200s they do when every query head has its
kv head. With four query heads per kv head and 16,384 tokens per GPU, three chunks take 0.4 % more time than one, and
twice the host time. Two chunks of packed documents gain 1 % or lose 29 %, since the host launches the second one
while the GPU waits (`benchmarks/results/head_chunks_2x_h100.json`).

The estimate is a formula: compiling every cut and counting its instructions would take longer than the plan itself.
It depends on the problem alone, so all ranks choose the same. Documents that stay at home are not exchanged, and hide
the first chunk's inputs: the more of them there are, the less a cut gains.

In all_gather the results of the forward pass stay, so only the first chunk is small, and the forward pass decides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cp_fast.compile.machine import Costs, costs
from cp_fast.passes import is_on
from cp_ref.schedules.areas import UNBOUNDED
from cp_ref.schedules.planners.make_schedule import chunked_heads
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.verify.costs import ITEM_BYTES

__all__ = ["choose_head_chunks", "ways_to_cut"]


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
