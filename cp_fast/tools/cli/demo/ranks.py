"""The ranks of the demonstration: each runs attention on its slice. A rank that fails ends all of them and is named."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import cp_fast
from conformance.runner.processes import run_together
from cp_fast.build import BuildError, Unavailable
from cp_fast.tools.cli.demo.job import Job
from cp_ref.contract.cli.terminal import one_line
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.words import Unsupported

__all__ = ["Measured", "RankFailed", "run_rank", "spawn"]

_LIMIT = timedelta(minutes=5)  # For any one message: a rank that hangs is an error.


@dataclass(frozen=True)
class Measured:
    """Global tensors on the CPU, in sequence order, and every rank's times."""

    tensors: dict[str, torch.Tensor]  # q, k, v, dout, out, dq, dk, dv [t, h, d]; lse [t, h_q]; positions, ids [t]
    seconds: list[tuple[float, float]]  # forward and backward
    problem: Problem
    schedule: Schedule


class RankFailed(RuntimeError):
    """A rank raised or died. args: the rank and its error, and the traceback if there is one."""


def spawn(job: Job) -> Measured:
    """Run every rank in a separate process. Raises what the first one raised; then the others have been ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # PyTorch is imported once, not in every rank.
    with tempfile.TemporaryDirectory(prefix="cp_fast_demo_") as folder:
        places = {f"rank {rank}": (job, rank, rank, f"file://{folder}/store") for rank in range(job.where[0])}
        return run_together(context, run_rank, places, RankFailed)[0]


def run_rank(place: tuple[Job, int, int, str]) -> Measured | None:
    """This rank, from start to end; rank 0 has the results.

    place: the job, the rank, its number on this machine, and the process group's `init_method`.

    Raises:
        ValueError: the rank refused the options. RankFailed: it raised another error.
    """
    job, rank, local_rank, init_method = place
    world, kind, _ = job.where
    cuda, loopback = kind == "cuda", {"lo", "lo0"} & {interface for _, interface in socket.if_nameindex()}
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    try:
        if cuda:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        if loopback and init_method != "env://":  # all ranks are on this machine: gloo needs no name resolution
            os.environ.setdefault("GLOO_SOCKET_IFNAME", min(loopback))
        group = {"init_method": init_method, "rank": rank, "world_size": world, "device_id": device if cuda else None}
        dist.init_process_group("nccl" if cuda else "gloo", timeout=_LIMIT, **group)
        measured = _measure(job, device)
        dist.destroy_process_group()
        return measured
    except Exception as error:
        message = f"rank {rank} failed: {type(error).__name__}: {one_line(error)}"
        if isinstance(error, ValueError | Unsupported):  # about the options: the message is enough
            raise ValueError(message) from error
        says_what_to_do = isinstance(error, BuildError | Unavailable)
        details = () if says_what_to_do else (traceback.format_exc(),)
        raise RankFailed(message, *details) from error


def _measure(job: Job, device: torch.device) -> Measured | None:
    """Attention on this rank's slice, forward and backward. Collective."""
    group: Any = dist.group.WORLD
    if job.cp_comm_type == "a2a+p2p":  # neighbours exchange heads, the ring goes around their groups
        group = init_device_mesh(device.type, (job.where[0] // job.exchanging, job.exchanging))
    words: Any = {"cp_comm_type": job.cp_comm_type, "layout": job.layout}  # the context refuses wrong words
    cp = cp_fast.ContextParallel(group, backend=job.backend, **words)
    if job.spoil == f"rank {cp.rank}":
        raise RuntimeError("this rank was told to fail")
    if job.spoil == f"death of rank {cp.rank}":
        os._exit(7)
    plan = cp_fast.make_plan(cp=cp, device=device, **job.problem())
    ids = cp_fast.shard(job.token_ids(), cp=cp, plan=plan).to(device)
    positions = cp_fast.position_ids(cp=cp, plan=plan, device=device)
    q, k, v = job.qkv(ids, positions)
    dout = cp_fast.shard(job.dout(), cp=cp, plan=plan).to(device)

    def timed(run: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        dist.barrier()
        began = time.perf_counter()
        result = run(*arguments)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return result, time.perf_counter() - began

    forward = partial(cp_fast.attention, q, k, v, cp=cp, plan=plan, return_lse=True)
    forward()[0].backward(dout)  # compiles kernels and opens connections
    q.grad = k.grad = v.grad = None
    (out, lse), forward_s = timed(forward)
    _, backward_s = timed(out.backward, dout)
    local: dict[str, Any] = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse.t(), "ids": ids}
    local |= {"dq": q.grad, "dk": k.grad, "dv": v.grad, "positions": positions}
    whole = {n: cp_fast.unshard(x.detach().contiguous(), cp=cp, plan=plan).cpu() for n, x in local.items()}
    seconds = [(0.0, 0.0)] * cp.size
    dist.all_gather_object(seconds, (forward_s, backward_s))
    return None if cp.rank else Measured(whole, seconds, plan.problem, plan.schedule)
