"""What a step holds on the device from its forward to its backward pass, by the memory that operators allocate."""

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
from cp_fast.checkpoint import offload, save_attention
from cp_ref.simulator import RankScheduler, SimMember
from tests.cp_fast.memory.one_rank import Allocated

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
    monkeypatch.setattr(offload, "host_memory_for", account.give)
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
