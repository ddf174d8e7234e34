"""One rank of the demonstration: its slice of the documents, attention forward and backward, the gathered results."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import cp_fast
from cp_fast.tools.cli.demo.job import Job
from cp_ref.spec import Problem, Schedule

__all__ = ["Measured", "run_rank"]


@dataclass(frozen=True)
class Measured:
    """Global tensors on the CPU, in sequence order, and every rank's times."""

    tensors: dict[str, torch.Tensor]  # q, k, v, dout, out, dq, dk, dv [t, h, d]; lse [h_q, t]; positions, ids [t]
    seconds: list[tuple[float, float]]  # forward and backward
    problem: Problem
    schedule: Schedule


def run_rank(job: Job, device: torch.device) -> Measured:
    """Run this rank of the default process group, which must exist. Collective; every rank gets all results."""
    group: Any = dist.group.WORLD
    if job.cp_comm_type == "a2a+p2p":  # neighbours exchange heads, the ring goes around their groups
        group = init_device_mesh(device.type, (job.where[0] // job.exchanging, job.exchanging))
    words = cast(Any, (job.cp_comm_type, job.layout))  # the context refuses wrong words
    cp = cp_fast.ContextParallel(group, words[0], layout=words[1], backend=job.backend)
    if job.spoil == f"rank {cp.rank}":
        raise RuntimeError("this rank was told to fail")
    problem = job.problem()
    packed: dict[str, Any] = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": problem["cu_seqlens_q_padded"]}
    ids = cp_fast.shard(job.token_ids(), **packed).to(device)
    positions = cp_fast.position_ids(device=device, **packed)
    q, k, v = job.qkv(ids, positions)
    dout = cp_fast.shard(job.dout(), **packed).to(device)
    plan = cp_fast.make_plan(cp=cp, device=device, **problem)

    def both_passes() -> tuple[torch.Tensor, torch.Tensor, tuple[float, float]]:
        q.grad = k.grad = v.grad = None
        dist.barrier()
        began = time.perf_counter()
        out, lse = cp_fast.attention(q, k, v, cp=cp, qkv_format="thd", plan=plan, return_lse=True)
        forward_s = _seconds(device, began)
        dist.barrier()
        began = time.perf_counter()
        out.backward(dout)
        return out, lse, (forward_s, _seconds(device, began))

    both_passes()  # compiles kernels and opens connections
    out, lse, own_seconds = both_passes()
    local = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    local |= {"lse": lse.transpose(0, 1), "positions": positions, "ids": ids}
    whole = {n: cp_fast.unshard(x.detach().contiguous(), **packed).cpu() for n, x in local.items() if x is not None}
    seconds = [(0.0, 0.0)] * cp.size
    dist.all_gather_object(seconds, own_seconds)
    return Measured(whole | {"lse": whole["lse"].transpose(0, 1)}, seconds, plan.problem, plan.schedule)


def _seconds(device: torch.device, began: float) -> float:
    """The time since `began` when this rank's device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
