"""`attention`: context-parallel attention of one layer, as any model calls it."""

from __future__ import annotations

from typing import Any

import torch

from cp_fast.autograd import Attention
from cp_fast.backends import Backend
from cp_fast.calls import autocast, check_planned_call
from cp_fast.compiled import attention_in_graph
from cp_fast.context import ContextParallel
from cp_fast.derivatives import refuse_transforms
from cp_fast.plan import Plan, backend_for, plan_together, read_call
from cp_ref.spec import (
    Agreement,
    check_context,
    check_flag,
    check_local_tensors,
    check_offset,
    check_placements,
    check_settled,
    local_part,
    one_a_head,
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
            longer: the rest is tail). float16, bfloat16 (and float32, float64 on a CPU). Query head h uses kv
            head h // (h_q // h_kv). Under torch.autocast q, k and v are cast to its dtype, as for PyTorch's attention.
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
        deterministic: the same bits from run to run; a kernel library that cannot is not chosen.
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
    check_context(cp, ContextParallel)
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
    distributed = any(hasattr(x, "placements") for x in (q, k, v))
    if torch.compiler.is_compiling() and (distributed or not isinstance(plan, Plan)):
        how = {"deterministic": deterministic, "return_lse": return_lse, "return_max_logit": return_max_logit}
        return _outside_graphs(q, k, v, cp=cp, softmax_offset=softmax_offset, plan=plan, **how, **arguments)
    given = {"q": q, "k": k, "v": v}
    q, k, v = (autocast(local_part(x)) for x in (q, k, v))
    softmax_offset = one_a_head(softmax_offset)
    if torch.compiler.is_compiling() and isinstance(plan, Plan):
        check_flag("return_lse", return_lse)
        check_settled(plan.problem, **arguments)
        results = attention_in_graph(plan, cp, deterministic, return_max_logit, return_lse, q, k, v, softmax_offset)
        return _asked_for(results, return_lse, return_max_logit)
    refuse_transforms()
    if not isinstance(plan, Plan):

        def read() -> tuple[Agreement, Backend, torch.device]:
            if plan is not None:
                raise TypeError(
                    f"plan is a {type(plan).__module__}.{type(plan).__qualname__}; it must be a cp_fast.Plan"
                )
            check_flag("return_lse", return_lse)
            check_placements(cp, qkv_format, softmax_offset, **given)
            sizes = read_sizes(q, k, v, qkv_format, cp.size)
            how = {"deterministic": deterministic, "return_max_logit": return_max_logit}
            problem = read_call(cp, sizes, **arguments)
            backend = backend_for(cp, problem, q.device.type, **how)
            check_local_tensors(problem, cp.rank, q, k, v)
            check_offset(problem, softmax_offset, q)
            extras = ("return_max_logit", return_max_logit), *_of_backward(cp, softmax_offset, return_lse)
            return Agreement(problem, extras=extras), backend, q.device

        made = plan_together(cp, read)
    else:
        made = plan
        check_flag("return_lse", return_lse)
        check_settled(plan.problem, **arguments)
        check_placements(cp, plan.problem.qkv_format, softmax_offset, **given)
        check_planned_call(plan, cp, q, k, v, softmax_offset, deterministic=deterministic, max_logit=return_max_logit)
    results = Attention.apply(made, cp, deterministic, return_max_logit, return_lse, q, k, v, softmax_offset)
    return _asked_for(results, return_lse, return_max_logit)


@torch.compiler.disable(
    reason="attention makes plans and looks at DTensors outside of graphs: call make_plan outside, give local tensors"
)
def _outside_graphs(*tensors: torch.Tensor, **arguments: Any) -> Any:
    return attention(*tensors, **arguments)


def _of_backward(cp: ContextParallel, offset: torch.Tensor | None, return_lse: bool) -> list[tuple[str, object]]:
    """What decides which messages the backward pass sends: whether the sinks' gradients are summed over all ranks, and
    heads are exchanged for the gradient of lse too.
    """
    extras: list[tuple[str, object]] = [("softmax_offset_grad", cp.softmax_offset_grad)]
    if cp.softmax_offset_grad == "total":
        learnt = offset is not None and offset.requires_grad and torch.is_grad_enabled()
        extras.append(("softmax_offset.requires_grad", learnt))
    return [*extras, *([("return_lse", return_lse)] if cp.a2a_size > 1 else [])]


def _asked_for(results: Any, return_lse: bool, return_max_logit: bool) -> Any:
    """out, or a tuple of out and what else was asked for."""
    out, lse, max_logit = results
    wanted = (out, *([lse] if return_lse else []), *([max_logit] if return_max_logit else []))
    return out if len(wanted) == 1 else wanted
