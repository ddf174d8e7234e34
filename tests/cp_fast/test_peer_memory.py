"""Messages through peer memory: the protocol between threads, whose words and memory are tensors on a CPU."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import cp_fast
from cp_fast.compile.chosen_head_chunks import choose_head_chunks
from cp_fast.compile.packing import Packing
from cp_fast.compile.pipeline import lowered
from cp_fast.compile.program import Recv, Send
from cp_fast.runtime.prepared_exchange import MessageSpec
from cp_fast.transport import peer_exchange as exchange
from cp_fast.transport.memory_group import carried_by
from cp_fast.transport.peer_exchange import PeerMessages, staging_sizes
from cp_fast.transport.watch import Watch
from cp_ref import SimGroup
from cp_ref.groups.group import Parcel
from cp_ref.groups.process_groups import PeerError, error_context
from cp_ref.schedules.planners.make_schedule import make_rank_schedule, saved_kinds
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.problem import Sequence as Lengths
from tests.cp_fast.compile.planned_at import ALWAYS_CHUNKS, planned_at
from tests.cp_fast.peer_host import PATIENCE, Host, Stream, Streams, member, run
from tests.layers.layer_table import LAYERS, local, made
from tests.marks import examples
from tests.spec.problems import problems


def content(sender: int, receiver: int, number: int, n: int, size: int) -> torch.Tensor:
    return (torch.arange(size) * 7 + 1000 * sender + 100 * receiver + 10 * number + n).to(torch.float32)


@pytest.mark.parametrize(("room", "part"), [(1024, 2**25), (5000, 500), (100_000, 2**25), (100_000, 300)])
def test_what_is_pulled_is_what_was_sent_whatever_fits_into_a_staging_buffer(
    room: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random messages of three ranks, one of which runs ahead, in blocks of one part or several; what does not fit goes
    by the group.
    """
    monkeypatch.setattr(exchange, "PART", part)
    draw = random.Random(room)
    pairs = [(s, r) for s in range(3) for r in range(3) if s != r]
    rounds = [
        {pair: [draw.choice([0, 3, 200, 700]) for _ in range(draw.choice([0, 1, 3]))] for pair in pairs}
        for _ in range(25)
    ]
    for sizes in rounds[::2]:  # rounds in which rank 0 sends only
        sizes.update({pair: [] for pair in pairs if pair[1] == 0})
    host = Host(3, (room, room))

    def one(messages: PeerMessages) -> None:
        me = messages.rank
        for number, sizes in enumerate(rounds):
            sends, recvs, expected = [], [], []
            for (sender, receiver), lengths in sizes.items():
                for n, size in enumerate(lengths):
                    x = content(sender, receiver, number, n, size)
                    if sender == me:
                        sends.append(Parcel(receiver, n, x))
                    if receiver == me:
                        recvs.append(Parcel(sender, n, torch.full_like(x, -1)))
                        expected.append(x)
            messages.exchange(sends, recvs).wait()
            for parcel, x in zip(recvs, expected, strict=True):
                assert torch.equal(parcel.tensor, x), (me, number, parcel.peer, parcel.tag)

    run(host, one)
    assert bool(host.by_group) == (room < 9000)


def attend(group: Any, comm: Any, window: int) -> list[torch.Tensor]:
    cp = cp_fast.ContextParallel(group, comm)
    draw = torch.Generator().manual_seed(cp.rank)
    q, k, v, dout = (torch.randn(1, 16, h, 8, generator=draw) for h in (6, 3, 3, 6))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cp_fast.attention(*leaves, cp=cp, window_size=(window, 0))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("window", [-1, 9])
@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_attention_has_the_bits_of_the_simulated_group(comm: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PART", 1000)
    ways = {"p2p": "ring", "all_gather": "gather", "a2a": "heads"}
    sizes: dict[str, Any] = {"heads_q": 6, "heads_kv": 3, "d_qk": 8, "d_v": 8, "dtype": "float32"}
    problem = Problem(
        cp_size=3, cp_comm_type=comm, sequences=(Lengths(48, 48, 48, 48),), window_size=(window, 0), **sizes
    )
    host = Host(3, staging_sizes(problem, None, ways[comm], 3))
    found = run(host, lambda messages: attend(messages, comm, window))
    expected = SimGroup(3).run(lambda sim: attend(sim, comm, window))
    for mine, its in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, its))
    assert not host.by_group, "the staging buffers of a planner's schedule have room for all of it"


def twice(group: Any, name: str, comm: str) -> list[torch.Tensor]:
    """Results and gradients of two calls of a layer, one after the other."""
    layer, found = LAYERS[name], list[torch.Tensor]()
    module, cp, plan = made("cp_fast", group, comm)
    for _ in range(2):
        mine = local(module, layer, layer.inputs(), cp, plan)
        results = layer.call(module, **mine, cp=cp, plan=plan)
        leaves = [mine[name] for name in layer.differentiable]
        seeds = [x.detach().nan_to_num(neginf=0) for x in results]
        found += [*(x.detach() for x in results), *(torch.autograd.grad(results, leaves, seeds) if leaves else ())]
    return found


OF_LAYERS = [(name, comm) for name in LAYERS for comm in LAYERS[name].comms if comm in ("all_gather", "a2a")]


@pytest.mark.parametrize(("name", "comm"), [pair for pair in OF_LAYERS if pair[0] != "attention"])
@pytest.mark.one_in(5)
def test_layers_have_the_bits_of_the_simulated_group(name: str, comm: str) -> None:
    """All that their exchanges send is pulled out of the peers' memory, where there is room."""
    host = Host(4, (100_000,) * 3)
    found, expected = (
        run(host, lambda peer: twice(peer, name, comm)),
        SimGroup(4).run(lambda sim: twice(sim, name, comm)),
    )
    for mine, its in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, its))
    assert not host.by_group
    assert any(int(word) for words in host.words for word in words)


def attend_to_documents(group: Any, comm: Any) -> list[torch.Tensor]:
    cp = cp_fast.ContextParallel(group, comm, layout="balanced")
    sizes: dict[str, Any] = {"heads_q": 8, "heads_kv": 4, "d_qk": 8, "d_v": 8, "dtype": torch.float32}
    cu = torch.tensor([0, *DOCUMENTS]).cumsum(0).int()
    plan = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, device="cpu", **sizes)
    draw = torch.Generator().manual_seed(cp.rank)
    q, k, v, dout = (torch.randn(len(plan.position_ids), h, 8, generator=draw) for h in (8, 4, 4, 8))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cp_fast.attention(*leaves, cp=cp, plan=plan)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


DOCUMENTS = (64, 32, 16, 8, 8)


@pytest.mark.parametrize(("comm", "way"), [("p2p", "ring"), ("all_gather", "gather"), ("a2a", "heads")])
def test_packed_documents_travel_through_peer_memory(comm: str, way: str) -> None:
    """They lie on some ranks alone, so that p2p sends keys straight from their owners, to any rank."""
    lengths = tuple(Lengths(n, n, n, n) for n in DOCUMENTS)
    sizes: dict[str, Any] = {"heads_q": 8, "heads_kv": 4, "d_qk": 8, "d_v": 8, "dtype": "float32"}
    packed: dict[str, Any] = {"layout": "balanced", "qkv_format": "thd", "attn_mask_type": "padding_causal"}
    problem = Problem(4, lengths, comm, 4 if comm == "a2a" else 1, **packed, **sizes)
    host = Host(4, staging_sizes(problem, None, way, 4))
    found = run(host, lambda messages: attend_to_documents(messages, comm))
    expected = SimGroup(4).run(lambda sim: attend_to_documents(sim, comm))
    for mine, its in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, its))
    assert not host.by_group


def test_batches_of_other_documents_seldom_need_larger_staging_buffers() -> None:
    """Each new size is memory that all ranks share anew. A block for every rank would be seven of them."""
    draw, packed = (
        np.random.default_rng(0),
        {"layout": "balanced", "qkv_format": "thd", "attn_mask_type": "padding_causal"},
    )
    sizes: dict[str, Any] = {"heads_q": 32, "heads_kv": 8, "d_qk": 128, "d_v": 128, "dtype": "bfloat16"} | packed
    asked, times = (0,) * 7, 0
    for _ in range(40):
        lengths = (int(n) // 16 * 16 for n in np.exp(draw.normal(7, 1, 100)) + 16)
        problem = Problem(8, tuple(Lengths(n, n, n, n) for n in lengths), "p2p", **sizes)
        needed = tuple(map(max, asked, staging_sizes(problem, None, "ring", 8)))
        times, asked = times + (needed != asked), needed
    block = 30_000 * 8 * 256 * (2 + 4)
    assert times <= 5
    assert 2 * sum(asked) < 7 * block


def test_a_captured_exchange_goes_by_the_group() -> None:
    host = Host(2, (4096,))

    def one(messages: PeerMessages) -> None:
        messages.streams.captures = True  # type: ignore[attr-defined]
        x, box = torch.full((3,), float(messages.rank)), torch.empty(3)
        messages.exchange([Parcel(1 - messages.rank, 0, x)], [Parcel(1 - messages.rank, 0, box)]).wait()
        assert box.tolist() == [1.0 - messages.rank] * 3

    run(host, one)
    assert sorted(host.by_group) == [0, 1]


@settings(max_examples=examples(60))
@given(problems())
def test_both_ends_cut_their_messages_into_the_same_steps(problem: Problem) -> None:
    """Which is what a staging buffer's two ends rest on: a block is all that goes to a rank in one step."""
    with planned_at(ALWAYS_CHUNKS):
        chunks = choose_head_chunks(problem)
    ranks = [
        lowered(Packing(problem), rank, make_rank_schedule(problem, rank, chunks), saved_kinds(problem)).programs
        for rank in range(problem.cp_size)
    ]
    for name in ("forward", "backward"):
        sent: dict[Any, list[int]] = {}
        received: dict[Any, list[int]] = {}
        for rank, programs in enumerate(ranks):
            for send in getattr(programs, name).of(Send):
                sent.setdefault((send.step, rank, send.peer), []).append(send.tag)
            for recv in getattr(programs, name).of(Recv):
                received.setdefault((recv.step, recv.peer, rank), []).append(recv.tag)
        assert {key: sorted(tags) for key, tags in sent.items()} == {
            key: sorted(tags) for key, tags in received.items()
        }


def test_a_peer_that_does_not_answer_is_named_and_ends_everything() -> None:
    ended, word, said = [0], torch.zeros(1, dtype=torch.int32), list[str]()
    watch = Watch(["global rank 4", "global rank 6"], 0, 0.3, lambda: ended[0], word, said.append)
    assert watch.posted([1]) == (word, 1)
    with error_context("forward, step 1 of 3"):
        watch.posted([1])
    ended[0] = 1
    until = time.monotonic() + PATIENCE
    while not said and time.monotonic() < until:  # the thread that looks is the package's
        time.sleep(0.05)
    where = "forward, step 1 of 3: global rank 4: messages with global rank 6 did not come through within 0.3 s"
    assert said == [where]
    with pytest.raises(PeerError, match=where):
        watch.check()


class AllAside(Streams):
    """The current stream's operations are done in a thread of their own too."""

    def __init__(self, host: Host, rank: int) -> None:
        super().__init__(host, rank)
        self._here = Stream()

    def here(self) -> Any:
        return self._here

    def fork(self, here: Any, *streams: Stream) -> None:
        come = threading.Event()
        here.does(come.set)
        for stream in streams:
            stream.does(lambda: come.wait(PATIENCE))


@pytest.mark.parametrize("held", [True, False])
def test_an_exchange_whose_staging_buffer_is_never_free_again_has_not_ended(held: bool) -> None:
    """Though nothing was to be received: the last one of a pass would hang, and nobody would know."""
    host = Host(2, (256,))
    messages = member(host, 0, limit=0.2)
    messages.streams, x = AllAside(host, 0), torch.zeros(64)
    exchange_of = messages.prepared("the last step", [MessageSpec(1, 0, (x.nbytes,), held)], [])
    pending = exchange_of.post(messages, [x], [])
    messages.streams.pulling.end()  # type: ignore[attr-defined]
    messages.watch.check()
    del pending
    messages.last = None
    exchange_of.post(messages, [x], [])  # over the block that rank 1 never pulls
    until = time.monotonic() + PATIENCE
    while not host.said and time.monotonic() < until:  # the thread that looks is the package's
        time.sleep(0.05)
    with pytest.raises(PeerError, match="the last step: rank 0: messages with rank 1 did not come through"):
        messages.watch.check()


def test_the_choice_is_one_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CP_FAST_MESSAGES", "carrier pigeons")
    with pytest.raises(ValueError, match="CP_FAST_MESSAGES is 'carrier pigeons'; it must be one of 'auto'"):
        carried_by()
    monkeypatch.delenv("CP_FAST_MESSAGES")
    assert carried_by() == "auto"
