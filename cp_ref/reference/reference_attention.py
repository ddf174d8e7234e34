"""`attention`: context-parallel attention of one layer, as any model calls it.

A call is read into a plan and the tensors that its scores depend on. `_Attention` plays the plan's schedule, forward
and backward, and adds the rest, which schedules do not have: the sink, and the maximum and the sum over ranks.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from cp_ref.batches.tensors import (
    autocast,
    lse_from_packed,
    lse_to_packed,
    no_autocast,
    placed_like,
    refuse_transforms,
    to_format,
    to_packed,
)
from cp_ref.calls import attention_call
from cp_ref.calls.attention_call import AttentionCall, CallFlags, asked_for
from cp_ref.calls.declared import implements
from cp_ref.calls.score_mod import ScoreMod, frozen
from cp_ref.calls.scores import PLAIN, ScoreTensors, read_scores
from cp_ref.groups.agreement import agreed
from cp_ref.groups.collectives import all_reduce_max, offset_grad
from cp_ref.problems.arguments import problem_arguments
from cp_ref.problems.call_checks import check_context, local_part, one_a_head
from cp_ref.problems.room import Agreement, Room
from cp_ref.reference.executor.merge_partials import add_sink, sink_gradient
from cp_ref.reference.executor.play_schedule import run_backward, run_forward
from cp_ref.reference.executor.tile_attention import row_delta
from cp_ref.reference.reference_plan import ContextParallel, Plan, backward_pass
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.table import ranges
from cp_ref.tracing.recorder import recording

__all__ = ["attention", "real_rows", "sink_of"]


@implements(attention_call.attention)  # there its arguments and results are documented, once for both packages
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cp: ContextParallel,
    softmax_offset: torch.Tensor | None,
    deterministic: bool,
    return_lse: bool,
    return_max_logit: bool,
    plan: Plan | None,
    **arguments: Any,
) -> Any:
    refuse_transforms()
    check_context(cp, ContextParallel)
    flags, scores = CallFlags(deterministic, return_max_logit, return_lse), ScoreTensors.given(arguments)
    given = {"q": q, "k": k, "v": v}

    def read() -> AttentionCall:
        problem = problem_arguments(arguments)
        tensors = autocast(local_part(q)), autocast(local_part(k)), autocast(local_part(v))
        return AttentionCall(cp, plan, flags, given, tensors, one_a_head(softmax_offset), scores, problem)

    # With a plan the ranks do not meet.
    call = read() if isinstance(plan, Plan) else agreed(cp, "an agreement on a call", read)
    plan, inputs = _read(call)
    with no_autocast(q.device):
        results = cast(Any, _Attention).apply(plan, cp, inputs, *call.tensors, call.offset)  # torch leaves it untyped
    return asked_for(placed_like(given["q"], plan.problem.qkv_format, results), return_lse, return_max_logit)


def _read(call: AttentionCall) -> tuple[Plan, ScoreTensors]:
    """The plan of a call and what its scores read, checked. Without a plan all ranks agree on one, or all raise."""
    plan, inputs = call.plan, PLAIN

    def read(problem: Problem, score_mod: ScoreMod | None, room: Room | None = None) -> ScoreTensors:
        call.check_tensors(problem, room)
        call.check_offset(problem)
        return read_scores(problem, score_mod, call.tensors[0], call.scores, room)

    if isinstance(plan, Plan):
        call.check_plan()
        return plan, read(plan.problem, plan.score_mod, plan.room)

    def agreement() -> tuple[Agreement, torch.device]:
        nonlocal inputs
        problem, score_mod = call.read_problem(Plan), call.arguments["score_mod"]
        inputs = read(problem, score_mod and frozen(score_mod))
        extras = ("softmax_offset_grad", call.cp.softmax_offset_grad), *call.scores.kinds
        return Agreement(problem, extras=extras), call.tensors[0].device

    made, device = agreed(call.cp, "an agreement on a plan", agreement, lambda found: found[0])
    return Plan(made.problem, call.cp.rank, device), inputs


class _Attention(torch.autograd.Function):
    """The two passes, with the sink and the reductions over ranks around them."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        cp: ContextParallel,
        inputs: ScoreTensors,
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
        if (sink := sink_of(problem, offset, lse)) is not None:
            real = real_rows(plan, q.device)
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
        delta = row_delta(dout, out, lse_to_packed(grads[1], fmt))
        given = q_rows, k_rows, v_rows, dout, lse, delta
        inputs = ctx.inputs.with_tensors(*of_scores)
        held = ctx.recorder.held("backward", q.device)
        dq, dk, dv = run_backward(problem, plan.schedule, cp.comm, *given, ctx.saved, inputs, held)
        doffset = None
        if offset is not None:
            real = real_rows(plan, q.device)
            doffset = offset_grad(cp, sink_gradient(lse[real], delta[real], offset)).to(offset.dtype)
        dq, dk, dv = (g.to(x.dtype) for g, x in ((dq, q), (dk, k), (dv, v)))
        ctx.recorder.own("final", dq=dq, dk=dk, dv=dv, dsoftmax_offset=doffset)
        dq, dk, dv = (to_format(g, fmt, batch_size) for g in (dq, dk, dv))
        return None, None, None, dq, dk, dv, doffset


def sink_of(problem: Problem, offset: torch.Tensor | None, lse: torch.Tensor) -> torch.Tensor | None:
    """Each head's sink logit [h_q]; None without a sink."""
    if problem.softmax_type == "vanilla":
        return None
    return lse.new_zeros(problem.heads_q) if offset is None else offset.to(lse.dtype)


def real_rows(plan: Plan, device: torch.device) -> torch.Tensor:
    """The local packed rows that hold real query tokens, int64."""
    own = plan.problem.workload.ownership.q.of(plan.rank)
    return torch.tensor(ranges(own.row, own.stop - own.start), dtype=torch.int64, device=device)
