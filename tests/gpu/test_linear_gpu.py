"""Linear layers on a GPU, over the simulated group, against the oracle."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import cp_fast
from conformance.implementation import Implementation
from conformance.problems.linear import CausalConv1d, LinearAttention, batch_of
from cp_fast.kernels.convolution import torch_convolution
from cp_fast.layers.causal_conv1d import choose_convolution
from cp_fast.layers.linear_attention import LIBRARIES, choose_kernels, features_of_call
from cp_ref import SimGroup
from cp_ref.calls.linear_calls import LINEAR_KINDS
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.problem import Sequence as Lengths
from tests.linear.problems import relative_errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LIMITS = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4, "float64": 1e-9}
PROBLEMS = {
    "dual_chunk": Problem(2, (Lengths(300, 300, 300, 300),), qkv_format="thd"),
    "contiguous": Problem(
        4, tuple(Lengths(n, n, n, n) for n in (150, 1, 0, 217)), layout="contiguous", qkv_format="thd"
    ),
    "many documents": Problem(2, tuple(Lengths(n, n, n, n) for n in range(40, 120, 4)), qkv_format="thd"),
    "padding": Problem(4, tuple(Lengths(n, n, 160, 160) for n in (160, 33)), attn_mask_type="padding_causal"),
}
DOCUMENTS = {
    "documents": ((300, 300), (1, 1), (0, 0), (2, 2), (217, 217)),
    "padding": ((150, 160), (0, 3), (33, 40)),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kind", LINEAR_KINDS)
def test_linear_attention(kind: str, dtype: str, name: str) -> None:
    reason = LIBRARIES[0].why_not()
    if dtype in ("bfloat16", "float16") and kind != "mamba" and reason is not None:
        pytest.skip(f"needs flash-linear-attention: {reason}")
    layer = LinearAttention(kind=kind, heads=2, shared=2, d_k=64, d_v=128, initial_state=True, output_final_state=True)
    found = relative_errors(cp_fast, PROBLEMS[name], layer, getattr(torch, dtype), "cuda")
    assert {name: error for name, error in found.items() if not error <= LIMITS[dtype]} == {}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(  # Each compiles for some seconds.
    ("dtype", "d_k", "d_v"), [("bfloat16", 16, 200), ("float16", 1, 200), ("float32", 3, 1)]
)
def test_selective_scan(dtype: str, d_k: int, d_v: int, name: str) -> None:
    """By Triton; one channel, and channels that no block divides."""
    assert choose_kernels(features_of_call("cuda", dtype, d_k, d_v), "auto", "mamba").name == "triton"
    layer = LinearAttention(
        kind="mamba", heads=2, shared=2, d_k=d_k, d_v=d_v, scale=0.7, initial_state=True, output_final_state=True
    )
    found = relative_errors(cp_fast, PROBLEMS[name], layer, getattr(torch, dtype), "cuda")
    assert {name: error for name, error in found.items() if not error <= LIMITS[dtype]} == {}


def test_gradients_of_a_scan_have_the_same_bits_every_time() -> None:
    """And Triton's results are those of plain PyTorch."""
    draw = torch.Generator("cuda").manual_seed(1)
    q, k, v = (torch.randn(3000, 1, d, generator=draw, device="cuda") for d in (16, 16, 1000))
    g, rates = torch.rand(v.shape, generator=draw, device="cuda"), -torch.rand(1, 16, 1000, device="cuda")
    dout, leaves = torch.randn(v.shape, device="cuda"), [x.requires_grad_() for x in (q, k, v, g, rates)]
    sizes = {"heads_q": 1, "heads_kv": 1, "d_qk": 64, "d_v": 64, "dtype": torch.float32, "device": "cuda"}

    def gradients(backend: Any) -> tuple[torch.Tensor, ...]:
        cp = SimGroup(1).run(lambda member: cp_fast.ContextParallel(member, backend=backend))[0]
        cu = torch.tensor([0, 1000, 1001, 3000])
        plan = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, linear=True, **sizes)  # type: ignore[arg-type]
        out = cp_fast.linear_attention(*leaves[:4], A=rates, cp=cp, plan=plan, kind="mamba")
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    for once, again, plain in zip(gradients("auto"), gradients("auto"), gradients("torch"), strict=True):
        assert torch.equal(once, again)
        assert (once - plain).norm() <= 2e-5 * plain.norm()


@pytest.mark.parametrize(("backend", "mib"), [("auto", 400), ("torch", 1200)])
def test_a_scan_of_many_channels_takes_bounded_memory(backend: Any, mib: int) -> None:
    """4,096 rows of 2,048 channels with 16 numbers each: all states at once are 512 MiB, more than once in a pass."""
    rows, channels, numbers = 4096, 2048, 16
    cp = SimGroup(1).run(lambda member: cp_fast.ContextParallel(member, backend=backend))[0]
    sizes: dict[str, Any] = {"heads_q": 1, "heads_kv": 1, "d_qk": 64, "d_v": 64, "dtype": torch.bfloat16}
    cu = torch.tensor([0, rows])
    plan = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, linear=True, device="cuda", **sizes)
    q, k, v = (torch.randn(rows, 1, d, device="cuda").bfloat16().requires_grad_() for d in (numbers, numbers, channels))
    g = torch.rand(rows, 1, channels, device="cuda").requires_grad_()
    rates = -torch.rand(1, numbers, channels, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cp_fast.linear_attention(q, k, v, g, cp=cp, plan=plan, kind="mamba", A=rates, scale=1.0).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v, g))
    assert torch.cuda.max_memory_allocated() - before < mib * 2**20


@pytest.mark.parametrize(  # Triton compiles each pair for half a minute, once for all documents.
    ("dtype", "kernel_size"),
    [
        ("bfloat16", 1),
        ("bfloat16", 4),
        ("bfloat16", 7),
        ("float16", 3),
        ("float32", 4),
        ("float64", 4),
        ("bfloat16", 17),
    ],
)
def test_causal_conv1d(dtype: str, kernel_size: int) -> None:
    """By Triton, but for float64 and the largest kernel size; channels that no block divides."""
    x = torch.empty(1, device="cuda", dtype=getattr(torch, dtype))
    plain = dtype == "float64" or kernel_size == 17
    assert (choose_convolution(x, kernel_size, "auto") is torch_convolution) == plain
    layouts = enumerate(("dual_chunk", "contiguous", "balanced"))
    schedules: Any = {}, {"cp_comm_type": "a2a+p2p", "a2a_size": 2}
    for (number, layout), documents in product(layouts, DOCUMENTS.values()):
        case = CausalConv1d(
            batch_of(documents, 4, layout=layout, tail=number, dtype=dtype, **schedules[number > 0]), spoiled=0,
            channels=(200, 136, 31)[number], kernel_size=kernel_size, bias=number != 1,
            activation="silu" if number else None,
        )  # fmt: skip
        assert case.check(Implementation(cp_fast), "cuda") == [], str(case)


def test_gradients_of_a_convolution_have_the_same_bits_every_time() -> None:
    x, dout = (torch.randn(3000, 1000, device="cuda").bfloat16() for _ in range(2))
    weight, bias = torch.randn(1000, 4, device="cuda"), torch.randn(1000, device="cuda")
    cp = SimGroup(1).run(cp_fast.ContextParallel)[0]
    sizes = {"heads_q": 1, "heads_kv": 1, "d_qk": 64, "d_v": 64, "dtype": torch.bfloat16, "device": "cuda"}
    cu = torch.tensor([0, 1000, 1001, 3000])
    plan = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, linear=True, **sizes)  # type: ignore[arg-type]
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]

    def gradients() -> tuple[torch.Tensor, ...]:
        out = cp_fast.causal_conv1d(*leaves, cp=cp, plan=plan, activation="silu")
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    for once, again in zip(gradients(), gradients(), strict=True):
        assert torch.equal(once, again)


# ---- direct launches of Triton kernels: the bits of launches by Triton, for every kind of argument in turn


def test_the_same_kernels_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from cp_fast.kernels.linear.fla import triton_kernels

    draw = torch.Generator("cuda").manual_seed(1)

    def some(shift: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Its first number lies `shift` numbers behind memory that is aligned."""
        numbers = torch.randn(torch.Size(shape).numel() + shift, generator=draw, device="cuda").to(dtype)
        return numbers[shift:].view(shape) / 10

    cases = product((torch.bfloat16, torch.float16), (0, 1), (32, 40), (True, False), ([[0, 150]], [[0, 70], [3, 4]]))
    for dtype, shift, d_k, with_w, spans in cases:
        k, w = some(shift, dtype, 150, 2, d_k), some(0, dtype, 150, 2, d_k) if with_w else None
        u, g = some(shift, dtype, 150, 2, 32), -some(0, torch.float32, 150, 2).abs()
        table = torch.tensor(spans, device="cuda")
        found = []
        for direct in (False, True, True):
            with monkeypatch.context() as patch:
                patch.setattr(triton_kernels._forward_maps, "_direct", direct)
                found.append(triton_kernels.forward_maps(k, w, u, table, g=g))
        for again in found[1:]:
            for one, other in zip(found[0], again, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert triton_kernels._forward_maps._compiled
