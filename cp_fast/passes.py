"""Attention of one layer, both passes: what lies around the schedule's steps.

user's format -> packed rows -> (a2a) the group's rows, own heads -> steps -> sink -> (a2a) home -> user's format
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_fast.comm import all_reduce
from cp_fast.context import ContextParallel
from cp_fast.execute import run_backward, run_forward, wide_dtype
from cp_fast.kernels.base import Kernels
from cp_fast.kernels.select import kernels
from cp_fast.merge import add_sink
from cp_fast.plan import Plan
from cp_fast.rows import is_mask, take
from cp_ref.spec import Feature, Unsupported

__all__ = ["Forward", "Saved", "backward_pass", "forward_pass"]


class Saved(NamedTuple):
    """What the backward pass needs: packed rows, of the group for the own heads in the a2a schedules."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor  # in q's dtype
    lse: torch.Tensor  # [h, t]


class Forward(NamedTuple):
    """The results in the user's format."""

    out: torch.Tensor
    lse: torch.Tensor
    max_logit: torch.Tensor | None  # over all ranks; None if it was not asked for
    saved: Saved


def forward_pass(
    plan: Plan,
    cp: ContextParallel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offset: torch.Tensor | None,
    *,
    return_max_logit: bool,
) -> Forward:
    """This rank's slices in the user's format -> its results. Collective."""
    packing, heads, movers = plan.packing, plan.program.heads, kernels(q.device.type)
    inputs = [packing.pack(x) for x in (q, k, v)]
    local_rows = inputs[0].shape[0]
    sink = _sink(plan, offset, wide_dtype(q.dtype), q.device)
    if heads is not None:
        inputs = heads.to_group(cp.comm, movers, *zip((heads.q, heads.kv, heads.kv), inputs, strict=True))
    wide_out, lse, max_logit = run_forward(packing.packed_problem, plan.program, plan.backend, cp.comm, movers, *inputs)
    if sink is not None:
        add_sink(wide_out, lse, _own_heads(plan, sink), slice(None) if heads else plan.program.real_q_rows)
    out = wide_out.to(q.dtype)
    home_out, home_lse = (out, lse) if heads is None else _home(plan, cp, movers, out, lse, sink, local_rows)
    reduced = None
    if return_max_logit and max_logit is not None:
        everywhere = max_logit.new_full((packing.packed_problem.heads_q,), float("-inf"))
        _own_heads(plan, everywhere).copy_(max_logit)
        reduced = all_reduce(cp.comm, packing.heads_out(everywhere).amax(dim=0), torch.maximum)
    saved = Saved(inputs[0], inputs[1], inputs[2], out, lse)
    return Forward(packing.unpack(home_out), packing.unpack_lse(home_lse), reduced, saved)


def backward_pass(
    plan: Plan,
    cp: ContextParallel,
    saved: Saved,
    out: torch.Tensor,
    lse: torch.Tensor,
    offset: torch.Tensor | None,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    rows: tuple[int, int],
    *,
    deterministic: bool,
    wants_offset: bool,
    lse_given: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of q, k, v in the user's format, and of offset [h_q], as the context says. Collective.

    out, lse: the forward pass's results, in the user's format; dout, dlse: their gradients, None for zero. rows: how
    many packed rows q and k have on this rank. lse_given: whether the caller has lse; then some rank may have a
    gradient of it, and where heads are exchanged all of them send one.
    """
    packing, heads = plan.packing, plan.program.heads
    dtype, movers = saved.q.dtype, kernels(saved.q.device.type)
    if dlse is not None and Feature.LSE_GRADIENT not in plan.backend.features:
        raise Unsupported("a gradient through lse", {f"backend {plan.backend.name!r}": {Feature.LSE_GRADIENT}})
    dlse = None if dlse is None else packing.pack_lse(dlse).contiguous()
    all_heads = packing.packed_problem.heads_q
    if dlse is None and heads is not None and lse_given:
        dlse = saved.lse.new_zeros(all_heads, rows[0])
    dout = saved.out.new_zeros(rows[0], all_heads, saved.out.shape[2]) if dout is None else packing.pack(dout)
    doffset = None
    if offset is not None and wants_offset:
        mine = _offset_gradient(plan, offset, dout, packing.pack(out), packing.pack_lse(lse), dlse)
        total = cp.softmax_offset_grad == "total"
        doffset = (all_reduce(cp.comm, mine, torch.add) if total else mine).to(offset.dtype)
    if heads is not None:
        dout, *rest = heads.to_group(cp.comm, movers, (heads.q, dout), *([] if dlse is None else [(heads.q, dlse.t())]))
        dlse = rest[0].t().contiguous() if rest else None
    results = run_backward(
        packing.packed_problem,
        plan.program,
        plan.backend,
        cp.comm,
        movers,
        saved.q,
        saved.k,
        saved.v,
        dout,
        saved.out,
        saved.lse,
        dlse,
        deterministic=deterministic,
    )
    if heads is not None:
        # a head that comes from one rank alone is rounded before it travels: the same result, half the bytes
        sides, counts = (heads.q, heads.kv, heads.kv), (rows[0], rows[1], rows[1])
        moved = [x if side.replicated else x.to(dtype) for side, x in zip(sides, results, strict=True)]
        homes = [
            x.new_zeros(n + side.spare_rows, side.all_heads, x.shape[2])
            for side, x, n in zip(sides, moved, counts, strict=True)
        ]
        heads.to_home(cp.comm, movers, *zip(sides, moved, homes, strict=True))
        results = [home[:n] for home, n in zip(homes, counts, strict=True)]
    dq, dk, dv = (packing.unpack(x.to(dtype)) for x in results)
    return dq, dk, dv, doffset


def _home(
    plan: Plan,
    cp: ContextParallel,
    movers: Kernels,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    local_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The group's out and lse for the own heads -> the own rows for all heads. Rows that saw nothing never left
    home.
    """
    heads = plan.program.heads
    assert heads is not None
    rows, real = local_rows + heads.q.spare_rows, plan.program.real_q_rows
    home_out = out.new_zeros(rows, heads.q.all_heads, out.shape[2])
    home_lse = lse.new_full((rows, heads.q.all_heads), float("-inf"))
    if sink is not None:
        if is_mask(real):
            home_lse[:local_rows] = torch.where(real[:, None], sink, float("-inf"))
        else:
            home_lse[real] = sink
    heads.to_home(cp.comm, movers, (heads.q, out, home_out), (heads.q, lse.t(), home_lse))
    return home_out[:local_rows], home_lse[:local_rows].t()


def _own_heads(plan: Plan, per_head: torch.Tensor) -> torch.Tensor:
    """Of one value a packed head, those of the heads that this rank attends with; a view."""
    heads = plan.program.heads
    return per_head if heads is None else per_head[heads.q.own_heads(heads.place)]


def _sink(plan: Plan, offset: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Each packed head's sink logit; None without a sink."""
    if plan.problem.softmax_type == "vanilla":
        return None
    zeros = torch.zeros(plan.problem.heads_q, dtype=dtype, device=device)
    return plan.packing.heads_in(zeros if offset is None else offset.to(dtype))


def _offset_gradient(
    plan: Plan,
    offset: torch.Tensor,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
) -> torch.Tensor:
    """This rank's share of d softmax_offset [h_q]: minus the sink's weight times delta = sum(dout * out) - dlse, over
    the real rows; dout and out [t, h, d_v], lse and dlse [h, t].
    """
    real = plan.program.real_q_rows
    rows = slice(None) if is_mask(real) else real
    delta = (take(dout, rows).to(lse.dtype) * take(out, rows).to(lse.dtype)).sum(dim=-1)  # [n, h]
    if dlse is not None:
        delta = delta - take(dlse.t(), rows)
    sink = _sink(plan, offset, lse.dtype, lse.device)
    assert sink is not None
    weight = torch.exp(sink - take(lse.t(), rows)).masked_fill(sink == float("-inf"), 0.0)
    share = weight * delta
    if is_mask(real):
        share = share.masked_fill(~real[:, None], 0.0)  # padding may hold anything, NaN included
    return plan.packing.heads_out(-share.sum(dim=0)).sum(dim=0)
