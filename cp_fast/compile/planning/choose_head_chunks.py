"""The head chunks of an a2a schedule that take the least time (`cp_ref.schedules.planners.make_schedule`).

Head chunks hide all messages except the first chunk's inputs and the last chunk's results, so these two are small.
Each chunk adds a launch, whose last tiles leave multiprocessors idle, and work for the host. So heads are cut where, by
an estimate, the hidden messages take longer than that. On two H200s they do when every query head has its kv head. With
four query heads per kv head and 16,384 tokens per GPU, three chunks took 0.4 % more time than one, and twice the host
time.

The estimate is a formula: compiling every cut and counting its instructions would take longer than the plan itself. It
depends on the problem alone, so all ranks choose the same.
"""

from __future__ import annotations

from typing import NamedTuple

from cp_fast.compile.pass_table import is_on
from cp_fast.compile.planning import machine_costs
from cp_fast.compile.planning.machine_costs import Costs
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.verify.costs import ITEM_BYTES

__all__ = ["choose_head_chunks", "ways_to_cut"]


def choose_head_chunks(problem: Problem) -> tuple[int, ...]:
    """The kv heads of every rank that are exchanged at a time: the cut of the least time, forward and backward. () is
    all at once: if that is fastest, or no heads are exchanged, or a kv head goes to several ranks.

    >>> from cp_ref.schedules.problem import Sequence
    >>> def chunks(tokens, cp_size, heads_kv):
    ...     sizes = {"heads_q": 32, "heads_kv": heads_kv, "d_qk": 128, "d_v": 128, "dtype": "bfloat16"}
    ...     problem = Problem(cp_size, (Sequence(tokens, tokens, tokens, tokens),), "a2a", cp_size, **sizes)
    ...     return choose_head_chunks(problem)
    >>> chunks(32_768, 2, 32), chunks(32_768, 2, 8), chunks(65_536, 2, 8), chunks(32_768, 8, 4)
    ((1, 14, 1), (), (), ())
    """
    size, heads_kv = problem.a2a_size, problem.heads_kv
    if size == 1 or heads_kv % size or heads_kv == size or not is_on("split_heads"):
        return ()
    at, rings = machine_costs.costs(), problem.cp_size // size
    passes = _passes(problem, at)
    times = {cut: sum(_time(one, cut, rings, at) for one in passes) for cut in ways_to_cut(heads_kv // size)}
    best, whole = min(times, key=times.__getitem__), (heads_kv // size,)
    return best if best != whole and times[best] <= (1 - at.least_gain) * times[whole] else ()


def ways_to_cut(heads: int) -> list[tuple[int, ...]]:
    """The few ways to cut kv heads that are tried: into equal chunks, or a large one between two small ones. Ways with
    few chunks come first.

    >>> ways_to_cut(1), ways_to_cut(6)
    ([(1,)], [(6,), (3, 3), (2, 2, 2), (1, 4, 1), (1, 1, 1, 1, 1, 1)])
    """
    equal = [(heads // count,) * count for count in range(1, heads + 1) if heads % count == 0]
    between = [(end, heads - 2 * end, end) for end in range(1, (heads - 1) // 3 + 1) if heads > 3 * end]
    return sorted(equal + between, key=len)


class _Pass(NamedTuple):
    """Microseconds of one pass, for each kv head of a rank."""

    come: float  # Its rows, in an exchange.
    attend: float  # One step of the ring.
    leave: float  # Its results.
    tail: float  # The time lost at the end of a launch, for any number of heads.


def _passes(problem: Problem, at: Costs) -> tuple[_Pass, _Pass]:
    """The forward and the backward pass."""
    d_qk, d_v, group = problem.d_qk, problem.d_v, problem.heads_q // problem.heads_kv
    to_peers = (problem.a2a_size - 1) / problem.cp_size  # The share of all rows that a rank sends.
    a_number = ITEM_BYTES[problem.dtype] * to_peers / at.bytes_per_us
    tokens_q, tokens_kv = sum(problem.lengths.len_q), sum(problem.lengths.len_kv)
    q, do, kv = (n * a_number for n in (tokens_q * group * d_qk, tokens_q * group * d_v, tokens_kv * (d_qk + d_v)))
    own_pairs = problem.pairs * (problem.a2a_size / problem.cp_size) ** 2  # Of one step.
    product = 2 * group * own_pairs / at.flops_per_us  # Of unit head dimension.
    forward, backward = product * (d_qk + d_v), product * (3 * d_qk + 2 * d_v)
    idle = at.idle_rows / max(tokens_q * group * problem.a2a_size / problem.cp_size, 1.0)
    return _Pass(q + kv, forward, do, idle * forward), _Pass(do, backward, q + kv, idle * backward)


def _time(one: _Pass, cut: tuple[int, ...], rings: int, at: Costs) -> float:
    """Microseconds of a pass: the computation of a step hides its messages."""
    come, leave = ([at.exchange_us + heads * each for heads in cut] for each in (one.come, one.leave))
    attend = [at.launch_us + one.tail + heads * one.attend for heads in cut]
    steps = zip(attend, [*come[1:], 0.0], [0.0, *leave[:-1]], strict=True)
    hidden = sum((rings - 1) * computed + max(computed, next_rows + last) for computed, next_rows, last in steps)
    return max(come[0] + hidden + leave[-1], (len(cut) * rings + 2) * at.host_us)
