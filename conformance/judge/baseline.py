"""The baseline: plain PyTorch attention in the same dtype. Budgets count errors in units of its error.

The code is ordinary on purpose: whole score matrices, every intermediate rounded to the input dtype,
gradients by autograd. Only the LSE, a float32 result everywhere, is also computed in float32.
"""

from __future__ import annotations

import torch

from conformance.dtypes import wide_dtype
from conformance.judge.visibility import scopes
from conformance.scores.score_formula import PLAIN, CaseScores, Places, scores_of
from cp_ref.schedules.problem import Problem

__all__ = ["eager_attention"]

_Extra = tuple[CaseScores, Places]


def eager_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    problem: Problem,
    softmax_offset: torch.Tensor | None = None,
    case_scores: CaseScores = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of global tensors, eagerly, in their own dtype; differentiable in q, k, v and softmax_offset, and
    through lse.

    Args:
        q: bshd [b, s_q, h_q, d_qk], sbhd [s_q, b, h_q, d_qk], thd [t_q, h_q, d_qk] (a tail allowed); k, v likewise.
            What stands in padding is not read.
        problem: masks, lengths and the options of scores; its cp_size and layout play no part.
        softmax_offset: [h_q], for softmax_type "learnable".
        case_scores: what scores depend on besides.

    Returns:
        out like q with d_v; lse [b, h_q, s_q] or [h_q, t_q], float32 (float64 for float64); max_logit [h_q], in lse's
        dtype.
    """
    wide = wide_dtype(q.dtype)
    max_logit = torch.full((problem.heads_q,), -torch.inf, dtype=wide, device=q.device)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = torch.full(_lse_shape(q, problem.qkv_format), -torch.inf, dtype=wide, device=q.device)
    for rows, keys, lse_rows, visible, places in scopes(problem, q.device):
        part = _one_scope(q[rows], k[keys], v[keys], problem, visible, softmax_offset, wide, (case_scores, places))
        out[rows], lse[lse_rows] = part[:2]
        max_logit = torch.maximum(max_logit, part[2])
    return out, lse, max_logit


def _lse_shape(q: torch.Tensor, qkv_format: str) -> tuple[int, ...]:
    sizes = dict(zip(qkv_format, q.shape, strict=True))
    return tuple(sizes[letter] for letter in ("ht" if qkv_format == "thd" else "bhs"))


def _one_scope(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    visible: torch.Tensor,
    softmax_offset: torch.Tensor | None,
    wide: torch.dtype,
    extra: _Extra,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """visible [n, m], q [n, h_q, d], k, v [m, h_kv, d] -> out [n, h_q, d_v], lse [h_q, n], max_logit [h_q]."""
    hidden = ~visible
    k, v = (x.repeat_interleave(problem.group_size, dim=1) for x in (k, v))
    scores = _scores(q, k, hidden, problem, extra)
    case_scores, places = extra
    weights = _softmax(scores, problem, softmax_offset) * case_scores.dropout(problem.heads_q, places, q.dtype)
    out = torch.einsum("hnm,mhd->nhd", weights, v)
    columns = _with_sink(_scores(q.to(wide), k.to(wide), hidden, problem, extra), problem, softmax_offset)
    if columns.shape[-1] == 0:
        lse = columns.new_full(columns.shape[:2], -torch.inf)
    else:
        empty = (columns == -torch.inf).all(-1)
        lse = torch.logsumexp(columns.masked_fill(empty[..., None], 0.0), dim=-1).masked_fill(empty, -torch.inf)
    largest = scores.detach().to(wide).flatten(1)
    none = largest.new_full((problem.heads_q, 1), -torch.inf)
    return out, lse, torch.cat([largest, none], dim=1).amax(dim=1)


def _scores(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, problem: Problem, extra: _Extra) -> torch.Tensor:
    """[h, n, m], -inf where hidden."""
    scores, _ = scores_of(torch.einsum("nhd,mhd->hnm", q, k), problem.scores)
    case_scores, places = extra
    return case_scores.modified(scores, places).masked_fill(hidden, -torch.inf)


def _with_sink(scores: torch.Tensor, problem: Problem, softmax_offset: torch.Tensor | None) -> torch.Tensor:
    """The scores and, with a sink, its logit as one more column."""
    if problem.softmax_type == "vanilla":
        return scores
    sink = scores.new_zeros(problem.heads_q) if softmax_offset is None else softmax_offset.to(scores.dtype)
    return torch.cat([scores, sink[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)


def _softmax(scores: torch.Tensor, problem: Problem, softmax_offset: torch.Tensor | None) -> torch.Tensor:
    """The keys' weights [h, n, m]; 0 in a row that sees nothing."""
    keys = scores.shape[-1]
    columns = _with_sink(scores, problem, softmax_offset)
    if columns.shape[-1] == 0:
        return columns
    empty = (columns == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(columns.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    return weights[..., :keys]
