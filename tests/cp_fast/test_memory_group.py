"""The memory that the ranks of a group share: its sizes, its growth, and plans whose messages go through it. The ranks
are threads (`peer_host`); `memory_group` chooses as on a machine with GPUs, and one function of it is replaced, which
takes the memory.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings

import cp_fast
from cp_fast.api import plan as plans
from cp_fast.compile.chosen_head_chunks import choose_head_chunks
from cp_fast.tools.cost.counts import count_rank
from cp_fast.transport import memory_group
from cp_fast.transport import peer_exchange as exchange
from cp_fast.transport.memory_group import Crossed
from cp_fast.transport.peer_exchange import PeerMessages, staging_sizes
from cp_ref import dense_attention
from cp_ref.groups.group import Parcel
from cp_ref.groups.process_groups import ProcessMember
from cp_ref.schedules.problem import Problem
from tests.cp_fast.compile.planned_at import ALWAYS_CHUNKS, planned_at
from tests.cp_fast.peer_host import Host, Wires, member, run
from tests.marks import examples, seeds
from tests.spec.problems import problems

CUDA = torch.device("cuda")


@settings(max_examples=examples(150, fast=20))
@given(problems((2, 3, 4, 6, 8), most=2))
def test_every_exchange_fits_into_the_staging_buffers(problem: Problem) -> None:
    """Of equal and of unequal ranks; head dims are large, so that no slack hides a mistake."""
    problem, size = replace(problem, d_qk=2**16, d_v=2**16), problem.a2a_size
    rings, comm = problem.cp_size // size, problem.cp_comm_type
    ways = {"p2p": ("heads", "ring"), "all_gather": ("heads", "gather")}.get(comm, ("heads", "ring"))
    inside, across = (staging_sizes(problem, None, way, n) for way, n in zip(ways, (size, rings), strict=True))
    with planned_at(ALWAYS_CHUNKS):
        chunks = choose_head_chunks(problem)
    for rank in range(problem.cp_size):
        counts = count_rank(problem, rank, chunks)
        for step in (*counts.forward, *counts.backward):
            for peer, sent in step.sent.items():
                if peer // size == rank // size:
                    room = inside[(peer - rank) % size - 1]
                else:
                    room = across[(peer // size - rank // size) % rings - 1]
                assert sent <= room, (rank, peer)


# ---- groups of a job


class Name:
    """Stands for a process group, of which every process has an object of its own."""

    def __init__(self, name: str) -> None:
        self.group_name = name


class Member(ProcessMember):
    """One rank of a group, whose own messages are those of `Wires`."""

    def __init__(self, host: Host, name: str, ranks: list[int], rank: int) -> None:
        self.group: Any = Name(name)
        self.rank, self.size, self.ranks = ranks.index(rank), len(ranks), frozenset(ranks)
        wires = Wires(host, self.rank)
        self.exchange, self.all_gather_object = wires.exchange, wires.all_gather_object


class Job:
    """The groups of some ranks, and the memory that each group has shared, the newest last."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.wires: dict[str, Host] = {}
        self.shared: dict[str, list[Host]] = {}
        self._lock = threading.Lock()
        self._turns: dict[tuple[str, int], int] = {}

    def group(self, name: str, ranks: list[int], rank: int) -> Member:
        with self._lock:
            host = self.wires.setdefault(name, Host(len(ranks), ()))
        return Member(host, name, ranks, rank)

    def groups(self, rank: int, a2a_size: int) -> Any:
        """Of a whole schedule: one group, or a pair of two that cross in this rank."""
        if a2a_size == 0:
            return self.group("all", list(range(self.size)), rank)
        row, column = rank // a2a_size * a2a_size, rank % a2a_size
        a2a = self.group(f"a2a {row}", list(range(row, row + a2a_size)), rank)
        return a2a, self.group(f"p2p {column}", list(range(column, self.size, a2a_size)), rank)

    def share(self, of: Member, sizes: tuple[int, ...], device: torch.device) -> tuple[PeerMessages, str]:
        """`memory_group.share`, in the memory of one process. It finds ranks that ask for different sizes."""
        assert of.all_gather_object(sizes) == [sizes] * of.size
        name = of.group.group_name
        with self._lock:
            turn = self._turns[name, of.rank] = self._turns.get((name, of.rank), -1) + 1
            hosts = self.shared.setdefault(name, [])
            if turn == len(hosts):
                hosts.append(Host(of.size, sizes))
        return member(hosts[turn], of.rank, group=of), ""

    def run(self, one: Callable[[int], Any]) -> list[Any]:
        """Call it as every rank, each in its own thread."""
        return run(Host(self.size, (0,) * (self.size - 1)), lambda messages: one(messages.rank))

    @property
    def by_group(self) -> list[int]:
        """The peers of messages that went by a group's own means."""
        return [peer for host in self.wires.values() for peer in host.by_group]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Job]:
    """Jobs whose plans, on a CPU, choose their messages as on GPUs."""
    monkeypatch.setattr(exchange, "PART", 1024)  # many parts in a block, and small staging buffers
    monkeypatch.setattr(memory_group, "why_not", lambda: None)
    monkeypatch.setattr(memory_group, "_most", lambda: 2**30)
    monkeypatch.setattr(memory_group, "_on_gpus", lambda _: True)
    chosen = memory_group.messages_for
    monkeypatch.setattr(plans, "messages_for", lambda comm, problem, room, _: chosen(comm, problem, room, CUDA))

    def job(size: int) -> Job:
        made = Job(size)
        monkeypatch.setattr(memory_group, "share", made.share)
        return made

    return job


# ---- plans, whose results meet the oracle


class Batch(NamedTuple):
    """Documents of some lengths, and whole tensors of them."""

    lengths: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @property
    def cu(self) -> torch.Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0).int()


class Play(NamedTuple):
    """Batches under one schedule."""

    comm: Any
    a2a_size: int
    layout: Any
    heads: tuple[int, int]
    window: int
    batches: list[Batch]


def drawn(seed: int, size: int) -> Play:
    """Batches of more and more rows, so that staging buffers have to grow."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    inner = [n for n in (2, 4) if size % n == 0 and n < size]
    comm = ("p2p", "a2a", "a2a+p2p")[seed % 3] if inner else ("p2p", "a2a")[seed % 2]
    a2a_size = {"a2a": size, "a2a+p2p": inner[-1] if inner else 1}.get(comm, 1)
    layout = rng.choice(["balanced", "balanced", "dual_chunk", "contiguous"])
    kv = a2a_size * rng.choice([1, 2]) if a2a_size > 1 else rng.choice([1, 2])
    heads, batches, each, count = (kv * rng.choice([1, 2]), kv), list[Batch](), 2 * size, rng.randint(2, 6)
    for n in range(3):
        lengths = [rng.randint(1, 12) * 3**n for _ in range(count)]
        if layout != "balanced":
            lengths = [-(-length // each) * each for length in lengths]
        lengths[-1] += -sum(lengths) % each
        shapes = [(sum(lengths), h, 8) for h in (heads[0], kv, kv, heads[0])]
        batches.append(Batch(lengths, *(torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes)))
    return Play(comm, a2a_size, layout, heads, rng.choice([-1, -1, 9]), batches)


def wanted(play: Play, batch: Batch) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in batch[1:4]]
    how: dict[str, Any] = {"attn_mask_type": "padding_causal", "window_size": (play.window, 0)}
    out, *_ = dense_attention(*leaves, qkv_format="thd", cu_seqlens_q=batch.cu, **how)
    return [out.detach(), *torch.autograd.grad(out, leaves, batch.dout)]


def differing(cp: Any, plan: Any, found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[str]:
    """Which of a rank's results are not its slices of the oracle's."""
    own = (cp_fast.shard(x, cp=cp, plan=plan) for x in exact)
    pairs = zip(("out", "dq", "dk", "dv"), found, own, strict=True)
    return [name for name, x, y in pairs if not torch.allclose(x, y, rtol=1e-10, atol=1e-10)]


def wrong(job: Job, play: Play, exact: list[list[torch.Tensor]], rank: int) -> list[str]:
    """The wrong results of all batches on one rank. Each backward pass runs behind the next batch's forward pass. A
    further exchange is in flight while the next plan is made, and may get larger staging buffers.
    """
    pair = play.a2a_size if play.comm == "a2a+p2p" else 0
    cp = cp_fast.ContextParallel(job.groups(rank, pair), play.comm, layout=play.layout)
    sizes: dict[str, Any] = {"heads_q": play.heads[0], "heads_kv": play.heads[1], "d_qk": 8, "d_v": 8}
    how: dict[str, Any] = {"attn_mask_type": "padding_causal", "window_size": (play.window, 0), "device": "cpu"}
    found, waiting, in_flight = list[str](), list[Any](), list[Any]()

    def back() -> None:
        number, plan, out, leaves, dout = waiting.pop()
        results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        found.extend(f"batch {number}: {name}" for name in differing(cp, plan, results, exact[number]))

    for number, batch in enumerate(play.batches):
        plan = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=batch.cu, dtype=torch.float64, **sizes, **how)
        *inputs, dout = (cp_fast.shard(x, cp=cp, plan=plan) for x in batch[1:])
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = cp_fast.attention(*leaves, cp=cp, plan=plan)
        for pending, box, sent in in_flight:
            pending.wait()
            found += [] if box.tolist() == [sent] * 20 else [f"what was in flight before batch {number}"]
        in_flight.clear()
        if waiting:
            back()
        waiting.append((number, plan, out, leaves, dout))
        assert isinstance(plan.messages, PeerMessages | Crossed)
        if isinstance(messages := plan.messages, PeerMessages):
            after, before = ((messages.rank + n) % messages.size for n in (1, -1))
            mine, box = torch.full((20,), 100.0 * messages.rank + number), torch.zeros(20)
            pending = messages.exchange([Parcel(after, 0, mine)], [Parcel(before, 0, box)])
            in_flight.append((pending, box, 100.0 * before + number))
    for pending, *_ in in_flight:
        pending.wait()
    back()
    return found


@pytest.mark.parametrize("seed", seeds(24))
@pytest.mark.one_in(2)
def test_documents_on_2_to_8_ranks_meet_the_oracle_while_staging_buffers_grow(
    seed: int, jobs: Callable[[int], Job]
) -> None:
    size = (4, 2, 3, 8, 6, 5, 7)[seed % 7]
    job, play = jobs(size), drawn(seed, size)
    exact = [wanted(play, batch) for batch in play.batches]
    assert job.run(lambda rank: wrong(job, play, exact, rank)) == [[]] * size
    assert any(len(hosts) > 1 for hosts in job.shared.values()), "no staging buffer grew"
    assert not job.by_group, "a message did not fit into a staging buffer"


FEW_LENT = [500, 24, 488, 24, 488, 24, 500]  # documents at the ranks' borders are short: a rank sees little of others


def test_messages_of_a_plan_that_is_updated_fit(jobs: Callable[[int], Job]) -> None:
    """They have the most rows of any batch, whatever the first batch needs."""
    job, total = jobs(4), sum(FEW_LENT)
    draw = torch.Generator().manual_seed(0)
    tensors = (torch.randn(total, h, 8, generator=draw, dtype=torch.float64) for h in (4, 2, 2, 4))
    batch = Batch([*FEW_LENT[:-1], FEW_LENT[-1] - 100, 100], *tensors)
    exact = wanted(Play("p2p", 1, "contiguous", (4, 2), -1, [batch]), batch)

    def one(rank: int) -> list[str]:
        cp = cp_fast.ContextParallel(job.groups(rank, 0), "p2p", layout="contiguous")
        sizes: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float64}
        cu = torch.tensor([0, *FEW_LENT]).cumsum(0).int()
        room: dict[str, Any] = {"max_sequences": 12, "max_tokens_q": total, "attn_mask_type": "padding_causal"}
        plan = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, device="cpu", **sizes, **room)
        plan.update(cp=cp, cu_seqlens_q=batch.cu)
        *inputs, dout = (cp_fast.shard(x, cp=cp, plan=plan) for x in batch[1:])
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = cp_fast.attention(*leaves, cp=cp, plan=plan)
        assert isinstance(plan.messages, PeerMessages)
        return differing(cp, plan, [out.detach(), *torch.autograd.grad(out, leaves, dout)], exact)

    assert job.run(one) == [[]] * 4
    assert not job.by_group
