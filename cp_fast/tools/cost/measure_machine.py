"""Measure this machine in seconds: kernels and copies by one rank, links by two or more.

    kernels   launches of one sequence of several lengths, and of many short ones, by the backend that a plan chooses
    copy      a copy of memory
    links     every rank sends to its neighbour and hears from the other one, at several sizes: through peer memory
              where a plan's messages go there, through the process group, and between hosts where there are several
    host      the host's time of a call with a plan, against what the machine to begin with says of it; on a CPU none,
              as its kernels run on the host

Values that cannot be measured here (other links, the slowdown of kernels next to NCCL, a step's small kernels) are
copied from the given machine; `source` states this.
"""

from __future__ import annotations

import os
import platform
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from cp_fast.api.attention import attention
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan, make_plan
from cp_fast.compile.machine import Host, Kernel, Link, Machine, Rates
from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_fast.tools.cost.counts import LaunchCounts, count_alone
from cp_fast.tools.cost.predict import predict
from cp_ref.groups.group import Group, Parcel
from cp_ref.schedules.problem import Problem, Sequence

__all__ = [
    "LIKELY",
    "launch_calls",
    "least_squares",
    "measure",
]

# ---- least squares
#
# Prices from what was measured: least squares of relative errors, none below 0. numpy alone.


LIKELY = 0.1  # the weight of what a number was before, against one measurement's relative error


def least_squares(
    columns: abc.Sequence[abc.Sequence[float]], measured: abc.Sequence[float], near: abc.Sequence[float] = ()
) -> list[float]:
    """Factors from 0 of the columns, whose sum is what was measured, or as near to it as can be.

    Args:
        columns: of each measurement what its factors count, [measurements, factors].
        measured: above 0, [measurements].
        near: what the factors are likely to be, above 0, [factors]; each counts as `LIKELY` of a measurement.

    >>> [round(x, 6) for x in least_squares([[1, 2], [1, 4], [1, 6]], [3, 5, 7])]
    [1.0, 1.0]
    """
    likely = LIKELY * np.diag(1 / np.array(near)) if len(near) else np.zeros((0, len(columns[0])))
    a = np.concatenate([np.array(columns, dtype=float) / np.array(measured)[:, None], likely])
    b = np.append(np.ones(len(measured)), np.full(len(likely), LIKELY))
    kept, factors = list(range(a.shape[1])), np.zeros(a.shape[1])
    while kept:
        factors[:] = 0
        factors[kept] = np.linalg.lstsq(a[:, kept], b, rcond=None)[0]
        if (factors >= 0).all():
            break
        kept.remove(int(np.argmin(factors)))
    return factors.tolist()


# ---- measuring


_REPEATS = 5
_GPU = {"tokens": 16384, "heads_q": 32, "heads_kv": 8}
_CPU = {"tokens": 512, "heads_q": 4, "heads_kv": 2}


def measure(cp: ContextParallel, start: Machine, *, d_qk: int, d_v: int, device: torch.device) -> Machine:
    """Measure. Collective: all ranks of the context's group (schedule p2p) call it, and all get the same machine.

    Args:
        start: the machine that supplies the values not measured.
        d_qk, d_v: the head dims of the measured kernels, in bfloat16 on a GPU and float32 on a CPU.

    Raises:
        Unsupported: no backend takes these head dims here.
    """
    on_gpu = device.type == "cuda"
    sizes = _GPU if on_gpu else _CPU
    dtype = torch.bfloat16 if on_gpu else torch.float32
    total = sizes["tokens"] * cp.size
    plan = make_plan(
        cp=cp,
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, total], dtype=torch.int32),
        heads_q=sizes["heads_q"],
        heads_kv=sizes["heads_kv"],
        d_qk=d_qk,
        d_v=d_v,
        dtype=dtype,
        device=device,
    )
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    rates = _rates(plan, sizes["tokens"])
    machine = replace(
        start,
        name=name.lower().replace(" ", "-"),
        step_us=start.step_us if on_gpu else 0.0,
        copy_gbytes_s=_copy(device),
        kernels=(rates,),
        host=_host(cp, plan, start, rates) if on_gpu else Host(0.0, 0.0, 0.0, 0.0),
    )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", cp.size))
    links: dict[str, Link] = {}
    if here > 1:
        links["group"] = _link(cp.comm, device, here, start.group.slows)
        links["peer_memory"] = links["group"] if plan.messages is None else _link(plan.messages, device, here, 0.0)
        machine = replace(machine, domain=max(here, torch.cuda.device_count()))
    if cp.size > here:
        links["network"] = _link(cp.comm, device, 1, start.network.slows, hop=here)
    measured = ", ".join(["kernels", "copies", *links, *(["host"] if on_gpu else [])])
    source = f"measured by doctor --measure on {cp.size} x {name}: {measured}; the rest is that of {start.name}"
    return cp.comm.all_gather_object(replace(machine, source=source, **links))[0]


def _rates(plan: Plan, tokens: int) -> Rates:
    """Forward and backward, from launches on this rank alone."""
    problem, found = plan.problem, list[tuple[LaunchCounts, float, float]]()
    for lengths in ([tokens], [tokens // 2], [tokens // 4], [tokens // 8], [tokens // 8] * 8, [tokens // 16] * 16):
        alone = replace(problem, cp_size=1, sequences=tuple(Sequence(n, n, n, n) for n in lengths))
        forward, back = launch_calls(plan.backend, alone, VarlenBatch.pack(lengths, lengths, None, 0, plan.device))
        found.append((count_alone(alone), _seconds(forward, plan.device), _seconds(back, plan.device)))
    flops = 2e-12 * (problem.d_qk + problem.d_v)
    columns = [[1e-6, one.pairs * one.heads * flops, one.rows * one.heads * flops] for one, *_ in found]
    made: list[Kernel] = []
    for factor, seconds in ((1.0, [forward for _, forward, _ in found]), (2.5, [backward for *_, backward in found])):
        launch, pairs, edge = least_squares(columns, seconds)
        if not pairs:  # The difference of the lengths is below the noise of measurements.
            launch, pairs, edge = 0.0, least_squares([[column[1]] for column in columns], seconds)[0], 0.0
        made.append(Kernel(factor / pairs, edge / pairs, launch))
    return Rates(problem.d_qk, problem.d_v, problem.dtype, *made)


def launch_calls(
    backend: Backend, problem: Problem, segments: VarlenBatch
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A forward and a backward launch of random operands with a problem's heads, head dims and dtype; the forward one
    has run once.
    """
    dtype, device = getattr(torch, problem.dtype), segments.device_cu_q.device

    def operand(rows: int, heads: int, d: int) -> torch.Tensor:
        return torch.randn(rows, heads, d, device=device).to(dtype)

    n, m = segments.cu_q[-1], segments.cu_kv[-1]
    q, dout = operand(n, problem.heads_q, problem.d_qk), operand(n, problem.heads_q, problem.d_v)
    k, v = operand(m, problem.heads_kv, problem.d_qk), operand(m, problem.heads_kv, problem.d_v)
    options = LaunchOptions(problem.scores)
    forward = partial(backend.forward, q, k, v, segments, options)
    part = forward()
    operands = BackwardOperands(dout, q, k, v, part.out.to(dtype), part.lse, None)
    return forward, lambda: backend.backward([operands], segments, options)


def _copy(device: torch.device) -> float:
    """GB/s of a copy, reads plus writes."""
    size = 2**28 if device.type == "cuda" else 2**24
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2e-9 * size / _seconds(lambda: target.copy_(source), device)


def _link(group: Group, device: torch.device, ring: int, slows: float, hop: int = 1) -> Link:
    """The link by which every rank sends to the next one of its `ring` ranks (of each host), or `hop` further if `ring`
    is 1.
    """
    first = group.rank // ring * ring
    to, of = (
        first + (group.rank - first + n) % ring if ring > 1 else (group.rank + n * hop) % group.size for n in (1, -1)
    )
    columns, measured = list[list[float]](), list[float]()
    for size in (2**12, 2**16, 2**20, 2**22, *((2**24, 2**25) if device.type == "cuda" else ())):
        sent, come = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
        sends, recvs = [Parcel(to, 0, sent)], [Parcel(of, 0, come)]
        taken = _seconds(lambda sends=sends, recvs=recvs: group.exchange(sends, recvs).wait(), device)
        columns.append([1e-6, 1e-9 * size])
        measured.append(max(group.all_gather_object(taken)))
    latency, per_gbyte = least_squares(columns, measured)
    if not per_gbyte:
        latency, per_gbyte = 0.0, measured[-1] / columns[-1][1]
    return Link(1 / per_gbyte, latency, slows)


def _host(cp: ContextParallel, plan: Plan, start: Machine, rates: Rates) -> Host:
    """The host's times of the given machine, times a factor: the measured time of calls over the predicted one."""
    problem, rows = plan.problem, plan.problem.lengths.slots_q[0] // cp.size

    def leaf(heads: int, d: int) -> torch.Tensor:
        return torch.randn(rows, heads, d, device=plan.device).to(getattr(torch, problem.dtype)).requires_grad_()

    inputs = (
        leaf(problem.heads_q, problem.d_qk),
        leaf(problem.heads_kv, problem.d_qk),
        leaf(problem.heads_kv, problem.d_v),
    )
    dout = leaf(problem.heads_q, problem.d_v).detach()

    def call() -> None:
        torch.autograd.grad(attention(*inputs, cp=cp, plan=plan), inputs, dout)

    taken: list[float] = []
    for _ in range(_REPEATS + 1):
        torch.cuda.synchronize(plan.device)
        began = perf_counter()
        call()
        taken.append(perf_counter() - began)
    torch.cuda.synchronize(plan.device)
    factor = (
        max(cp.comm.all_gather_object(median(taken[1:]))) / predict(problem, replace(start, kernels=(rates,))).host_s
    )
    return Host(*(factor * x for x in vars(start.host).values()))


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median of several calls after one warm-up; on a GPU by events, each around several calls."""
    call()
    if device.type != "cuda":
        taken: list[float] = []
        for _ in range(_REPEATS):
            began = perf_counter()
            call()
            taken.append(perf_counter() - began)
        return median(taken)
    torch.cuda.synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    for mark in marks[:-1]:
        mark.record()
        call()
    marks[-1].record()
    torch.cuda.synchronize(device)
    return 1e-3 * median(a.elapsed_time(b) for a, b in pairwise(marks))
