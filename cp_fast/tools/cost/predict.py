"""From counts and a machine to times and memory. Standard library and numpy.

A step takes the time to pack and add, and then the longer of its kernels and its messages, since messages travel while
kernels run. So the first exchange of `a2a` and the last return of dK and dV are exposed: no kernel runs with them. A
call takes the longer of the GPU's and the host's time, since calls follow each other. The slowest rank counts.

Not counted: ranks that wait for slower ones inside a step, the power limit, messages of several ranks that share a
link, optimizers and other layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cp_fast.compile.machine import Kernel, Link, Machine
from cp_fast.tools.cost.counts import LaunchCounts, RankCounts, StepCounts, count_alone, count_rank
from cp_fast.tools.cost.predicted_memory import most_bytes
from cp_ref.schedules.attention_slices import pairs
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.table import joined
from cp_ref.schedules.values import check_choice

__all__ = [
    "MESSAGES",
    "Counts",
    "PassTime",
    "Prediction",
    "counted",
    "predict",
    "priced",
    "recommended",
]

_ALL_RANKS = 4  # Up to this number all ranks are counted, else the first, a busiest one and the last.
MESSAGES = ("peer_memory", "group")


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass of one rank, without waits for others: on the GPU (`kernels` is the part of attention
    kernels), and on the host.
    """

    gpu: float
    kernels: float
    host: float


@dataclass(frozen=True)
class Prediction:
    """Time and memory of a call on the slowest rank.

    Attributes:
        problem: what is computed, layout and schedule included.
        forward, backward: see `PassTime`.
        alone_forward, alone: seconds of the kernels for the whole problem on one GPU, forward, and with backward.
        peak_bytes: the most bytes above q, k, v and dout.
    """

    problem: Problem
    forward: PassTime
    backward: PassTime
    alone_forward: float
    alone: float
    peak_bytes: int

    @property
    def forward_s(self) -> float:
        """Seconds of a forward pass."""
        return max(self.forward.gpu, self.forward.host)

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward pass."""
        return max(self.forward.gpu + self.backward.gpu, self.host_s)

    @property
    def host_s(self) -> float:
        """Seconds of the host, forward and backward pass."""
        return self.forward.host + self.backward.host

    @property
    def efficiency(self) -> float:
        """The time of the kernels alone on one GPU, over the ranks and the time, forward and backward."""
        return self.alone / self.problem.cp_size / self.seconds


@dataclass(frozen=True)
class Counts:
    """A problem, the work of some of its ranks, and that of one GPU alone."""

    problem: Problem
    ranks: dict[int, RankCounts]
    alone: LaunchCounts
    peak_bytes: int


def counted(problem: Problem, head_chunks: tuple[int, ...] | None = None) -> Counts:
    """Count the work of ranks: of all if they are few. Of many: the first one, which receives from another domain, a
    busiest one, and the last one, which holds most. `head_chunks`: see `compiled`.
    """
    ranks = (
        range(problem.cp_size) if problem.cp_size <= _ALL_RANKS else sorted({0, _busiest(problem), problem.cp_size - 1})
    )
    done = {rank: count_rank(problem, rank, head_chunks) for rank in ranks}
    return Counts(problem, done, count_alone(problem), max(most_bytes(problem, one) for one in done.values()))


def _busiest(problem: Problem) -> int:
    """A rank whose queries see most keys; the queries are those of its head-exchange group.

    >>> from cp_ref.schedules.problem import Sequence
    >>> two = Sequence(40, 40, 40, 40), Sequence(24, 24, 24, 24)  # 8 tokens a rank
    >>> _busiest(Problem(8, two, layout="contiguous", qkv_format="thd", attn_mask_type="padding_causal"))
    4
    """
    areas, own = problem.workload.areas, problem.workload.ownership.q
    area, n = joined(areas.q_start, areas.q_stop, own.start, own.stop)
    q0, q1 = np.maximum(areas.q_start[area], own.start[n]), np.minimum(areas.q_stop[area], own.stop[n])
    seen = pairs(q0, q1, areas.k_start[area], areas.k_stop[area], areas.lo[area], areas.hi[area])
    return int(np.bincount(own.rank[n] // problem.a2a_size, seen).argmax()) * problem.a2a_size if len(n) else 0


def predict(problem: Problem, machine: Machine, messages: str = "peer_memory") -> Prediction:
    """Time and memory of a problem with its layout and schedule.

    Args:
        messages: the transport inside a domain: "peer_memory" (`cp_fast.transport`), or "group", the process group.
            For ranks in several domains it must be "group".

    Raises:
        ValueError: the machine has no kernel for the dtype.
    """
    return priced(counted(problem), machine, messages)


def priced(counts: Counts, machine: Machine, messages: str = "peer_memory") -> Prediction:
    """The counts priced for a machine; see `predict`."""
    check_choice("messages", messages, MESSAGES)
    problem, rates = counts.problem, machine.rates(counts.problem)
    flops = 2.0 * (problem.d_qk + problem.d_v)
    inside = machine.peer_memory if messages == "peer_memory" and problem.cp_size <= machine.domain else machine.group
    passes = [
        _Pass(machine, inside, kernel, work) for kernel, work in ((rates.forward, flops), (rates.backward, 2.5 * flops))
    ]
    forward = [passes[0].time(rank, one.forward) for rank, one in counts.ranks.items()]
    backward = [passes[1].time(rank, one.backward) for rank, one in counts.ranks.items()]
    alone = [one.kernel_s(counts.alone) for one in passes]
    return Prediction(problem, _slowest(forward), _slowest(backward), alone[0], sum(alone), counts.peak_bytes)


def _slowest(times: Sequence[PassTime]) -> PassTime:
    return PassTime(*(max(column) for column in zip(*((t.gpu, t.kernels, t.host) for t in times), strict=True)))


@dataclass(frozen=True)
class _Pass:
    """The prices of one pass; `flops` are those of a pair and a head."""

    machine: Machine
    inside: Link
    kernel: Kernel
    flops: float

    def kernel_s(self, launch: LaunchCounts) -> float:
        """Seconds of one launch."""
        pairs = launch.pairs + self.kernel.edge * launch.rows
        return 1e-6 * self.kernel.launch_us + pairs * launch.heads * self.flops / (1e12 * self.kernel.tflops)

    def time(self, rank: int, steps: Iterable[StepCounts]) -> PassTime:
        """All steps of a rank."""
        host, on_gpu, in_kernels = self.machine.host, 0.0, 0.0
        on_host = host.pass_us
        for step in steps:
            kernels = sum(map(self.kernel_s, step.launches))
            travel, lost = self._travel(rank, step)
            on_gpu += step.moved / (1e9 * self.machine.copy_gbytes_s) + 1e-6 * self.machine.step_us
            on_gpu += max(kernels + min(lost, kernels), travel)
            in_kernels += kernels
            on_host += host.step_us + host.launch_us * len(step.launches) + host.tensor_us * step.tensors
        return PassTime(on_gpu, in_kernels, 1e-6 * on_host)

    def _travel(self, rank: int, step: StepCounts) -> tuple[float, float]:
        """Seconds until all messages of a step have arrived, and the seconds that concurrent kernels lose to them."""
        domain, times = rank // self.machine.domain, [(0.0, 0.0)]
        for link, here in ((self.inside, True), (self.machine.network, False)):
            ways = [
                sum(size for peer, size in way.items() if (peer // self.machine.domain == domain) == here)
                for way in (step.sent, step.received)
            ]
            if any(ways):
                travel = 1e-6 * link.latency_us + max(ways) / (1e9 * link.gbytes_s)
                times.append((travel, link.slows * travel))
        return max(travel for travel, _ in times), sum(lost for _, lost in times)


def recommended(found: Iterable[Prediction]) -> Prediction:
    """The fastest, forward and backward; among those within one per cent of it, the one with the least memory."""
    found = list(found)
    best = min(one.seconds for one in found)
    return min((one for one in found if one.seconds <= 1.01 * best), key=lambda one: one.peak_bytes)
