"""Attention of one layer as an autograd function: what lies around the schedule's steps, in both directions.

user's format -> packed rows -> (a2a) the group's rows, own heads -> steps -> sink -> (a2a) home -> user's format
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from cp_fast.comm import all_reduce
from cp_fast.context import ContextParallel
from cp_fast.execute import run_backward, run_forward, wide_dtype
from cp_fast.merge import add_sink
from cp_fast.plan import Plan
from cp_fast.rows import take
from cp_ref.spec import Feature, Unsupported

__all__ = ["Attention"]


class Attention(torch.autograd.Function):
    """(q, k, v, offset) -> (out, lse, max_logit or None), differentiable but for max_logit."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        cp: ContextParallel,
        deterministic: bool,
        return_max_logit: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        offset: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        packing, heads = plan.packing, plan.program.heads
        inputs = [packing.pack(x) for x in (q, k, v)]
        local_rows = (inputs[0].shape[0], inputs[1].shape[0])  # of q, of k and v
        sink = _sink(plan, offset, wide_dtype(q.dtype), q.device)
        if heads is not None:
            inputs = heads.to_group(cp.comm, *zip((heads.q, heads.kv, heads.kv), inputs, strict=True))
        wide_out, lse, max_logit = run_forward(packing.packed_problem, plan.program, plan.backend, cp.comm, *inputs)
        if sink is not None:
            add_sink(wide_out, lse, _own_heads(plan, sink), slice(None) if heads else plan.program.real_q_rows)
        out = wide_out.to(q.dtype)
        home_out, home_lse = (out, lse) if heads is None else _home(plan, cp, out, lse, sink, local_rows[0])
        for_offset = () if offset is None else (home_out, home_lse)
        ctx.save_for_backward(*inputs, out, lse, offset, *for_offset)
        ctx.plan, ctx.cp, ctx.deterministic, ctx.local_rows = plan, cp, deterministic, local_rows
        ctx.set_materialize_grads(False)  # an lse that nobody differentiates must not cost its gradient's feature
        reduced = None
        if return_max_logit and max_logit is not None:
            everywhere = max_logit.new_full((packing.packed_problem.heads_q,), float("-inf"))
            _own_heads(plan, everywhere).copy_(max_logit)
            reduced = all_reduce(cp.comm, packing.heads_out(everywhere).amax(dim=0), torch.maximum)
            ctx.mark_non_differentiable(reduced)
        return packing.unpack(home_out), packing.unpack_lse(home_lse), reduced

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        q, k, v, out, lse, offset, *for_offset = ctx.saved_tensors
        plan, cp = ctx.plan, ctx.cp
        packing, heads = plan.packing, plan.program.heads
        rows_q, rows_kv = ctx.local_rows
        dlse = None if grads[1] is None else packing.pack_lse(grads[1]).contiguous()
        if dlse is not None and Feature.LSE_GRADIENT not in plan.backend.features:
            raise Unsupported("a gradient through lse", {f"backend {plan.backend.name!r}": {Feature.LSE_GRADIENT}})
        all_heads = packing.packed_problem.heads_q
        dout = out.new_zeros(rows_q, all_heads, out.shape[2]) if grads[0] is None else packing.pack(grads[0])
        doffset = None
        if offset is not None and ctx.needs_input_grad[7]:
            home_out, home_lse = for_offset
            mine = _offset_gradient(plan, offset, dout, home_out, home_lse, dlse)
            doffset = all_reduce(cp.comm, mine, torch.add).to(offset.dtype)
        if heads is not None:
            dout, *rest = heads.to_group(cp.comm, (heads.q, dout), *([] if dlse is None else [(heads.q, dlse.t())]))
            dlse = rest[0].t().contiguous() if rest else None
        results = run_backward(
            packing.packed_problem,
            plan.program,
            plan.backend,
            cp.comm,
            q,
            k,
            v,
            dout,
            out,
            lse,
            dlse,
            deterministic=ctx.deterministic,
        )
        if heads is not None:
            dq, dk, dv = results[0].to(q.dtype), *results[1:]
            sides, rows = (heads.q, heads.kv, heads.kv), (rows_q, rows_kv, rows_kv)
            parts = [
                (side, x, x.new_zeros(n, side.all_heads, x.shape[2]))
                for side, x, n in zip(sides, (dq, dk, dv), rows, strict=True)
            ]
            heads.to_home(cp.comm, *parts)
            results = [home for _, _, home in parts]
        return None, None, None, None, *(packing.unpack(x.to(q.dtype)) for x in results), doffset


def _home(
    plan: Plan, cp: ContextParallel, out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None, local_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The group's out and lse for the own heads -> the own rows for all heads. Rows that saw nothing never left
    home.
    """
    heads = plan.program.heads
    assert heads is not None
    home_out = out.new_zeros(local_rows, heads.q.all_heads, out.shape[2])
    home_lse = lse.new_full((local_rows, heads.q.all_heads), float("-inf"))
    if sink is not None:
        home_lse[plan.program.real_q_rows] = sink
    heads.to_home(cp.comm, (heads.q, out, home_out), (heads.q, lse.t(), home_lse))
    return home_out, home_lse.t()


def _own_heads(plan: Plan, per_head: torch.Tensor) -> torch.Tensor:
    """Of one value a packed head, those of the heads that this rank attends with; a view."""
    heads = plan.program.heads
    return per_head if heads is None else per_head[heads.q.heads[heads.place]]


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
    rows = plan.program.real_q_rows
    delta = (take(dout, rows).to(lse.dtype) * take(out, rows).to(lse.dtype)).sum(dim=-1)  # [n, h]
    if dlse is not None:
        delta = delta - take(dlse.t(), rows)
    sink = _sink(plan, offset, lse.dtype, lse.device)
    assert sink is not None
    weight = torch.exp(sink - take(lse.t(), rows)).masked_fill(sink == float("-inf"), 0.0)
    return plan.packing.heads_out(-(weight * delta).sum(dim=0)).sum(dim=0)
