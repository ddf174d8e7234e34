"""Bytes on one rank: what checkpointing keeps and computes again, and the most that a step holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import cp_fast
from cp_fast.checkpoint import save_attention
from cp_fast.compile.machine import read_machine
from cp_fast.tools.cost.predict import predict
from cp_ref.reference.simulator import RankScheduler, SimMember
from cp_ref.schedules.problem import Problem, Sequence
from tests.cp_fast.memory.one_rank import Allocated, call_of

TOKENS, HEADS, DIM = 256, 4, 16
ROWS = TOKENS * HEADS * DIM * 4  # bytes of a layer's input, and of its out
LSE = TOKENS * HEADS * 4


class Host:
    """The host's memory, which the device's account does not have."""

    def __init__(self) -> None:
        self.now = 0

    def give(self, x: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            copy = torch.empty_like(x)
        size = copy.untyped_storage().nbytes()
        self.now += size
        weakref.finalize(copy.untyped_storage(), self._gone, size)
        return copy

    def _gone(self, size: int) -> None:
        self.now -= size


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    account = Host()
    monkeypatch.setattr("cp_fast.checkpoint.host_memory_for", account.give)
    yield account
    gc.collect()
    assert account.now == 0  # nothing outlives its step


def step(layers: int, how: Any) -> tuple[int, int, Any]:
    """(bytes held after the forward pass, most bytes held in the backward pass above that, the model's output)"""
    cp = cp_fast.ContextParallel(SimMember(0, 1, RankScheduler(1)))
    sizes: dict[str, Any] = {"batch_size": 1, "seqlen_q": TOKENS, "dtype": torch.float32, "device": "cpu"}
    plan = cp_fast.make_plan(cp=cp, heads_q=HEADS, heads_kv=HEADS, d_qk=DIM, d_v=DIM, **sizes)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return x * cp_fast.attention(x, x, x, cp=cp, plan=plan).sigmoid()

    contexts: dict[str, Any] = {} if how is None else {"context_fn": save_attention(offload=how)}
    x = torch.randn(1, TOKENS, HEADS, DIM).requires_grad_()
    with Allocated() as allocated:
        y: Any = x
        for _ in range(layers):
            y = checkpoint(layer, y, use_reentrant=False, **contexts)
        held = allocated.now
        allocated.peak = held
        y.backward(torch.ones_like(y))
    return held, allocated.peak, y.detach()


def test_saved_results_cost_what_their_shapes_say() -> None:
    for layers in (1, 4):
        held, _, _ = step(layers, None)
        assert held == layers * ROWS  # the outputs, which are the next inputs
        held, _, _ = step(layers, False)
        assert held == layers * (ROWS + ROWS + LSE)


def test_offloaded_results_cost_those_of_one_layer(host: Host) -> None:
    for layers in (1, 4, 8):
        held, peak, _ = step(layers, True)
        assert held == layers * ROWS + ROWS + LSE
        if layers > 1:
            above = peak - held
            assert above == step(2, True)[1] - step(2, True)[0]  # the same, whatever the number of layers


def test_the_host_has_the_results_until_the_backward_pass(host: Host) -> None:
    cp = cp_fast.ContextParallel(SimMember(0, 1, RankScheduler(1)))
    x = torch.randn(1, TOKENS, HEADS, DIM).requires_grad_()
    contexts = save_attention(offload=True)
    y: Any = x
    for _ in range(3):
        y = checkpoint(lambda x: cp_fast.attention(x, x, x, cp=cp), y, use_reentrant=False, context_fn=contexts)
    assert host.now == 3 * (ROWS + LSE)
    y.sum().backward()
    del y
    gc.collect()
    assert host.now == 0


def test_a_step_without_a_backward_pass_leaves_nothing(host: Host) -> None:
    contexts = save_attention(offload=True)
    cp = cp_fast.ContextParallel(SimMember(0, 1, RankScheduler(1)))
    x = torch.randn(1, TOKENS, HEADS, DIM).requires_grad_()
    y: Any = checkpoint(lambda x: cp_fast.attention(x, x, x, cp=cp), x, use_reentrant=False, context_fn=contexts)
    assert host.now == ROWS + LSE
    del y


RANK_TOKENS, RANK_HEADS, RANK_DIM = 64, (32, 8), 128
AS_16384 = 16_384 / RANK_TOKENS / 2**20  # MiB at 16,384 rows a rank
OUT, RANK_LSE = 128, 2  # MiB


def peak(comm: Any, size: int, rank: int) -> float:
    """MiB above the inputs, results included, at 16,384 rows a rank."""
    call = call_of(comm, size, rank, RANK_TOKENS, RANK_HEADS, RANK_DIM)
    with Allocated() as allocated:
        call()
    return allocated.peak * AS_16384


@pytest.mark.parametrize(
    ("size", "most"),
    [
        *((2, 608), (3, 768), (4, 832), (8, 864)),
        *(pytest.param(size, 864, marks=pytest.mark.thorough) for size in (5, 6, 12, 16)),
    ],
)
def test_a_ring_holds_less_than_0_9_gib_above_inputs_and_outputs(size: int, most: int) -> None:
    """Whatever its size: of every rank, as dense causal sequences are cut; of large rings of the first ones, which
    differ, and the last. In a small ring fewer blocks are under way while dq is already a sum.
    """
    ranks = range(size) if size <= 6 else (0, 5, size - 1)
    assert max(peak("p2p", size, rank) - OUT - RANK_LSE for rank in ranks) == most <= 0.9 * 1024


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_cost_model_predicts_what_the_fullest_rank_holds(size: int) -> None:
    """Or a little more."""
    whole = Sequence(*[size * 16_384] * 4)
    problem = Problem(
        size, (whole,), heads_q=RANK_HEADS[0], heads_kv=RANK_HEADS[1], d_qk=RANK_DIM, d_v=RANK_DIM, dtype="bfloat16"
    )
    predicted = predict(problem, read_machine("h200-nvlink")).peak_bytes / 2**20
    held = max(peak("p2p", size, rank) for rank in range(size))
    assert held <= predicted <= 1.07 * held


def test_nothing_is_held_that_nobody_needs() -> None:
    """The fullest rank of a ring of six, by what has to be there, in MiB. While all queries meet half the keys: dq in
    float32; the block of keys that comes next, and till it was read this one; dK and dV of its own, of this half on
    their way in float32, and the launch's; and what the launch adds up in, with all that it yields at its end.
    """
    dq, keys, own, way, launch, yielded = 256, 64, 64, 64, 256, 128 + 32
    assert peak("p2p", 6, 5) - OUT - RANK_LSE == dq + keys + own + way + launch + yielded


def test_memory_that_goes_is_counted_off() -> None:
    with Allocated() as allocated:
        x = torch.empty(1000)
        y = x[10:]
        del x
        assert (allocated.now, allocated.peak) == (4000, 4000)
        del y
        torch.empty(500)
    assert (allocated.now, allocated.peak) == (0, 4000)
