"""Errors of linear layers in low precision, on any device: how far results and gradients are from the oracle's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conformance.run.case_tensors import plan_arguments
from cp_ref import SimGroup
from cp_ref.linear.oracle import dense_linear_attention
from cp_ref.simulator.sim_group import SimMember
from cp_ref.spec import Problem
from tests.linear.played import Layer

__all__ = ["relative_errors"]


def relative_errors(
    package: Any,
    problem: Problem,
    layer: Layer,
    dtype: torch.dtype,
    device: str,
    *,
    cp_size: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Of every result and gradient, the root of the mean square of the error over that of the oracle's value.

    The oracle has the same inputs, rounded to `dtype` (g to float32), in float64. cp_size: instead of the problem's,
    with the schedule p2p and rows in order. Gradients of initial states are summed over the ranks.
    """
    size = problem.cp_size if cp_size is None else cp_size
    words = {"cp_comm_type": "p2p", "a2a_size": 1, "layout": "contiguous"} if cp_size is not None else {}
    problem = replace(problem, cp_size=size, dtype=str(dtype).removeprefix("torch."), **words)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(seed)
    fmt, heads_v = problem.qkv_format, layer.heads * layer.shared
    lead = (problem.starts_q[-1],) if fmt == "thd" else (len(problem.sequences), max(problem.lengths.slots_q))
    lead = lead[::-1] if fmt == "sbhd" else lead

    def some(*last: int) -> torch.Tensor:
        return torch.randn(*lead, *last, generator=draw)

    tensors = {name: torch.nn.functional.normalize(some(layer.heads, layer.d_k), dim=-1).to(dtype) for name in "qk"}
    tensors["v"] = some(heads_v, layer.d_v).to(dtype)
    tensors["g"] = -0.2 * some(*((heads_v, layer.d_k) if layer.kind == "kda" else (heads_v,))).abs()
    if layer.kind != "mamba2":
        tensors["beta"] = some(heads_v).sigmoid().to(dtype)
    states = len(problem.sequences), heads_v, layer.d_k, layer.d_v
    state = torch.randn(states, generator=draw) if layer.initial_state else None
    dout, dfinal = some(heads_v, layer.d_v).to(dtype), torch.randn(states, generator=draw)

    real, slots = ([0, *torch.tensor(list(x)).cumsum(0).tolist()] for x in problem.lengths.columns[::2])
    lengths: dict[str, Any] = {"qkv_format": fmt, "cu_seqlens": torch.tensor(real)}
    lengths |= {"cu_seqlens_padded": torch.tensor(slots)} if fmt == "thd" else {}
    leaves = {name: x.double().requires_grad_() for name, x in tensors.items()}
    whole = None if state is None else state.double().requires_grad_()
    out, final = dense_linear_attention(**leaves, kind=layer.kind, scale=layer.scale, initial_state=whole, **lengths)  # type: ignore[arg-type]
    loss = (out * dout.double()).sum() + ((final * dfinal.double()).sum() if layer.output_final_state else 0)
    loss.backward()

    def one_rank(member: SimMember) -> dict[str, torch.Tensor]:
        group = member.split(problem.a2a_size) if problem.cp_comm_type == "a2a+p2p" else member
        layout = problem.layout if isinstance(problem.layout, str) else "dual_chunk"
        cp = package.ContextParallel(group, problem.cp_comm_type, layout=layout)
        table = {} if isinstance(problem.layout, str) else {"layout": problem.layout}
        how = plan_arguments(problem, device) | table | {"linear": True}
        plan = package.make_plan(cp=cp, **how)
        mine = {name: package.shard(x.to(device), cp=cp, plan=plan).requires_grad_() for name, x in tensors.items()}
        leaf = None if state is None else state.to(device).requires_grad_()
        got = package.linear_attention(
            **mine, cp=cp, plan=plan, kind=layer.kind, scale=layer.scale, initial_state=leaf,
            output_final_state=layer.output_final_state,
        )  # fmt: skip
        local, ending = got if layer.output_final_state else (got, None)
        share = [local], [package.shard(dout.to(device), cp=cp, plan=plan)]
        if ending is not None:
            share[0].append(ending)
            share[1].append(dfinal.to(device) / problem.cp_size)
        grads = torch.autograd.grad(share[0], [*mine.values(), *([] if leaf is None else [leaf])], share[1])
        found = {"out": local, **{f"d{name}": x for name, x in zip(mine, grads, strict=False)}}
        found = {name: package.unshard(x.detach(), cp=cp, plan=plan).cpu() for name, x in found.items()}
        found |= {} if ending is None else {"final_state": ending.detach().cpu()}
        return found | ({} if leaf is None else {"dinitial_state": grads[-1].cpu()})

    ranks = SimGroup(size).run(one_rank)
    wanted = {"out": out.detach(), **{f"d{name}": _grad(x) for name, x in leaves.items()}}
    wanted |= {"final_state": final.detach()} if layer.output_final_state else {}
    got = {name: ranks[0][name] for name in wanted}
    if whole is not None:
        wanted["dinitial_state"] = _grad(whole)
        got["dinitial_state"] = torch.stack([rank["dinitial_state"].double() for rank in ranks]).sum(0)
    return {name: _relative(got[name], x) for name, x in wanted.items()}


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    norm = wanted.norm().item()
    return (got.double() - wanted).norm().item() / norm if norm else got.double().norm().item()


def _grad(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
