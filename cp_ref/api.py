"""`attention`: context-parallel attention of one layer, as any model calls it."""

from __future__ import annotations

from typing import Any, cast

import torch

from cp_ref.casting import autocast, no_autocast
from cp_ref.collectives import all_reduce_max, all_reduce_sum
from cp_ref.context import ContextParallel
from cp_ref.derivatives import differentiable_once, refuse_transforms
from cp_ref.execute import run_backward, run_forward
from cp_ref.formats import lse_from_packed, lse_to_packed, to_format, to_packed
from cp_ref.merge import add_sink
from cp_ref.plan import Plan, plan_together, read_call
from cp_ref.recorder import recording
from cp_ref.spec import (
    Agreement,
    Problem,
    check_context,
    check_flag,
    check_local_tensors,
    check_offset,
    check_placements,
    check_plan_owner,
    check_room_tensors,
    check_settled,
    local_part,
    one_a_head,
    q_fragments,
    read_sizes,
)

__all__ = ["attention"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cp: ContextParallel,
    qkv_format: str = "bshd",
    attn_mask_type: str = "causal",
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    softmax_type: str = "vanilla",
    softmax_offset: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    plan: Plan | None = None,
) -> Any:
    """Attention over sequences whose tokens are spread over the ranks of `cp`. Collective, forward and backward.

    Args:
        q: this rank's slice: bshd [b, s_q/cp, h_q, d_qk], sbhd [s_q/cp, b, h_q, d_qk], thd [t_q/cp, h_q, d_qk] (or
            longer: the rest is tail). float16, bfloat16, float32 or float64. Query head h uses kv head
            h // (h_q // h_kv).
        k, v: the same with s_kv, h_kv, and d_v for v. A DTensor is taken as its local part where the context's group
            shards its sequence; results are plain tensors.
        cp: the group, the schedule and the layout.
        qkv_format: "bshd", "sbhd" or "thd" (sequences of any lengths packed one after the other).
        attn_mask_type: "no_mask", "causal", "causal_bottom_right" (aligned to the last query and key), or one of these
            with "padding" ("padding", "padding_causal", "padding_causal_bottom_right"). In thd both spellings mean the
            same; in bshd and sbhd a padding mask takes each sequence's length from `cu_seqlens_*`.
        window_size: (left, right): query i sees keys i - left ... i + right (aligned); -1 is unbounded. Causal masks
            set right to 0.
        cu_seqlens_q, cu_seqlens_kv: GLOBAL cumulative lengths of real tokens, int32 or int64 [b + 1]; kv defaults to q.
            On the CPU, best: they are read on the host, which waits for a GPU that has them.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: thd only, the same with padding; default to the real ones.
        softmax_scale: factor of q.k, finite and positive; default d_qk ** -0.5.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        softmax_type: "vanilla"; "off-by-one": the denominator gains 1; "learnable": it gains exp(softmax_offset[h]).
        softmax_offset: [h_q] or [1, h_q, 1, 1], any float dtype, for "learnable" only. Its gradient is this rank's
            share of the total, or the total, as `cp.softmax_offset_grad` says.
        deterministic: the same bits from run to run. The reference always is.
        return_lse, return_max_logit: return these too.
        plan: from `make_plan`; the problem's arguments are then left out.

    Returns:
        out, or (out, lse), (out, max_logit), (out, lse, max_logit):
        out in q's format and dtype with d_v; lse float32 (float64 for float64), [b, h_q, s_q/cp], or [h_q, t_q/cp] for
        thd; max_logit the same dtype, [h_q], over all ranks. Rows of padding and tail, and rows that see nothing: out
        0, lse -inf (a real row with a sink: the sink's logit). Differentiable in q, k, v and softmax_offset, through
        out and lse.

    Raises:
        ValueError, TypeError: an argument is wrong, here or on another rank; named with its value and the rule, before
        anything is sent. Unsupported: naming what is missing.
    """
    refuse_transforms()
    check_context(cp, ContextParallel)
    given = {"q": q, "k": k, "v": v}
    q, k, v = (autocast(local_part(x)) for x in (q, k, v))
    softmax_offset = one_a_head(softmax_offset)
    flags = {"deterministic": deterministic, "return_lse": return_lse, "return_max_logit": return_max_logit}
    arguments: dict[str, Any] = {
        "qkv_format": qkv_format,
        "attn_mask_type": attn_mask_type,
        "window_size": window_size,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "softmax_type": softmax_type,
    }
    if not isinstance(plan, Plan):

        def read() -> tuple[Agreement, torch.device]:
            if plan is not None:
                raise TypeError(
                    f"plan is a {type(plan).__module__}.{type(plan).__qualname__}; it must be a cp_ref.Plan"
                )
            for name, flag in flags.items():
                check_flag(name, flag)
            check_placements(cp, qkv_format, softmax_offset, **given)
            problem = read_call(cp, read_sizes(q, k, v, qkv_format, cp.size), **arguments)
            check_local_tensors(problem, cp.rank, q, k, v)
            check_offset(problem, softmax_offset, q)
            return Agreement(problem, extras=(("softmax_offset_grad", cp.softmax_offset_grad),)), q.device

        made = plan_together(cp, read)
    else:
        made = plan
        check_plan_owner(plan.problem, plan.rank, cp)
        for name, flag in flags.items():
            check_flag(name, flag)
        check_settled(plan.problem, **arguments)
        check_placements(cp, plan.problem.qkv_format, softmax_offset, **given)
        check_local_tensors(plan.problem, cp.rank, q, k, v)
        check_room_tensors(plan.room, q, k)
        check_offset(plan.problem, softmax_offset, q)
    with no_autocast(q.device):
        out, lse, max_logit = cast(Any, _Attention).apply(made, cp, q, k, v, softmax_offset)  # torch leaves it untyped
    results = [out, *([lse] if return_lse else []), *([max_logit] if return_max_logit else [])]
    return out if len(results) == 1 else tuple(results)


class _Attention(torch.autograd.Function):
    """The two passes, with the sink and the reductions over ranks around them."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        cp: ContextParallel,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        offset: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        problem = plan.problem
        fmt, batch_size = problem.qkv_format, len(problem.sequences)
        packed = [to_packed(x, fmt) for x in (q, k, v)]
        recorder = recording(problem, plan.schedule, cp.rank)
        recorder.own("given", softmax_offset=offset)
        out, lse, max_logit, kept = run_forward(problem, plan.schedule, cp.comm, *packed, recorder=recorder)
        if (sink := _sink(problem, offset, lse)) is not None:
            real = _real_rows(plan, q.device)
            out[real], lse[real] = add_sink(out[real], lse[real], sink)
        max_logit = all_reduce_max(cp.comm, max_logit)
        ctx.save_for_backward(q, k, v, out, lse, offset)
        ctx.plan, ctx.problem, ctx.cp, ctx.kept, ctx.recorder = plan, problem, cp, kept, recorder
        ctx.mark_non_differentiable(max_logit)
        narrow = out.to(q.dtype)
        recorder.own("final", out=narrow, lse=lse, max_logit=max_logit)
        return to_format(narrow, fmt, batch_size), lse_from_packed(lse, fmt, batch_size), max_logit

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with no_autocast(grads[0].device):
            return _Attention.differentiate(ctx, *grads)

    @staticmethod
    def differentiate(ctx: Any, *grads: torch.Tensor) -> Any:
        """The backward pass."""
        q, k, v, out, lse, offset = ctx.saved_tensors
        plan, cp, problem = ctx.plan, ctx.cp, ctx.problem
        if plan.problem is not problem:
            raise RuntimeError("the plan was updated between the forward and the backward pass of a call")
        fmt, batch_size = problem.qkv_format, len(problem.sequences)
        q_rows, k_rows, v_rows = (to_packed(x, fmt) for x in (q, k, v))
        dout = to_packed(grads[0], fmt)
        delta = (dout.to(out.dtype) * out).sum(dim=-1) - lse_to_packed(grads[1], fmt)  # [t, h_q]
        dq, dk, dv = run_backward(
            problem, plan.schedule, cp.comm, q_rows, k_rows, v_rows, dout, lse, delta, ctx.kept, ctx.recorder
        )
        doffset = None
        if offset is not None:
            real = _real_rows(plan, q.device)
            sink = offset.to(lse.dtype)  # -inf is none at all, and a row with no key and no sink has lse -inf too
            weight = torch.exp(sink - lse[real]).masked_fill(sink == float("-inf"), 0.0)  # its share of the softmax
            share = -(weight * delta[real]).sum(dim=0)
            doffset = _offset_grad(cp, share).to(offset.dtype)
        dq, dk, dv = (g.to(x.dtype) for g, x in ((dq, q), (dk, k), (dv, v)))
        ctx.recorder.own("final", dq=dq, dk=dk, dv=dv, dsoftmax_offset=doffset)
        dq, dk, dv = (to_format(g, fmt, batch_size) for g in (dq, dk, dv))
        return None, None, dq, dk, dv, doffset


def _sink(problem: Problem, offset: torch.Tensor | None, lse: torch.Tensor) -> torch.Tensor | None:
    """Each head's sink logit [h_q]; None without a sink."""
    if problem.softmax_type == "vanilla":
        return None
    return lse.new_zeros(problem.heads_q) if offset is None else offset.to(lse.dtype)


def _offset_grad(cp: ContextParallel, share: torch.Tensor) -> torch.Tensor:
    """The gradient of softmax_offset, of its part that is from this rank's queries: see `ContextParallel`."""
    return all_reduce_sum(cp.comm, share) if cp.softmax_offset_grad == "total" else share


def _real_rows(plan: Plan, device: torch.device) -> torch.Tensor:
    """The local packed rows that hold real query tokens, int64."""
    rows = [torch.empty(0, dtype=torch.int64)]
    for f in q_fragments(plan.problem, plan.rank):
        count = min(f.stop, plan.problem.sequences[f.seq].len_q) - f.start
        rows.append(torch.arange(f.row, f.row + max(count, 0)))
    return torch.cat(rows).to(device)
