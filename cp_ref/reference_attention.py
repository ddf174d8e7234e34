"""`attention`: context-parallel attention of one layer, as any model calls it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch

from cp_ref.contract import attention_call
from cp_ref.contract.attention_call import asked_for, problem_arguments, refuse_plan, with_digest
from cp_ref.contract.call_checks import (
    check_context,
    check_global_lengths,
    check_local_tensors,
    check_placements,
    check_plan_owner,
    check_settled,
    check_uneven,
    local_part,
    one_a_head,
)
from cp_ref.contract.collectives import all_reduce_max, offset_grad, told_to_all
from cp_ref.contract.declared import implements
from cp_ref.contract.plan_arguments import read_call
from cp_ref.contract.read_problem import check_offset, read_sizes
from cp_ref.contract.room import Agreement, check_room_tensors
from cp_ref.contract.score_inputs import PLAIN, ScoreInputs, kinds, read_score_inputs
from cp_ref.contract.score_mod import frozen
from cp_ref.contract.tensors import autocast, no_autocast, placed_like, refuse_transforms
from cp_ref.executor.merge_partials import add_sink
from cp_ref.executor.play_schedule import run_backward, run_forward
from cp_ref.reference_plan import ContextParallel, Plan, backward_pass, plan_together
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.table import ranges
from cp_ref.schedules.values import check_flag
from cp_ref.tracing.recorder import recording

__all__ = [
    "attention",
    "lse_from_packed",
    "lse_to_packed",
    "to_format",
    "to_packed",
]


def to_packed(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """x in `qkv_format` -> [t, h, d]."""
    if qkv_format == "thd":
        return x
    if qkv_format == "sbhd":
        x = x.transpose(0, 1)
    return x.reshape(-1, *x.shape[2:])


def to_format(x: torch.Tensor, qkv_format: str, batch_size: int) -> torch.Tensor:
    """[t, h, d] -> `qkv_format`: the inverse of `to_packed`."""
    if qkv_format == "thd":
        return x
    x = x.reshape(batch_size, -1, *x.shape[1:])
    return x.transpose(0, 1).contiguous() if qkv_format == "sbhd" else x


def lse_from_packed(lse: torch.Tensor, qkv_format: str, batch_size: int) -> torch.Tensor:
    """[t, h] -> [h, t] for thd, [b, h, s] for bshd and sbhd."""
    if qkv_format == "thd":
        return lse.t().contiguous()
    return lse.reshape(batch_size, -1, lse.shape[1]).transpose(1, 2).contiguous()


def lse_to_packed(lse: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """The inverse of `lse_from_packed`."""
    if qkv_format == "thd":
        return lse.t()
    return lse.transpose(1, 2).reshape(-1, lse.shape[1])


@implements(attention_call.attention)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cp: ContextParallel,
    softmax_offset: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    aux_tensors: Mapping[str, torch.Tensor] | None,
    dropout_seed: int | torch.Tensor | None,
    deterministic: bool,
    return_lse: bool,
    return_max_logit: bool,
    plan: Plan | None,
    **arguments: Any,
) -> Any:
    refuse_transforms()
    check_context(cp, ContextParallel)
    given = {"q": q, "k": k, "v": v}
    with nullcontext() if isinstance(plan, Plan) else told_to_all(cp):  # The ranks have already agreed on a plan.
        arguments = problem_arguments(arguments)
        q, k, v = (autocast(local_part(x)) for x in (q, k, v))
        softmax_offset = one_a_head(softmax_offset)
    flags = {"deterministic": deterministic, "return_lse": return_lse, "return_max_logit": return_max_logit}
    of_call: dict[str, Any] = {"alibi_slopes": alibi_slopes, "aux_tensors": aux_tensors, "dropout_seed": dropout_seed}
    inputs = PLAIN
    if not isinstance(plan, Plan):

        def read() -> tuple[Agreement, torch.device]:
            nonlocal inputs
            refuse_plan(plan, Plan)
            for name, flag in flags.items():
                check_flag(name, flag)
            check_placements(cp, cp.layout, arguments["qkv_format"], softmax_offset, **given)
            problem = read_call(cp, read_sizes(q, k, v, arguments["qkv_format"], cp.size), **arguments)
            check_local_tensors(problem, cp.rank, q, k, v)
            check_global_lengths(problem, None, q, k)
            check_uneven(cp, problem, alibi=alibi_slopes is not None, max_logit=return_max_logit)
            check_offset(problem, softmax_offset, q)
            score_mod = arguments["score_mod"]
            inputs = read_score_inputs(problem, score_mod and frozen(score_mod), q, **of_call)
            extras = ("softmax_offset_grad", cp.softmax_offset_grad), *kinds(**of_call)
            return Agreement(problem, extras=extras), q.device

        made = plan_together(cp, read)
    else:
        made = plan
        check_plan_owner(plan.problem, plan.rank, cp)
        for name, flag in flags.items():
            check_flag(name, flag)
        check_settled(plan.problem, **with_digest(arguments))
        check_placements(cp, plan.problem.layout, plan.problem.qkv_format, softmax_offset, **given)
        check_local_tensors(plan.problem, cp.rank, q, k, v)
        check_room_tensors(plan.room, q, k)
        check_global_lengths(plan.problem, plan.room, q, k)
        check_offset(plan.problem, softmax_offset, q)
        inputs = read_score_inputs(plan.problem, plan.score_mod, q, room=plan.room, **of_call)
    with no_autocast(q.device):
        results = cast(Any, _Attention).apply(made, cp, inputs, q, k, v, softmax_offset)  # torch leaves it untyped
    results = placed_like(given["q"], made.problem.qkv_format, results)
    return asked_for(results, return_lse, return_max_logit)


class _Attention(torch.autograd.Function):
    """The two passes, with the sink and the reductions over ranks around them."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        cp: ContextParallel,
        inputs: ScoreInputs,
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
        held = recorder.held("forward", q.device)
        out, lse, max_logit, saved = run_forward(problem, plan.schedule, cp.comm, *packed, inputs=inputs, held=held)
        if (sink := _sink(problem, offset, lse)) is not None:
            real = _real_rows(plan, q.device)
            out[real], lse[real] = add_sink(out[real], lse[real], sink)
        max_logit = all_reduce_max(cp.comm, max_logit)
        ctx.save_for_backward(q, k, v, out, lse, offset, *inputs.tensors)
        ctx.plan, ctx.problem, ctx.cp, ctx.inputs = plan, problem, cp, inputs
        ctx.saved, ctx.recorder = saved, recorder
        ctx.mark_non_differentiable(max_logit)
        narrow = out.to(q.dtype)
        recorder.own("final", out=narrow, lse=lse, max_logit=max_logit)
        return to_format(narrow, fmt, batch_size), lse_from_packed(lse, fmt, batch_size), max_logit

    @staticmethod
    @backward_pass
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse, offset, *of_scores = ctx.saved_tensors
        plan, cp, problem = ctx.plan, ctx.cp, ctx.problem
        fmt, batch_size = problem.qkv_format, len(problem.sequences)
        q_rows, k_rows, v_rows = (to_packed(x, fmt) for x in (q, k, v))
        dout = to_packed(grads[0], fmt)
        delta = (dout.to(out.dtype) * out).sum(dim=-1) - lse_to_packed(grads[1], fmt)  # [t, h_q]
        given = q_rows, k_rows, v_rows, dout, lse, delta
        inputs = ctx.inputs.with_tensors(*of_scores)
        held = ctx.recorder.held("backward", q.device)
        dq, dk, dv = run_backward(problem, plan.schedule, cp.comm, *given, ctx.saved, inputs, held)
        doffset = None
        if offset is not None:
            real = _real_rows(plan, q.device)
            sink = offset.to(lse.dtype)  # -inf means no sink; a row with no key and no sink also has lse -inf
            weight = torch.exp(sink - lse[real]).masked_fill(sink == float("-inf"), 0.0)  # the sink's softmax share
            share = -(weight * delta[real]).sum(dim=0)
            doffset = offset_grad(cp, share).to(offset.dtype)
        dq, dk, dv = (g.to(x.dtype) for g, x in ((dq, q), (dk, k), (dv, v)))
        ctx.recorder.own("final", dq=dq, dk=dk, dv=dv, dsoftmax_offset=doffset)
        dq, dk, dv = (to_format(g, fmt, batch_size) for g in (dq, dk, dv))
        return None, None, None, dq, dk, dv, doffset


def _sink(problem: Problem, offset: torch.Tensor | None, lse: torch.Tensor) -> torch.Tensor | None:
    """Each head's sink logit [h_q]; None without a sink."""
    if problem.softmax_type == "vanilla":
        return None
    return lse.new_zeros(problem.heads_q) if offset is None else offset.to(lse.dtype)


def _real_rows(plan: Plan, device: torch.device) -> torch.Tensor:
    """The local packed rows that hold real query tokens, int64."""
    own = plan.problem.workload.ownership.q.of(plan.rank)
    return torch.tensor(ranges(own.row, own.stop - own.start), dtype=torch.int64, device=device)
