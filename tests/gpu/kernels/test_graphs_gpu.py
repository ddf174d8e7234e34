"""With a plan, nothing in `attention` waits for the GPU, so both passes can be captured in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.kernels.attention import fa2
from cp_ref import SimGroup
from cp_ref.reference.simulator import SimMember

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CU = torch.tensor([0, 700, 700, 701, 1001], dtype=torch.int32)
PADDED = torch.tensor([0, 704, 704, 708, 1040], dtype=torch.int32)
TOKENS = 1056  # with a tail
COMMS = ("p2p", "all_gather", "a2a")
MASKS: list[dict[str, Any]] = [{}, {"window_size": (100, 0)}, {"softmax_type": "off-by-one"}]


def inputs(seed: int) -> list[torch.Tensor]:
    """q, k, v, dout."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    heads = (8, 2, 2, 8)
    return [torch.randn(TOKENS, h, 64, generator=generator, device="cuda").bfloat16() for h in heads]


def planned(cp: cp_fast.ContextParallel, **how: Any) -> cp_fast.Plan:
    dims: dict[str, Any] = {"heads_q": 8, "heads_kv": 2, "d_qk": 64, "d_v": 64, "dtype": torch.bfloat16}
    dims |= {"cu_seqlens_q": CU, "cu_seqlens_q_padded": PADDED} | how
    return cp_fast.make_plan(cp=cp, qkv_format="thd", attn_mask_type="padding_causal", device="cuda", **dims)


def both(
    cp: cp_fast.ContextParallel, plan: cp_fast.Plan, tensors: list[torch.Tensor], **how: Any
) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk, dv of one layer, and max_logit at the end if it is asked for."""
    q, k, v, dout = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse, *more = cp_fast.attention(leaves[0], leaves[1], leaves[2], cp=cp, plan=plan, return_lse=True, **how)
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout), *more)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("comm", COMMS)
def test_both_passes_are_captured_and_replayed(comm: Any, mask: dict[str, Any]) -> None:
    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member, comm)
        plan = planned(cp, **mask)
        static = inputs(0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                both(cp, plan, static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = both(cp, plan, static)
        for seed in (1, 2):
            for buffer, x in zip(static, inputs(seed), strict=True):
                buffer.copy_(x)
            graph.replay()
            for got, expected in zip(results, both(cp, plan, inputs(seed)), strict=True):
                torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)  # dq adds up in any order
        torch.cuda.synchronize()

    SimGroup(1).run(one)


# lengths, and lengths with padding; the first is for the plan, and needs all of it
BATCHES = (
    ([0, 1056], [0, 1056]),
    ([0, 700, 700, 701, 1001], [0, 704, 704, 708, 1040]),
    ([0, 1, 130, 131, 400, 401], [0, 8, 140, 144, 420, 424]),
    ([0], [0]),
    ([0, 1040], [0, 1040]),
)
ROOM: dict[str, Any] = {"max_sequences": 6, "max_tokens_q": TOKENS}


def lengths_of(batch: tuple[list[int], list[int]]) -> dict[str, torch.Tensor]:
    names = ("cu_seqlens_q", "cu_seqlens_q_padded")
    return {name: torch.tensor(cu, dtype=torch.int32) for name, cu in zip(names, batch, strict=True)}


def with_nan(tensors: list[torch.Tensor], batch: tuple[list[int], list[int]]) -> list[torch.Tensor]:
    """NaN wherever there is no real token."""
    real = torch.zeros(TOKENS, dtype=torch.bool)
    cu, padded = batch
    for number, start in enumerate(padded[:-1]):
        real[start : start + cu[number + 1] - cu[number]] = True
    return [x.masked_fill(~real.cuda()[:, None, None], float("nan")) for x in tensors]


def named(backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend's name; of fa2 the one with these kernels, or a skip that says why not."""
    if backend in ("fa4", "torch"):
        return backend
    adapter = {"fa2 built in": fa2.BUILT_IN, "fa2 package": fa2.PACKAGE}[backend]
    if (reason := adapter.why_not()) is not None:
        pytest.skip(f"needs {adapter.origin}: {reason}")
    monkeypatch.setattr(fa2, "installed", lambda: adapter)
    return "fa2"


IN_PLACE: list[tuple[str, dict[str, bool]]] = [
    ("fa4", {}),
    ("fa4", {"deterministic": True}),
    ("fa4", {"return_max_logit": True}),
    ("fa2 built in", {"return_max_logit": True}),
    ("fa2 package", {}),
    ("torch", {"deterministic": True, "return_max_logit": True}),
]


@pytest.mark.parametrize(("backend", "how"), IN_PLACE, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("comm", COMMS)
def test_a_captured_graph_follows_a_plan_that_is_updated_in_place(
    comm: Any, mask: dict[str, Any], backend: str, how: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = named(backend, monkeypatch)

    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member, comm, backend=name)
        plan = planned(cp, **mask, **how, **lengths_of(BATCHES[0]), **ROOM)
        static = with_nan(inputs(0), BATCHES[0])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                both(cp, plan, static, **how)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = both(cp, plan, static, **how)
        for seed, batch in enumerate((*BATCHES[1:], BATCHES[0], BATCHES[2])):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                plan.update(cp=cp, **lengths_of(batch))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            fresh, tensors = planned(cp, **mask, **how, **lengths_of(batch)), with_nan(inputs(seed), batch)
            for buffer, x in zip(static, tensors, strict=True):
                buffer.copy_(x)
            graph.replay()
            for got, expected in zip(results, both(cp, fresh, tensors, **how), strict=True):
                assert not got.isnan().any()
                torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
            if how.get("deterministic"):
                for got, expected in zip(results, both(cp, plan, tensors, **how), strict=True):
                    assert torch.equal(got, expected)
        torch.cuda.synchronize()

    SimGroup(1).run(one)


def test_every_update_reaches_the_calls_behind_it_and_no_others() -> None:
    """The copies of a hundred updates are queued behind a sleeping GPU, each with its own batch."""

    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member, backend="fa4")
        plan = planned(cp, **lengths_of(BATCHES[0]), **ROOM)
        tensors = inputs(0)
        expected = []
        for batch in BATCHES:
            plan.update(cp=cp, **lengths_of(batch))
            expected.append(both(cp, plan, tensors)[0])
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        found = []
        for _ in range(20):
            for batch in BATCHES:
                plan.update(cp=cp, **lengths_of(batch))
                found.append(both(cp, plan, tensors)[0])
        for number, out in enumerate(found):
            assert torch.equal(out, expected[number % len(BATCHES)])

    SimGroup(1).run(one)


@pytest.mark.parametrize("comm", COMMS)
def test_nothing_waits_for_the_gpu(comm: Any) -> None:
    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member, comm)
        plan, tensors = planned(cp), inputs(0)
        both(cp, plan, tensors)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            both(cp, plan, tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    SimGroup(1).run(one)


def test_a_busy_gpu_does_not_hold_the_host() -> None:
    """The host is through with a layer while the GPU is still asleep."""

    def one(member: SimMember) -> float:
        cp = cp_fast.ContextParallel(member)
        plan, tensors = planned(cp), inputs(0)
        both(cp, plan, tensors)
        torch.cuda.synchronize()
        asleep, through = (torch.cuda.Event() for _ in range(2))
        torch.cuda._sleep(2_000_000_000)  # about a second
        asleep.record()
        both(cp, plan, tensors)
        through.record()
        still_asleep = not asleep.query()
        torch.cuda.synchronize()
        return float(still_asleep)

    assert SimGroup(1).run(one) == [1.0]
