"""One problem of linear layers in a package, over the simulated group, against the oracle: results and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conformance.run.case_tensors import plan_arguments
from cp_ref import SimGroup
from cp_ref.linear.oracle import dense_causal_conv1d, dense_linear_attention
from cp_ref.simulator.sim_group import SimMember
from cp_ref.spec import Problem, local_lengths, slice_rows

__all__ = ["Convolution", "Layer", "check_convolution", "check_layer", "compare_layer", "exact_layer", "play_layer"]

NAN = float("nan")


@dataclass(frozen=True)
class Layer:
    """Sizes and options of a linear attention."""

    kind: str = "gated_delta_rule"
    heads: int = 1
    shared: int = 1  # value heads for each head
    d_k: int = 3
    d_v: int = 2
    scale: float | None = None
    initial_state: bool = False
    output_final_state: bool = False
    tail: int = 0  # rows of each rank's slice, thd alone


@dataclass(frozen=True)
class Convolution:
    """Sizes and options of a causal convolution."""

    channels: int = 2
    kernel_size: int = 4
    bias: bool = True
    activation: str | None = None
    tail: int = 0


@dataclass(frozen=True)
class Tensors:
    """Global tensors of a layer, the same for equal arguments."""

    given: dict[str, torch.Tensor]  # q, k, v, g, beta
    state: torch.Tensor | None
    dout: torch.Tensor
    dfinal: torch.Tensor  # of every rank, [cp_size, b, h_v, d_k, d_v]


def layer_tensors(problem: Problem, layer: Layer, seed: int) -> Tensors:
    """Random values; keys have length 1."""
    draw = torch.Generator().manual_seed(seed)
    lead, heads_v = _leading(problem), layer.heads * layer.shared

    def some(*last: int) -> torch.Tensor:
        return torch.randn(*lead, *last, generator=draw, dtype=torch.float64)

    given = {
        "q": some(layer.heads, layer.d_k),
        "k": torch.nn.functional.normalize(some(layer.heads, layer.d_k), dim=-1),
        "v": some(heads_v, layer.d_v),
        "g": -some(*((heads_v, layer.d_k) if layer.kind == "kda" else (heads_v,))).abs(),
    }
    if layer.kind != "mamba2":
        given["beta"] = some(heads_v).sigmoid()
    states = len(problem.sequences), heads_v, layer.d_k, layer.d_v
    state = torch.randn(states, generator=draw, dtype=torch.float64) if layer.initial_state else None
    dfinal = torch.randn(problem.cp_size, *states, generator=draw, dtype=torch.float64)
    return Tensors(given, state, some(heads_v, layer.d_v), dfinal)


Found = tuple[dict[str, torch.Tensor], torch.Tensor]  # global results by name; the share of the gradient of the states


def play_layer(package: Any, problem: Problem, layer: Layer, seed: int, group: Any) -> Found:
    """One rank's forward and backward pass, with NaN in padding and tail."""
    tensors = layer_tensors(problem, layer, seed)
    cp, plan = _plan(package, problem, group)
    mine = {n: _slice(package, problem, x, cp, plan, layer.tail).requires_grad_() for n, x in tensors.given.items()}
    options = {"kind": layer.kind, "scale": layer.scale, "output_final_state": layer.output_final_state}
    leaf = None if tensors.state is None else tensors.state.clone().requires_grad_()
    got = package.linear_attention(**mine, cp=cp, plan=plan, initial_state=leaf, **options)
    local, ending = got if layer.output_final_state else (got, None)
    roots, seeds = [local], [_slice(package, problem, tensors.dout, cp, plan, layer.tail)]
    if ending is not None:
        roots.append(ending)
        seeds.append(tensors.dfinal[cp.rank])
    grads = torch.autograd.grad(roots, [*mine.values(), *([] if leaf is None else [leaf])], seeds)
    results = {"out": local.detach(), **{f"d{n}": x for n, x in zip(mine, grads, strict=False)}}
    results = {name: _whole(package, problem, x, cp, plan, layer.tail) for name, x in results.items()}
    if ending is not None:
        results["final_state"] = ending.detach()
    return results, grads[-1] if leaf is not None else torch.zeros(())


def exact_layer(problem: Problem, layer: Layer, seed: int) -> Found:
    """The oracle's results, and the whole gradient of the states."""
    tensors = layer_tensors(problem, layer, seed)
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.given.items()}
    whole = None if tensors.state is None else tensors.state.clone().requires_grad_()
    options: dict[str, Any] = {"kind": layer.kind, "scale": layer.scale, "initial_state": whole}
    out, final = dense_linear_attention(**leaves, **options, **_lengths(problem))
    loss = (out * _real(problem, tensors.dout)).sum()
    if layer.output_final_state:
        loss = loss + (final * tensors.dfinal.sum(dim=0)).sum()
    if loss.requires_grad:
        loss.backward()
    results = {"out": out.detach(), **{f"d{name}": _grad(x) for name, x in leaves.items()}}
    results |= {"final_state": final.detach()} if layer.output_final_state else {}
    return results, torch.zeros(()) if whole is None else _grad(whole)


def compare_layer(ranks: list[Found], exact: Found, atol: float = 1e-9) -> None:
    """Every rank has the exact results, and the shares of the states' gradient add up."""
    for results, _ in ranks:
        assert results.keys() == exact[0].keys()
        for name, x in exact[0].items():
            torch.testing.assert_close(results[name], x, atol=atol, rtol=atol, msg=lambda m, name=name: f"{name}: {m}")
    total = torch.stack([share for _, share in ranks]).sum(dim=0)
    torch.testing.assert_close(total, exact[1], atol=atol, rtol=atol)


def check_layer(package: Any, problem: Problem, layer: Layer, seed: int = 0) -> None:
    """A layer over the simulated group meets the oracle."""
    ranks = SimGroup(problem.cp_size).run(partial(play_layer, package, problem, layer, seed))
    compare_layer(ranks, exact_layer(problem, layer, seed))


def check_convolution(package: Any, problem: Problem, layer: Convolution, seed: int = 0) -> None:
    """Forward and backward of every rank, with NaN in padding and tail, meet the oracle."""
    draw = torch.Generator().manual_seed(seed)
    x, dout = (torch.randn(*_leading(problem), layer.channels, generator=draw, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(layer.channels, layer.kernel_size, generator=draw, dtype=torch.float64)
    bias = torch.randn(layer.channels, generator=draw, dtype=torch.float64) if layer.bias else None
    leaves = [None if one is None else one.clone().requires_grad_() for one in (x, weight, bias)]
    out = dense_causal_conv1d(*leaves, activation=layer.activation, **_lengths(problem))  # type: ignore[arg-type]
    loss = (out * _real(problem, dout)).sum()
    if loss.requires_grad:
        loss.backward()

    def one_rank(member: SimMember) -> tuple[torch.Tensor, ...]:
        cp, plan = _plan(package, problem, member)
        mine = _slice(package, problem, x, cp, plan, layer.tail).requires_grad_()
        of_layer = [one.clone().requires_grad_() for one in (weight, bias) if one is not None]
        local = package.causal_conv1d(mine, *of_layer, cp=cp, plan=plan, activation=layer.activation)
        grads = torch.autograd.grad(local, [mine, *of_layer], _slice(package, problem, dout, cp, plan, layer.tail))
        dx = _whole(package, problem, grads[0], cp, plan, layer.tail)
        return _whole(package, problem, local.detach(), cp, plan, layer.tail), dx, *grads[1:]

    ranks = SimGroup(problem.cp_size).run(one_rank)
    for got in ranks:
        for one, exact in zip(got[:2], (out.detach(), _grad(leaves[0])), strict=True):
            torch.testing.assert_close(one, exact, atol=1e-9, rtol=1e-9)
    for n, leaf in enumerate(one for one in leaves[1:] if one is not None):
        total = torch.stack([got[2 + n] for got in ranks]).sum(dim=0)
        torch.testing.assert_close(total, _grad(leaf), atol=1e-9, rtol=1e-9)


def _leading(problem: Problem) -> tuple[int, ...]:
    if problem.qkv_format == "thd":
        return (problem.starts_q[-1],)
    batch, longest = len(problem.sequences), max(problem.lengths.slots_q, default=0)
    return (batch, longest) if problem.qkv_format == "bshd" else (longest, batch)


def _lengths(problem: Problem) -> dict[str, Any]:
    real, slots = ([0, *torch.tensor(list(x)).cumsum(0).tolist()] for x in problem.lengths.columns[::2])
    found: dict[str, Any] = {"qkv_format": problem.qkv_format, "cu_seqlens": torch.tensor(real)}
    return found | ({"cu_seqlens_padded": torch.tensor(slots)} if problem.qkv_format == "thd" else {})


def _plan(package: Any, problem: Problem, group: Any) -> tuple[Any, Any]:
    layout = problem.layout if isinstance(problem.layout, str) else "dual_chunk"
    if problem.cp_comm_type == "a2a+p2p" and isinstance(group, SimMember):
        group = group.split(problem.a2a_size)
    cp = package.ContextParallel(group, problem.cp_comm_type, layout=layout)
    table = {} if isinstance(problem.layout, str) else {"layout": problem.layout}
    return cp, package.make_plan(cp=cp, **plan_arguments(problem) | table, linear=True)


def _slice(package: Any, problem: Problem, x: torch.Tensor, cp: Any, plan: Any, tail: int) -> torch.Tensor:
    """A rank's slice, with NaN in padding and tail."""
    nothing = ~_mask(problem, x)
    mine = package.shard(x.masked_fill(nothing, NAN), cp=cp, plan=plan)
    here = package.shard((~nothing).to(x.dtype), cp=cp, plan=plan)
    mine = mine.masked_fill(here == 0, NAN)
    if problem.qkv_format != "thd" or not tail:
        return mine
    tail += local_lengths(problem, "q", len(mine) + tail)  # would be refused: as long as all slices together
    return torch.cat([mine, mine.new_full((tail, *mine.shape[1:]), NAN)])


def _whole(package: Any, problem: Problem, x: torch.Tensor, cp: Any, plan: Any, tail: int) -> torch.Tensor:
    if problem.qkv_format == "thd" and tail:
        rows = slice_rows(problem, "q")
        assert not x[rows:].any()
        x = x[:rows]
    return package.unshard(x.detach(), cp=cp, plan=plan)


def _mask(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """Which rows of a global tensor are real tokens, in its shape."""
    rows = torch.zeros(problem.starts_q[-1], dtype=torch.bool)
    for start, length in zip(problem.starts_q, problem.lengths.len_q, strict=False):
        rows[start : start + length] = True
    if problem.qkv_format != "thd":
        rows = rows.view(len(problem.sequences), -1)
        rows = rows.T if problem.qkv_format == "sbhd" else rows
    return rows.reshape(*rows.shape, *[1] * (x.dim() - rows.dim())).expand_as(x)


def _real(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """The tensor with zero in padding."""
    return x.masked_fill(~_mask(problem, x), 0.0)


def _grad(x: Any) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
