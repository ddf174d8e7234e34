"""The bits that a plan promises (`plan.same_bits`) are those of one launch over the whole batch on one GPU, for any
number of ranks, layout, neighbours and head chunks. All ranks share the GPU; `tests.gpu.over_processes` compares
processes with the simulated group.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.kernels.attention.fa2 import BUILT_IN
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.reference.simulator import SimGroup
from cp_ref.schedules.problem import ScoreSpec
from tests.cp_fast.compile.planned_at import ALWAYS_CHUNKS, NEVER_CHUNKS, planned_at

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RESULTS = ("out", "lse", "dq", "dk", "dv")
DOCUMENTS = {"one": [4096], "packed": [2048, 512, 1024, 256, 64, 192]}  # each divides by 2 * cp_size
HEADS = {2: (8, 4), 3: (6, 3), 4: (8, 4), 8: (16, 8)}  # query heads and kv heads, by cp_size
WINDOWS = ((-1, 0), (-1, -1), (300, 0))


def alone(
    backend: Backend, x: dict[str, torch.Tensor], lengths: list[int], window: tuple[int, int], *, deterministic: bool
) -> dict[str, torch.Tensor]:
    """One launch of the kernel library over the whole batch."""
    left, right = (None if n < 0 else n for n in window)
    segments = VarlenBatch.pack(lengths, lengths, left, right, "cuda")
    options = LaunchOptions(ScoreSpec(x["q"].shape[-1] ** -0.5), deterministic)
    out, lse, _ = backend.forward(x["q"], x["k"], x["v"], segments, options)
    grads = backend.backward([BackwardOperands(x["dout"], x["q"], x["k"], x["v"], out, lse, None)], segments, options)
    return dict(zip(RESULTS, (out, lse.t(), *grads), strict=True))


def over_ranks(
    x: dict[str, torch.Tensor], lengths: list[int], window: tuple[int, int], member: Any, **how: Any
) -> dict[str, Any]:
    """All results, whole, and what rank 0's plan promises."""
    deterministic = how.pop("deterministic")
    cp = cp_fast.ContextParallel(member, **how)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    sizes: dict[str, Any] = {"heads_q": x["q"].shape[1], "heads_kv": x["k"].shape[1]}
    sizes |= {"d_qk": x["q"].shape[2], "d_v": x["v"].shape[2]}
    plan = cp_fast.make_plan(
        cp=cp,
        qkv_format="thd",
        attn_mask_type="padding_causal" if window[1] == 0 else "padding",
        window_size=window,
        cu_seqlens_q=ends,
        dtype=torch.bfloat16,
        device="cuda",
        deterministic=deterministic,
        **sizes,
    )
    local = {name: cp_fast.shard(one, cp=cp, plan=plan) for name, one in x.items()}
    leaves = [local[name].requires_grad_() for name in "qkv"]
    out, lse = cp_fast.attention(*leaves, cp=cp, plan=plan, return_lse=True, deterministic=deterministic)
    grads = torch.autograd.grad(out, leaves, local["dout"])
    whole = [cp_fast.unshard(one, cp=cp, plan=plan) for one in (out.detach(), lse.detach().t().contiguous(), *grads)]
    return dict(zip(RESULTS, whole, strict=True)) | {"promised": plan.same_bits}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous", "balanced"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("cp_size", HEADS)
def test_the_bits_are_those_of_one_launch(cp_size: int, documents: str, layout: Any, deterministic: bool) -> None:
    """Promised are out and lse of all_gather and a2a; with `deterministic` dq too, and in a2a dk and dv."""
    lengths = [n * 3 if cp_size == 3 else n for n in DOCUMENTS[documents]]
    compare("fa4", cp_size, lengths, (128, 128), WINDOWS, layout, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("cp_size", HEADS)
def test_the_bits_of_flash_attention_2(cp_size: int, dims: tuple[int, int], deterministic: bool) -> None:
    """PyTorch's: out and lse; with `deterministic`, dk and dv of a2a."""
    if by_name("fa2") is not BUILT_IN:
        pytest.skip("needs PyTorch's own kernels: the flash-attn package is installed")
    layout = ("dual_chunk", "contiguous", "balanced")[cp_size % 3]
    lengths = [2064, 528, 1056, 48, 240]  # each divides by 2 * cp_size; few begin with a block of the buffer
    compare("fa2", cp_size, lengths, dims, WINDOWS, layout, deterministic=deterministic)


@pytest.mark.parametrize("cp_size", HEADS)
def test_the_bits_of_cudnn(cp_size: int) -> None:
    """out and lse."""
    layout = ("contiguous", "balanced", "dual_chunk")[cp_size % 3]
    compare("cudnn", cp_size, [2064, 528, 1056, 48, 240], (128, 128), WINDOWS, layout, deterministic=False)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (256, 256)])
def test_windows_have_the_bits_in_other_head_dims(dims: tuple[int, int]) -> None:
    """Their kernels have other blocks of keys, which divide the backend's `key_block`."""
    for deterministic in (False, True):
        lengths = [2064, 528, 1040]  # None begins with a block of the buffer.
        compare("fa4", 4, lengths, dims, ((300, 0), (1000, 0)), "dual_chunk", deterministic=deterministic)


def compare(
    name: str,
    cp_size: int,
    lengths: list[int],
    dims: tuple[int, int],
    windows: tuple[tuple[int, int], ...],
    layout: Any,
    *,
    deterministic: bool,
) -> None:
    """Compare what plans promise with one launch, and what they have to promise with what they do."""
    backend = by_name(name)
    if (reason := backend.why_not()) is not None:
        pytest.skip(f"needs backend {name}: {reason}")
    h_q, h_kv = HEADS[cp_size]
    draw = torch.Generator(device="cuda").manual_seed(cp_size)
    shapes = {"q": (h_q, dims[0]), "k": (h_kv, dims[0]), "v": (h_kv, dims[1]), "dout": (h_q, dims[1])}
    x = {n: torch.randn(sum(lengths), *s, generator=draw, device="cuda").bfloat16() for n, s in shapes.items()}
    gradients = {"all_gather": ("dq",) * deterministic, "a2a": ("dq", "dk", "dv") * deterministic}
    wanted = {comm: {"out", "lse", *some}.intersection(backend.bits_of) for comm, some in gradients.items()}
    for window in windows:
        whole = alone(backend, x, lengths, window, deterministic=deterministic)
        for comm, results in wanted.items():
            for chunks in (NEVER_CHUNKS, ALWAYS_CHUNKS):
                with planned_at(chunks), torch.autograd.set_multithreading_enabled(False):
                    found = SimGroup(cp_size).run(
                        lambda member, comm=comm, window=window: over_ranks(
                            x,
                            lengths,
                            window,
                            member,
                            backend=name,
                            cp_comm_type=comm,
                            layout=layout,
                            deterministic=deterministic,
                        )
                    )
                promised = set(found[0]["promised"])
                assert results <= promised, (comm, window, promised)
                for result in set.intersection(*(set(one["promised"]) for one in found)):
                    assert torch.equal(found[0][result], whole[result]), (comm, window, result)
