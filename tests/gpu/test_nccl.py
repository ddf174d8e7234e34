"""cp_fast with a process for each GPU, over NCCL and through peers' memory: the simulated group's bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn

import cp_fast
from cp_fast.peers.exchange import PeerMessages
from cp_fast.peers.group import Crossed
from cp_ref import SimGroup, dense_attention
from cp_ref.sim import SimMember

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

LENGTHS, SLOTS = [1500, 3, 0, 700], [1537, 24, 0, 722]  # which no layout cuts without a rest
CASES: list[tuple[str, dict[str, Any]]] = [
    ("p2p", {}),
    ("p2p", {"attn_mask_type": "padding"}),
    ("p2p", {"window_size": (200, 0)}),
    ("p2p", {"attn_mask_type": "padding", "window_size": (64, 32)}),
    ("all_gather", {}),
    ("all_gather", {"window_size": (200, 0)}),
    ("a2a", {}),
    ("a2a+p2p", {}),
    ("a2a+p2p", {"window_size": (200, 0)}),
]
LAYOUTS = ("dual_chunk", "contiguous", "balanced")


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], dtype=torch.int32)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    total = sum(SLOTS)
    shapes = {"q": (total, 8, 128), "k": (total, 2, 128), "v": (total, 2, 128), "dout": (total, 8, 128)}
    return {name: torch.randn(*shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def play(group: Any, comm: str, arguments: dict[str, Any], layout: str) -> dict[str, torch.Tensor]:
    """One rank's share, planned; global results."""
    cp = cp_fast.ContextParallel(group, comm, layout=layout)
    plan = cp_fast.make_plan(
        cp=cp,
        qkv_format="thd",
        cu_seqlens_q=cumulative(LENGTHS),
        cu_seqlens_q_padded=cumulative(SLOTS),
        heads_q=8,
        heads_kv=2,
        d_qk=128,
        d_v=128,
        dtype=torch.bfloat16,
        device=torch.device("cuda", torch.cuda.current_device()),
        deterministic=True,
        **arguments,
    )
    local = {name: cp_fast.shard(x.cuda(), cp=cp, plan=plan) for name, x in tensors().items()}
    q, k, v = (local[name].requires_grad_() for name in "qkv")
    if isinstance(group, dist.ProcessGroup | DeviceMesh):
        by_copies = isinstance(plan.messages, PeerMessages | Crossed)
        assert by_copies == (os.environ["CP_FAST_MESSAGES"] == "peers"), plan.messages
    out, lse = cp_fast.attention(q, k, v, cp=cp, plan=plan, deterministic=True, return_lse=True)
    out.backward(local["dout"])
    results = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad, "lse": lse.detach().t().contiguous()}
    return {name: cp_fast.unshard(x, cp=cp, plan=plan).cpu() for name, x in results.items() if x is not None}


def captured(group: Any, comm: str) -> bool:
    """Whether both passes, captured in a CUDA graph and replayed with other inputs, give what eager calls give."""
    cp = cp_fast.ContextParallel(group, comm)
    split = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": cumulative(SLOTS)}
    sizes: dict[str, Any] = {"heads_q": 8, "heads_kv": 2, "d_qk": 128, "d_v": 128, "dtype": torch.bfloat16}
    sizes |= {"cu_seqlens_q": cumulative(LENGTHS), "cu_seqlens_q_padded": cumulative(SLOTS)}
    plan = cp_fast.make_plan(cp=cp, qkv_format="thd", device="cuda", deterministic=True, **sizes)

    def both(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = cp_fast.attention(leaves[0], leaves[1], leaves[2], cp=cp, plan=plan, deterministic=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]

    local = [cp_fast.shard(x.cuda(), **split) for x in tensors().values()]
    static = [torch.zeros_like(x) for x in local]
    with torch.autograd.set_multithreading_enabled(False):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            both(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = both(static)
        for buffer, x in zip(static, local, strict=True):
            buffer.copy_(x)
        graph.replay()
        expected = both(local)
    torch.cuda.synchronize()
    return all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def worker(rank: int, size: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    mesh = init_device_mesh("cuda", (size // 2, 2))
    groups = {comm: mesh if comm == "a2a+p2p" else dist.group.WORLD for comm, _ in CASES}
    found = [play(groups[comm], comm, case, layout) for comm, case in CASES for layout in LAYOUTS]
    torch.save(found, Path(folder) / f"{rank}.pt")
    same = {comm: captured(group, comm) for comm, group in groups.items()}
    torch.save(same, Path(folder) / f"graphs {rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("messages", ["group", "peers"])
@pytest.mark.parametrize("size", [n for n in (2, 4, 8) if n <= GPUS] or [2])
def test_processes_give_what_the_simulated_group_gives(
    size: int, messages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("CP_FAST_MESSAGES", messages)  # which the processes inherit
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, args=(size, folder), nprocs=size)
        by_rank = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(size)]
        graphs = [torch.load(Path(folder) / f"graphs {rank}.pt") for rank in range(size)]
    assert all(all(same.values()) for same in graphs), graphs
    number = 0
    for comm, case in CASES:
        inputs = {name: x.cuda().double() for name, x in tensors().items()}
        q, k, v = (inputs[name].requires_grad_() for name in "qkv")
        lengths = {"cu_seqlens_q": cumulative(LENGTHS), "cu_seqlens_q_padded": cumulative(SLOTS)}
        out, _, _ = dense_attention(q, k, v, qkv_format="thd", **lengths, **case)
        out.backward(inputs["dout"])
        exact = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
        for layout in LAYOUTS:

            def one(member: SimMember, comm: str = comm, case: dict[str, Any] = case, layout: str = layout) -> Any:
                return play(member.split(2) if comm == "a2a+p2p" else member, comm, case, layout)

            simulated = SimGroup(size).run(one)
            for rank in range(size):
                for name, x in simulated[rank].items():
                    assert torch.equal(by_rank[rank][number][name], x), (comm, case, layout, rank, name)
            for name, x in exact.items():
                assert x is not None
                error = (simulated[0][name].cuda().double() - x).norm() / x.norm()
                assert error < 6e-3, (comm, case, layout, name, error.item())
            number += 1


def lonely(rank: int, store: str) -> None:
    """Rank 1 plans, and is gone before it sends; rank 0 waits for its messages."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
        timeout=timedelta(seconds=8),
    )
    cp = cp_fast.ContextParallel(dist.group.WORLD, "p2p")
    x = torch.randn(512, 8, 128, device="cuda", dtype=torch.bfloat16)
    how: dict[str, Any] = {"cp": cp, "qkv_format": "thd", "cu_seqlens_q": cumulative([1024])}
    sizes: dict[str, Any] = {"heads_q": 8, "heads_kv": 8, "d_qk": 128, "d_v": 128, "dtype": x.dtype, "device": "cuda"}
    plan = cp_fast.make_plan(**how, **sizes)
    cp_fast.attention(x, x, x, cp=cp, plan=plan)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out = cp_fast.attention(x, x, x, cp=cp, plan=plan)
    print("a number:", out.float().sum().item(), flush=True)
    os._exit(0)


def test_a_killed_rank_is_named_in_time_and_no_number_comes_out(tmp_path: Path) -> None:
    code = "import sys; from tests.gpu.test_nccl import lonely; lonely(int(sys.argv[1]), sys.argv[2])"
    environment = os.environ | {"CP_FAST_MESSAGES": "peers", "NCCL_NVLS_ENABLE": "0"}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(2):
            command = [sys.executable, "-c", code, str(rank), str(tmp_path / "store")]
            with (tmp_path / f"{rank}.txt").open("wb") as said:  # no pipe: a helper process may keep it open
                ranks.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
        ranks[1].wait(timeout=60)
        began = time.monotonic()
        while ranks[0].poll() is None and time.monotonic() < began + 40:
            time.sleep(0.2)
        took, code_of_0 = time.monotonic() - began, ranks[0].poll()
    finally:
        for process in ranks:
            process.kill()
    text = (tmp_path / "0.txt").read_text(errors="replace")
    assert "forward, step 0 of 2: global rank 0: messages with global rank 1 did not come through within 8 s" in text
    assert "a number" not in text, text
    assert code_of_0 not in (None, 0), (took, text)
    assert 7 < took < 30, (took, text)
