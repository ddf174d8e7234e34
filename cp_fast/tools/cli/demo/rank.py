"""The work of one rank: its slice of the documents, attention forward and backward, and the gathered results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import cp_fast
from cp_fast.tools.cli.demo.job import Job
from cp_fast.tools.cli.demo.model import Model, random_grad
from cp_ref.spec import Problem, Schedule

__all__ = ["STAGES", "Measured", "run_rank"]

STAGES = ("starts", "slices", "plans", "warms up", "forward", "backward", "collects", "is done")
"""What `note` is told, in this order."""


@dataclass(frozen=True)
class Measured:
    """The final result on rank 0: global tensors on the CPU, in sequence order, and every rank's times."""

    tensors: dict[str, torch.Tensor]  # q, k, v, dout, out, dq, dk, dv [t, h, d]; lse [h_q, t]; positions, ids [t]
    forward_s: list[float]
    backward_s: list[float]
    problem: Problem
    schedule: Schedule


def run_rank(job: Job, device: torch.device, note: Callable[[str], None]) -> Measured:
    """Run this rank of the default process group, which must exist. Collective; every rank gets all results."""
    note("slices")
    cp = cp_fast.ContextParallel(_group(job, device), job.cp_comm_type, layout=job.layout, backend=job.backend)
    if job.spoil == f"rank {cp.rank}":
        raise RuntimeError("this rank was told to fail")
    packed: dict[str, Any] = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": job.cu_seqlens_padded}
    ids = cp_fast.shard(job.token_ids(), **packed).to(device)
    positions = cp_fast.position_ids(device=device, **packed)
    q, k, v = (x.requires_grad_() for x in Model(job, device).qkv(ids, positions))
    dout = cp_fast.shard(random_grad(job), **packed).to(device)
    note("plans")
    plan = cp_fast.make_plan(
        cp=cp,
        qkv_format="thd",
        attn_mask_type=job.attn_mask_type,
        window_size=job.window_size,
        cu_seqlens_q=job.cu_seqlens,
        cu_seqlens_q_padded=job.cu_seqlens_padded,
        heads_q=job.heads_q,
        heads_kv=job.heads_kv,
        d_qk=job.head_dim,
        d_v=job.head_dim,
        dtype=job.torch_dtype,
        device=device,
    )
    for stage in (
        "warms up",
        "forward",
    ):  # The first round compiles kernels and opens connections; the second is measured.
        note(stage)
        q.grad = k.grad = v.grad = None
        began = _time(device, together=True)
        out, lse = cp_fast.attention(q, k, v, cp=cp, qkv_format="thd", plan=plan, return_lse=True)
        forward_s = _time(device) - began
        if stage == "forward":
            note("backward")
        began = _time(device, together=True)
        out.backward(dout)
        backward_s = _time(device) - began
    note("collects")
    local = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    local |= {"lse": lse.transpose(0, 1), "positions": positions, "ids": ids}
    tensors = {
        name: cp_fast.unshard(x.detach().contiguous(), **packed).cpu() for name, x in local.items() if x is not None
    }
    tensors["lse"] = tensors["lse"].transpose(0, 1)
    times: list[tuple[float, float]] = [(0.0, 0.0)] * cp.size
    dist.all_gather_object(times, (forward_s, backward_s))
    note("is done")
    return Measured(tensors, [f for f, _ in times], [b for _, b in times], plan.problem, plan.schedule)


def _group(job: Job, device: torch.device) -> Any:
    """All ranks; for "a2a+p2p" as a mesh [p2p, a2a]: neighbours exchange heads, the ring goes around their groups."""
    if job.cp_comm_type == "a2a+p2p":
        return init_device_mesh(device.type, (job.ranks // job.a2a_size, job.a2a_size))
    return dist.group.WORLD


def _time(device: torch.device, together: bool = False) -> float:
    """The time when this rank's device has finished; `together`: when all ranks have reached this line too."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if together:
        dist.barrier()
    return time.perf_counter()
