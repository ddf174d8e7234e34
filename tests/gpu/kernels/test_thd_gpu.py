"""cp_fast.thd on a GPU, in three implementations: what only a GPU can show. The kernels' own suite is next door."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from conformance.adapters.cp_fast import operator_calls, tensors
from tests.cp_fast.kernels.checks.case import Where, assert_same_bits
from tests.cp_fast.kernels.operators import HELPERS, KERNELS, flat, other_values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("call", list(operator_calls("cpu")))
def test_opcheck(call: str) -> None:
    """Once: how an operator is registered is the same for every implementation."""
    operator, arguments = operator_calls("cuda")[call]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("helper", list(HELPERS))
def test_helpers_agree_with_the_cpu(where: Where, helper: str) -> None:
    """With lengths on the GPU; and with lengths on the CPU, which go there through pinned memory."""
    with where.use():
        got = flat(HELPERS[helper](tensors("cuda")))
        lengths = {name: tensors("cpu")[name] for name in ("cu", "real", "local", "held")}
        lengths_alone = helper in ("indices", "real")  # on the CPU, these are computed there
        mixed = got if lengths_alone else flat(HELPERS[helper](tensors("cuda") | lengths))
    for want, one, other in zip(flat(HELPERS[helper](tensors("cpu"))), got, mixed, strict=True):
        torch.testing.assert_close(one.cpu(), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(other.cpu(), one.cpu())


@pytest.mark.parametrize("helper", list(HELPERS | KERNELS))
def test_captured_and_replayed_with_other_values(where: Where, helper: str) -> None:
    t, call = tensors("cuda"), (HELPERS | KERNELS)[helper]
    with where.use():
        call(t)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = flat(call(t))
        other_values(t)
        graph.replay()
        for got, want in zip(results, flat(call(t)), strict=True):
            assert torch.equal(got, want)


def test_lengths_on_the_cpu_are_not_captured(where: Where) -> None:
    t = tensors("cuda") | {"cu": tensors("cpu")["cu"]}
    graph = torch.cuda.CUDAGraph()
    with where.use():
        HELPERS["half"](t)
        with (
            pytest.raises(ValueError, match="in the capture of a CUDA graph it must be on cuda"),
            torch.cuda.graph(graph),
        ):
            HELPERS["half"](t)
    torch.cuda.synchronize()


def test_nothing_waits_on_any_stream(where: Where) -> None:
    """Every helper is called while its stream sleeps, and has returned before it wakes; the inputs are written on that
    stream, behind the sleep, so that work on another stream would read what was there before.
    """
    calls = HELPERS | KERNELS | {"half, lengths on the CPU": lambda t: HELPERS["half"](t | {"cu": lengths})}
    old, new, stream, lengths = tensors("cuda"), tensors("cuda"), torch.cuda.Stream(), tensors("cpu")["cu"]
    other_values(new)
    with where.use():
        want = {name: [x.clone() for x in flat(call(new))] for name, call in calls.items()}
        for call in calls.values():
            call(old)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for call in calls.values():
                call(old)  # memory of this stream's pool, so that nothing has to be allocated below
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                torch.cuda._sleep(14_000_000_000)  # some seconds: the host may be busy
                for name, x in old.items():
                    x.copy_(new[name])
                got = {name: flat(call(old)) for name, call in calls.items()}
                asleep = not stream.query()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        stream.synchronize()
    assert asleep, "a helper has waited for the GPU"
    for name, results in got.items():
        for one, other in zip(results, want[name], strict=True):
            assert torch.equal(one, other), name


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
def test_a_batch_is_cut_without_waiting(where: Where, layout: Any) -> None:
    cu, ids = torch.tensor([0, 8, 8, 12]), torch.arange(100, 116)
    batch = {"ids": ids, "hidden": torch.randn(16, 3), "mask": ids > 107}

    def part(member: Any) -> dict[str, Any]:
        cp = cp_fast.ContextParallel(member, layout=layout)
        on_gpu = {name: x.cuda() for name, x in batch.items()}
        lengths = cu.cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return cp_fast.thd.get_batch_on_this_cp_rank(on_gpu, cp=cp, qkv_format="thd", cu_seqlens_padded=lengths)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def wanted(member: Any) -> dict[str, Any]:
        cp = cp_ref.ContextParallel(member, layout=layout)
        return cp_ref.thd.get_batch_on_this_cp_rank(batch, cp=cp, qkv_format="thd", cu_seqlens_padded=cu)

    with where.use():
        got = cp_ref.SimGroup(2).run(part)
    for one, other in zip(got, cp_ref.SimGroup(2).run(wanted), strict=True):
        for name in batch:
            assert_same_bits(one[name], other[name])


@pytest.mark.usefixtures("much_memory")
def test_buffers_past_two_to_the_31(where: Where) -> None:
    """5 GB, and offsets past 2^32 bytes."""
    tokens, width = 2**20, 4800
    cu = torch.tensor([0, 2**19, 2**19 + 2**10, 2**20])
    x = torch.randint(-128, 127, (tokens, width), dtype=torch.int8, device="cuda")
    rows = cp_ref.thd.thd_sequence_order_to_cp_rank_order(torch.arange(tokens), cu, 4).cuda()
    with where.use():
        got = cp_fast.thd.thd_sequence_order_to_cp_rank_order(x, cu.cuda(), 4)
        for begin in range(0, tokens, 2**17):
            some = slice(begin, begin + 2**17)
            assert torch.equal(got[some], x.index_select(0, rows[some]))
        back = cp_fast.thd.thd_cp_rank_order_to_sequence_order(got, cu.cuda(), 4)
        assert torch.equal(back, x)
        del back, got
        total = x.view(torch.int8)[:, :1200].reshape(tokens, 1200).float()
        grad = torch.zeros(tokens, 1200, device="cuda")  # 5 GB too
        cp_fast.thd.thd_grad_correction(grad, total, cu.cuda(), "copy", "add")
        assert torch.equal(grad, total)


def test_lengths_on_a_gpu_that_cannot_be_used(where: Where) -> None:
    t = tensors("cuda")
    with where.use():
        with pytest.raises(ValueError, match=r"cu_seqlens_padded is on cuda:0 and the data on cpu"):
            cp_fast.thd.thd_read_half_tensor(tensors("cpu")["x"], t["cu"], 0)
        with pytest.raises(ValueError, match="padded_tokens is None, and cu_seqlens is on cuda:0"):
            cp_fast.thd.pad_thd_sequences_for_cp(t["ids"], t["ids"], t["real"], 4)
        with pytest.raises(ValueError, match=r"grad is on cuda:0 and grad_step on cpu"):
            cp_fast.thd.thd_grad_correction(t["out"], tensors("cpu")["step"], t["local"], "add", "add")


BROKEN = {
    "reorder": "thd.thd_sequence_order_to_cp_rank_order(x, cu, 2)",
    "read_half": "thd.thd_read_half_tensor(x, cu + torch.tensor([0, 1, 0], device='cuda'), 0)",
    "grad_correction": "thd.thd_grad_correction(x, x.clone(), cu, 'add', 'add')",
}


@pytest.mark.parametrize("helper", list(BROKEN))
def test_broken_lengths_end_in_an_assertion(where: Where, helper: str) -> None:
    """In a process of its own: the GPU's context is lost. Lengths end far behind the tensor."""
    code = (
        "import torch; from cp_fast import thd\n"
        "x = torch.zeros(16, 4, device='cuda'); cu = torch.tensor([0, 8, 2**40], device='cuda')\n"
        "torch.cuda.synchronize(); print('ready', flush=True)\n"
        f"{BROKEN[helper]}\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "CP_FAST_KERNELS": where.name, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = done.stdout + done.stderr
    assert "ready" in done.stdout, report
    assert done.returncode != 0
    assert "device-side assert" in report, report
    if where.name != "torch":  # PyTorch's own assertion prints no message in every release
        assert "cp_fast" in report, report
        assert helper in report, report
        assert "length" in report, report
