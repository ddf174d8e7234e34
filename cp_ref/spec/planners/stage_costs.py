"""How many kv heads of a rank an a2a schedule exchanges at a time (`head_chunks.py`): the number that takes the least
time.

Stages hide all messages except the first stage's inputs and the last stage's results, so these two stages are small.
Each stage adds a launch, whose last tiles leave multiprocessors idle, and work for the host. So heads are cut where, by
an estimate, the hidden messages take longer than that. On two H200s they do when every query head has its kv head. With
four query heads per kv head and 16,384 tokens per GPU, three stages took 0.4 % more time than one stage, and twice the
host time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cp_ref.spec.planners.machine import Machine, read_machine
from cp_ref.spec.tables.problem import Problem

__all__ = ["COSTS", "Costs", "head_stages", "ways_to_cut"]


@dataclass(frozen=True)
class Costs:
    """Rates and times for 16-bit operands. They decide whether heads are cut.

    Attributes:
        flops_per_us: of attention kernels.
        bytes_per_us: of a rank's messages, each way.
        exchange_us: an exchange, without its bytes.
        launch_us: a launch and its step, without the flops.
        idle_rows: the query rows that could be attended to in the time that a launch loses at its end.
        host_us: the host, for a step.
        least_gain: the share of the time that a cut has to save: an estimate is not better than that.
    """

    flops_per_us: float
    bytes_per_us: float
    exchange_us: float
    launch_us: float
    idle_rows: float
    host_us: float
    least_gain: float = 0.005

    @staticmethod
    def on(machine: Machine) -> Costs:
        """The costs on the GPUs of a domain. Kernels are those of its first head dims, as the mean of both passes.
        Messages are the process group's, the slower ones. A launch ends with half a wave of tiles of 128 rows on 132
        multiprocessors. The host's time is doubled, so that stages that gain little are not made.

        >>> Costs.on(read_machine("h200-nvlink")).bytes_per_us
        340000.0
        """
        forward, backward = machine.kernels[0].forward, machine.kernels[0].backward
        tflops = 3.5 / (1 / forward.tflops + 2.5 / backward.tflops)
        launch_us = machine.step_us + forward.launch_us
        link, host_us = machine.group, 2 * machine.host.step_us
        return Costs(1e6 * tflops, 1e3 * link.gbytes_s, link.latency_us, launch_us, 128 * 132 / 2, host_us)


COSTS = Costs.on(read_machine("h200-nvlink"))


def head_stages(problem: Problem, pairs: int) -> tuple[int, ...]:
    """The number of kv heads of every rank, by stage: the cut of the least time, forward and backward. One stage where
    heads are not exchanged, or a kv head goes to several ranks.

    Args:
        pairs: the visible (query, key) pairs of a head.

    >>> from cp_ref.spec.tables.problem import Sequence
    >>> def stages(tokens, cp_size, heads_kv):
    ...     sizes = {"heads_q": 32, "heads_kv": heads_kv, "d_qk": 128, "d_v": 128, "dtype": "bfloat16"}
    ...     problem = Problem(cp_size, (Sequence(tokens, tokens, tokens, tokens),), "a2a", cp_size, **sizes)
    ...     return head_stages(problem, problem.pairs)
    >>> stages(32_768, 2, 32), stages(32_768, 2, 8), stages(65_536, 2, 8), stages(32_768, 8, 4)
    ((1, 14, 1), (4,), (4,), (1,))
    """
    size, heads_kv = problem.a2a_size, problem.heads_kv
    if size == 1 or heads_kv % size:
        return (max(1, heads_kv // size),)
    passes, rings = _passes(problem, pairs), problem.cp_size // size
    times = {cut: sum(_time(one, cut, rings) for one in passes) for cut in ways_to_cut(heads_kv // size)}
    best, whole = min(times, key=times.__getitem__), (heads_kv // size,)
    return best if times[best] <= (1 - COSTS.least_gain) * times[whole] else whole


def ways_to_cut(heads: int) -> list[tuple[int, ...]]:
    """The few ways to cut kv heads into stages that are tried: equal stages, or a large one between two small ones.
    Ways with few stages come first.

    >>> ways_to_cut(1), ways_to_cut(6)
    ([(1,)], [(6,), (3, 3), (2, 2, 2), (1, 4, 1), (1, 1, 1, 1, 1, 1)])
    """
    equal = [(heads // count,) * count for count in range(1, heads + 1) if heads % count == 0]
    between = [(end, heads - 2 * end, end) for end in range(1, (heads - 1) // 3 + 1) if heads > 3 * end]
    return sorted(equal + between, key=len)


class _Pass(NamedTuple):
    """Microseconds of one pass, for each kv head of a rank."""

    come: float  # its rows, in an exchange
    attend: float  # one step of the ring
    leave: float  # its results
    tail: float  # the time lost at the end of a launch, for any number of heads


def _passes(problem: Problem, pairs: int) -> tuple[_Pass, _Pass]:
    """The forward and the backward pass."""
    element = {"float64": 8, "float32": 4}.get(problem.dtype, 2)
    d_qk, d_v, group = problem.d_qk, problem.d_v, problem.heads_q // problem.heads_kv
    a_number = element * (problem.a2a_size - 1) / problem.cp_size / COSTS.bytes_per_us  # of all rows: a rank's to peers
    tokens_q, tokens_kv = sum(problem.lengths.len_q), sum(problem.lengths.len_kv)
    q, do, kv = (n * a_number for n in (tokens_q * group * d_qk, tokens_q * group * d_v, tokens_kv * (d_qk + d_v)))
    own_pairs = pairs * (problem.a2a_size / problem.cp_size) ** 2  # of one step
    product = 2 * group * own_pairs / COSTS.flops_per_us  # of unit head dimension
    forward, backward = product * (d_qk + d_v), product * (3 * d_qk + 2 * d_v)
    idle = COSTS.idle_rows / max(tokens_q * group * problem.a2a_size / problem.cp_size, 1.0)
    return _Pass(q + kv, forward, do, idle * forward), _Pass(do, backward, q + kv, idle * backward)


def _time(one: _Pass, cut: tuple[int, ...], rings: int) -> float:
    """Microseconds of a pass: the computation of a step hides its messages."""
    come, leave = ([COSTS.exchange_us + heads * each for heads in cut] for each in (one.come, one.leave))
    attend = [COSTS.launch_us + one.tail + heads * one.attend for heads in cut]
    steps = zip(attend, [*come[1:], 0.0], [0.0, *leave[:-1]], strict=True)
    hidden = sum((rings - 1) * computed + max(computed, next_rows + last) for computed, next_rows, last in steps)
    return max(come[0] + hidden + leave[-1], (len(cut) * rings + 2) * COSTS.host_us)
