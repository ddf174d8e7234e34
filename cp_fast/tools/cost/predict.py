"""From counts and a machine to times and memory. Standard library and numpy.

A step takes the time to pack and add, and then the longer of its kernels and its messages, since messages travel while
kernels run. So the first exchange of `a2a` and the last return of dK and dV are exposed: no kernel runs with them. A
call takes the longer of the GPU's and the host's time, since calls follow each other. The slowest rank counts.

Not counted: ranks that wait for slower ones inside a step, the power limit, messages of several ranks that share a
link, optimizers and other layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cp_fast.compile.machine import Kernel, Link, Machine
from cp_fast.tools.cost.counts import LaunchCounts, RankCounts, StepCounts, count_alone, count_rank, most_bytes
from cp_ref.problems.read_problem import check_layout
from cp_ref.schedules.areas import pairs
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import check_choice
from cp_ref.schedules.verify.costs import ITEM_BYTES
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS, Unsupported

__all__ = [
    "MESSAGES",
    "SAVED",
    "Candidate",
    "Counts",
    "ModelShape",
    "PassTime",
    "Prediction",
    "StepMemory",
    "candidates",
    "counted",
    "exchange_times",
    "predict",
    "priced",
    "recommended",
    "step_memory",
]

# ---- candidates
#
# A problem in every layout and schedule, to choose from.


class Candidate(NamedTuple):
    """The problem in one layout and schedule; `refused`: why it is impossible, or empty."""

    problem: Problem
    refused: str


def candidates(problem: Problem, domain: int, layouts: Iterable[str] = LAYOUTS) -> list[Candidate]:
    """The problem in every layout and schedule. In "a2a+p2p" the largest number of ranks exchange heads that its heads
    and a domain of GPUs allow.

    >>> from cp_ref.schedules.problem import Sequence
    >>> for found in candidates(Problem(4, (Sequence(64, 64, 64, 64),), heads_q=2, heads_kv=2), 8, ["dual_chunk"]):
    ...     print(found.problem.cp_comm_type, found.problem.a2a_size, found.refused or "taken")
    p2p 1 taken
    all_gather 1 taken
    a2a 4 2 query heads over 2 are not shared by 4 ranks
    a2a+p2p 2 taken
    """
    return [_candidate(problem, layout, name, domain) for layout in layouts for name in CP_COMM_TYPES]


def _candidate(problem: Problem, layout: str, name: str, domain: int) -> Candidate:
    ranks, q, kv = problem.cp_size, problem.heads_q, problem.heads_kv
    inner = [n for n in range(min(domain, ranks - 1), 1, -1) if ranks % n == 0]
    sizes = {"a2a": [ranks], "a2a+p2p": inner}.get(name, [1])
    legal = next((n for n in sizes if q % n == 0 and (kv % n == 0 or n % kv == 0)), None)
    size = legal or next(iter(sizes), 1)
    made = replace(problem, layout=layout, cp_comm_type=name, a2a_size=size)
    if not sizes:
        bounds = f"at least 2, less than {ranks}, at most a domain of {domain}"
        return Candidate(made, f"no size of groups ({bounds}) divides {ranks} ranks")
    if legal is None:
        return Candidate(made, f"{q} query heads over {kv} are not shared by {size} ranks")
    try:
        check_layout(made)
    except (ValueError, Unsupported) as error:
        return Candidate(made, str(error))
    return Candidate(made, "")


# ---- time and memory of attention


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
    areas, own = problem.workload.areas, problem.workload.ownership.q.sorted()
    area, n, q0, q1 = areas.queries.overlaps(own.spans)
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


def priced(counts: Counts, machine: Machine, messages: str) -> Prediction:
    """The counts priced for a machine; see `predict`."""
    check_choice("messages", messages, MESSAGES)
    problem, rates = counts.problem, machine.rates(counts.problem)
    flops = 2.0 * (problem.d_qk + problem.d_v)
    inside = _inside(machine, messages, problem.cp_size)
    passes = [
        _PassPrices(machine, inside, kernel, work)
        for kernel, work in ((rates.forward, flops), (rates.backward, 2.5 * flops))
    ]
    forward = [passes[0].time(rank, one.forward) for rank, one in counts.ranks.items()]
    backward = [passes[1].time(rank, one.backward) for rank, one in counts.ranks.items()]
    alone = [one.kernel_s(counts.alone) for one in passes]
    return Prediction(problem, _slowest(forward), _slowest(backward), alone[0], sum(alone), counts.peak_bytes)


def exchange_times(counts: RankCounts, rank: int, cp_size: int, machine: Machine) -> tuple[float, float]:
    """Seconds on the GPU of a layer's exchange on a rank (`count_exchange`): of gathering rows, and of giving results
    back, by peer memory. Nothing hides its messages: the layer's kernels come after them.
    """
    prices = _PassPrices(machine, _inside(machine, "peer_memory", cp_size))
    return prices.time(rank, counts.forward).gpu, prices.time(rank, counts.backward).gpu


def _inside(machine: Machine, messages: str, cp_size: int) -> Link:
    """The link between ranks of a domain."""
    return machine.peer_memory if messages == "peer_memory" and cp_size <= machine.domain else machine.group


def _slowest(times: Sequence[PassTime]) -> PassTime:
    return PassTime(*(max(column) for column in zip(*((t.gpu, t.kernels, t.host) for t in times), strict=True)))


@dataclass(frozen=True)
class _PassPrices:
    """The prices of one pass.

    Attributes:
        kernel: of its launches; None without any. `flops` are those of a pair and a head.
    """

    machine: Machine
    inside: Link
    kernel: Kernel | None = None
    flops: float = 0.0

    def kernel_s(self, launch: LaunchCounts) -> float:
        """Seconds of one launch."""
        assert self.kernel is not None
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


# ---- memory of a training step
#
# The memory of a rank in a whole training step: weights, gradients, states, what layers save, and the running layer.
#
# The model is a decoder of the Llama and Qwen3 kind: norms that compute in float32, on q and k too; an MLP with a gate;
# one matrix for embedding and head. FSDP2 shards its weights, one group a layer; the group of the embedding stays whole
# through the backward pass. AdamW has two states of the weights' dtype. The loss is computed by chunks of tokens.
#
# Memory is fullest in the loss, or while a layer's MLP or attention runs in the backward pass: of the last layer,
# before which all layers have saved, or of the first one, after which all have gradients. Not counted: CUDA's, NCCL's
# and the allocator's own, and peers' staging buffers.


SAVED = ("offload", "attention", "layers", "all")  # Kept for the backward pass, from least to most.
_FLOAT = 4  # Bytes.
_CHUNK = 2048  # Tokens whose logits exist at once.
_GATHERED = 2  # Layers whose whole weights or gradients are there.
_OFFLOADED = 2  # Layers whose results of attention are on the device.


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes, besides those of its attention.

    >>> ModelShape.read("36,2560,9728,151936").hidden
    2560
    """

    layers: int
    hidden: int
    ffn: int
    vocabulary: int

    @staticmethod
    def read(text: str) -> ModelShape:
        """From "layers,hidden,ffn,vocabulary"; a ValueError for anything else."""
        words = text.split(",")
        if len(words) != 4 or not all(word.strip().isdecimal() and int(word) for word in words):
            raise ValueError(f"a model is layers,hidden,ffn,vocabulary, four numbers of at least 1; got {text!r}")
        return ModelShape(*map(int, words))


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a rank at the time when memory is fullest, by what they are for."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


def step_memory(
    problem: Problem, attention_bytes: int, model: ModelShape, *, saved: str, sharded_over: int
) -> StepMemory:
    """Predict the memory of the rank with the most tokens.

    Args:
        problem: the attention of one layer.
        attention_bytes: the most bytes of a call above its inputs, messages included, as `Prediction.peak_bytes`.
        model: the other sizes.
        saved: for the backward pass; "all" activations (no checkpointing), the inputs of "layers" (all of a layer is
            recomputed), also the results of "attention", or these in the host's memory ("offload").
        sharded_over: ranks over which FSDP2 shards the weights; 1: each rank has all.
    """
    check_choice("saved", saved, SAVED)
    item = ITEM_BYTES[problem.dtype]
    slices = [problem.slots.q.of(rank) for rank in range(problem.cp_size)]
    tokens = max(int((own.stop - own.start).sum()) for own in slices)
    hidden, ffn, layers = model.hidden, model.ffn, model.layers
    q, k = problem.heads_q * problem.d_qk, problem.heads_kv * problem.d_qk
    v, out = problem.heads_kv * problem.d_v, problem.heads_q * problem.d_v
    layer = (hidden * (q + k + v + out) + 3 * hidden * ffn) * item
    embedding = model.vocabulary * hidden * item

    norm = _FLOAT + 2 * item  # Of a number: in float32, rounded, and scaled.
    inputs = tokens * hidden * item
    results = tokens * (out * item + problem.heads_q * _FLOAT)
    attention = tokens * ((hidden + q + k) * norm + v * item) + results
    mlp = tokens * (hidden * norm + 4 * ffn * item)  # The gate, its SiLU, the other factor, the product.
    kept, here = {  # By all layers; and by the running one besides.
        "offload": (layers * inputs + min(layers, _OFFLOADED) * results, attention + mlp - results),
        "attention": (layers * (inputs + results), attention + mlp - results),
        "layers": (layers * inputs, attention + mlp),
        "all": (layers * (inputs + attention + mlp), 0),
    }[saved]
    loss = 3 * min(tokens, _CHUNK) * model.vocabulary * _FLOAT + 3 * inputs  # Logits, their logarithms, the gradient.
    times = {
        "running layer": here + tokens * (2 * ffn + hidden) * item,  # Gradients inside the MLP.
        "running attention": here - (mlp if here else 0) + attention_bytes + 2 * inputs,
        "loss": loss,
    }
    busiest = max(times, key=lambda name: times[name])
    gradients = layers * layer // sharded_over
    first_is_fullest = kept >= gradients + kept // layers  # Layers give back what they saved, and leave gradients.
    whole = 2 * embedding + _GATHERED * layer if sharded_over > 1 else embedding
    return StepMemory(
        {
            "weights": (layers * layer + embedding) // sharded_over,
            "AdamW's states": 2 * (layers * layer + embedding) // sharded_over,
            "whole weights and gradients": whole,
            "gradients of layers": 0 if first_is_fullest else gradients,
            "saved by layers": kept if first_is_fullest else kept // layers,
            busiest: times[busiest],
        }
    )
