"""`select_keys`, `sparse_attention` and `index_loss`, declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from cp_ref.batches.tensors import autocast, needs_grad
from cp_ref.calls.layer import Layer, LayerCall, Operand, check_same_rows, read_scale
from cp_ref.calls.plan_arguments import Plan, check_sparse_scores
from cp_ref.calls.sparse_checks import (
    check_lse,
    check_queries,
    check_sparse_plan,
    check_values,
    needed_rate,
    read_indexer,
    read_indices,
    read_rate,
    read_softmax_scale,
)
from cp_ref.groups.context import ContextParallel
from cp_ref.problems.call_checks import one_a_head
from cp_ref.problems.read_problem import check_offset
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import check_flag, dtype_of, read_count

__all__ = [
    "INDEX_LOSS",
    "SELECTION",
    "SPARSE",
    "IndexLossCall",
    "SelectionCall",
    "SparseAttentionCall",
    "index_loss",
    "read_sparse_attention",
    "select_keys",
    "sparse_attention",
]


def select_keys(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    *,
    cp: ContextParallel,
    plan: Plan,
    top_k: int,
    scale: float | None = None,
    rate: int | None = None,
) -> torch.Tensor:
    """Choose the keys that each query row of this rank is to read: the `top_k` that an indexer scores best. Collective.

    The score of row i and key j of its document is

        sum over h of weights[i, h] * relu(scale * (q_index[i, h] . k_index[j]))

    among the keys that the plan's mask shows to the row. Of equal scores the lower position is better.

    Scores are in float32 (float64 for float64). Products are added in one order, whatever the shapes are. Along d_i
    they are added by halves: they are padded with zeros to a power of two, and the upper half is added to the lower
    one, until one number is left. Then the heads are added, the first one first. So the same inputs choose the same
    keys for every number of ranks, layout and schedule. Nothing is differentiable here: `index_loss` trains an indexer.
    torch.autocast changes nothing.

    Args:
        q_index: the indexer's queries, this rank's slice: bshd [b, s_q/cp, h_i, d_i], sbhd [s_q/cp, b, h_i, d_i], thd
            [t_q/cp, h_i, d_i] (or longer: the rest is tail). float16, bfloat16, float32, or float64; h_i and d_i are
            the indexer's own, and not the plan's.
        k_index: its keys, one head: bshd [b, s_kv/cp, d_i], sbhd [s_kv/cp, b, d_i], thd [t_kv/cp, d_i]; q_index's
            dtype.
        weights: the weight of each head [..., h_i], with the rows of q_index; float32 or q_index's dtype.
        cp: the group and the layout; cp_comm_type "all_gather" or "a2a". The keys travel as in all_gather.
        plan: from `make_plan`, for this batch. Its mask holds; its heads, dims and dtype are those of attention.
        top_k: at least 1. It may be larger than a document.
        scale: a finite number; default d_i ** -0.5.
        rate: the keys are compressed ones, of windows of this many tokens, as `compress_keys` gives them: k_index is
            [n, d_i]. Row t then sees the windows that end at t or before, whatever the window of the plan's mask is.
            None: the keys are tokens.

    Returns:
        int32 [..., top_k] in the rows of q_index: positions in the row's own document (with a rate, numbers of its
        windows), best first, -1 behind the last.
        A row that sees fewer than top_k keys has all of them; rows of padding and tail have -1 alone.

    Raises:
        ValueError, TypeError: an argument is wrong, here or, in the first call of these sizes with this plan, on
        another rank; named with its value and the rule, before anything is sent. Unsupported: cp_comm_type "p2p" or
        "a2a+p2p", or a plan that was given a schedule.

    Source: the lightning indexer of DeepSeek-V3.2 (DeepSeek-AI, 2025).
    """
    raise NotImplementedError


@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor | None,
    *,
    cp: ContextParallel,
    plan: Plan,
    rate: int | None = None,
    softmax_scale: float | None = None,
    softmax_offset: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor | None,
    *,
    cp: ContextParallel,
    plan: Plan,
    rate: int | None = None,
    softmax_scale: float | None = None,
    softmax_offset: torch.Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor | None,
    *,
    cp: ContextParallel,
    plan: Plan,
    rate: int | None = None,
    softmax_scale: float | None = None,
    softmax_offset: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor | None,
    *,
    cp: ContextParallel,
    plan: Plan,
    rate: int | None = None,
    softmax_scale: float | None = None,
    softmax_offset: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute attention in which a row sees only the keys that its indices name. Collective, forward and backward.

    A pair is visible if the plan's mask shows it and an index of the row names the key. Everything else is as in
    `attention`. An index is the key's position in the row's own document. A key that is named twice counts once; an
    index that is negative, beyond the document or hidden by the mask names nothing. With all positions of each document
    as indices this is `attention`.

    Args:
        q, k, v: as in `attention`, in the plan's heads, dims and dtype. v may be a part of k, as in the latent form of
            multi-head latent attention: h_kv 1, v = k[..., :d_v] without a copy. Where v is cut from k itself, by one
            slice or split without hooks, the gradient of k may have that of v in it, which sends less: ask for k's
            alone, or keep v's by v.retain_grad(). Under torch.autocast they are cast to its dtype.
        indices: int32, with the rows of q: bshd [b, s_q/cp, top_k], sbhd [s_q/cp, b, top_k], thd [t_q/cp, top_k], for
            all heads; or with an axis of kv heads before the last, [..., h_kv, top_k]: those of query head h are of kv
            head h // (h_q // h_kv). In any order, any top_k of at least 1; indices of padding and tail are not read.
            None: rows see all that the mask shows.
        cp: the group and the layout; cp_comm_type "all_gather" (keys travel) or "a2a" (heads are exchanged).
        plan: from `make_plan`, for this batch: its mask, softmax_type "vanilla" or "learnable", no softcap, no
            score_mod, no dropout. `areas` stay inside documents.
        rate: as in `select_keys`: k and v are entries, [n, h_kv, d], and indices numbers of windows. For tokens and
            entries in one softmax see `compressed_attention`.
        softmax_scale: factor of q.k, finite and positive; default the plan's, which is d_qk ** -0.5 unless given.
        softmax_offset: [h_q] or [1, h_q, 1, 1], any float dtype, for softmax_type "learnable" only. Its gradient is
            this rank's share of the total, or the total, as `cp.softmax_offset_grad` says.
        return_lse: return it too.

    Returns:
        out, or (out, lse): out in q's format and dtype with d_v; lse float32 (float64 for float64), [b, h_q, s_q/cp],
        or [h_q, t_q/cp] for thd, sinks included. Rows of padding and tail, and rows that see nothing: out 0, lse -inf
        (a real row with a sink: the sink's logit). Differentiable once in q, k, v and softmax_offset, through out and
        lse.

    Raises:
        ValueError, TypeError: an argument is wrong, here or, in the first call of these sizes with this plan, on
        another rank; named with its value and the rule, before anything is sent. Unsupported: naming what is missing,
        and the cure.

    Source: DeepSeek Sparse Attention, of DeepSeek-V3.2 (DeepSeek-AI, 2025).
    """
    raise NotImplementedError


def index_loss(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    indices: torch.Tensor,
    *,
    cp: ContextParallel,
    plan: Plan,
    rate: int | None = None,
    scale: float | None = None,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Measure how far the indexer's choice is from attention itself, by row: a loss that trains the indexer.
    Collective, forward and backward.

    Over the keys j that row i sees in `sparse_attention` with these indices, let

        target(j)   be the sum over the query heads h of exp(softmax_scale * (q[i, h] . k[j]) - lse[i, h]), divided by
                    its sum over j,
        learned(j)  the softmax over j of the scores of `select_keys`.

    The loss of the row is the Kullback-Leibler divergence, sum over j of target(j) * log(target(j) / learned(j)).

    Args:
        q_index, k_index, weights: as in `select_keys`.
        lse: of `sparse_attention` or `attention`, in the same form: [b, h_q, s_q/cp], or [h_q, t_q/cp] for thd. float32
            (float64 for float64).
        q, k: as in `sparse_attention`. Constants, as lse is: no gradient flows to them.
        indices: as in `sparse_attention`, without the axis of kv heads: int32 [..., top_k].
        cp: as in `sparse_attention`. The keys travel as in all_gather.
        plan: as in `sparse_attention`.
        rate: as in `select_keys`: k_index and k are entries.
        scale: of the indexer, as in `select_keys`.
        softmax_scale: as in `sparse_attention`.

    Returns:
        float32 (float64 for float64 q_index), a number a row: bshd [b, s_q/cp], sbhd [s_q/cp, b], thd [t_q/cp]. 0 for a
        row without keys, and in padding and tail. Sum it, or take the mean over the tokens of the batch: each rank has
        its own rows. Differentiable once in q_index, k_index and weights.

    Raises:
        As `sparse_attention`.

    Source: the sparse training stage of DeepSeek-V3.2 (DeepSeek-AI, 2025).
    """
    raise NotImplementedError


@dataclass(frozen=True)
class SelectionCall(LayerCall):
    """A checked call of `select_keys`. `scale` is resolved, dtypes are PyTorch's names without "torch."."""

    heads: int
    d_index: int
    dtype: str
    top_k: int
    rate: int | None
    scale: float


@dataclass(frozen=True)
class SparseAttentionCall(LayerCall):
    """A checked call of `sparse_attention` or `compressed_attention`. `index_heads` is 1 for indices without an axis of
    kv heads, else h_kv; without indices it and `top_k` are 0. `scale` is resolved.
    """

    heads_q: int
    heads_kv: int
    d_qk: int
    d_v: int
    dtype: str
    top_k: int
    index_heads: int
    rate: int | None
    scale: float
    has_sink: bool
    return_lse: bool
    requires_grad: bool


@dataclass(frozen=True)
class IndexLossCall(LayerCall):
    """A checked call of `index_loss`: the sizes of the indexer, then those of attention. Both scales are resolved."""

    heads: int
    d_index: int
    dtype_index: str
    heads_q: int
    heads_kv: int
    d_qk: int
    dtype: str
    top_k: int
    rate: int | None
    scale: float
    softmax_scale: float
    requires_grad: bool


def _read_selection(
    cp: ContextParallel,
    plan: Any,
    package_plan: type,
    /,
    *,
    q_index: Any,
    k_index: Any,
    weights: Any,
    top_k: Any,
    scale: Any,
    rate: Any,
) -> SelectionCall:
    check_sparse_plan(cp, plan, package_plan, "select_keys")
    top_k, rate = read_count("top_k", top_k, at_least=1), read_rate(plan, rate)
    heads, d_index = read_indexer(plan, rate, q_index, k_index, weights)
    return SelectionCall("select_keys", heads, d_index, dtype_of(q_index), top_k, rate, read_scale(scale, d_index))


SELECTION = Layer(
    "select_keys",
    (Operand("q_index", constant=True), Operand("k_index", constant=True), Operand("weights", constant=True)),
    {"top_k": "int", "scale": "float?", "rate": "int?"},
    _read_selection,
)


def read_sparse_attention(
    cp: ContextParallel,
    plan: Any,
    package_plan: type,
    /,
    *,
    q: Any,
    k: Any,
    v: Any,
    indices: Any,
    softmax_offset: Any,
    softmax_scale: Any,
    return_lse: Any,
    rate: Any,
    **entries: Any,
) -> SparseAttentionCall:
    """Check a call of `sparse_attention`; with k_entries and v_entries one of `compressed_attention`, whose k and v are
    tokens.
    """
    function = "compressed_attention" if entries else "sparse_attention"
    check_sparse_plan(cp, plan, package_plan, function)
    check_sparse_scores(function, plan.problem)
    check_flag("return_lse", return_lse)
    problem, rate = plan.problem, (needed_rate if entries else read_rate)(plan, rate)
    check_queries(plan, q)
    check_values(plan, None if entries else rate, q, k=k, v=v)
    if entries:
        check_values(plan, rate, q, **entries)
    check_offset(problem, softmax_offset, q)
    top_k, index_heads = read_indices(plan, indices, q, of_kv_heads=True)
    return SparseAttentionCall(
        function,
        problem.heads_q,
        problem.heads_kv,
        problem.d_qk,
        problem.d_v,
        problem.dtype,
        top_k,
        index_heads,
        rate,
        read_softmax_scale(problem, softmax_scale),
        softmax_offset is not None,
        return_lse,
        needs_grad(q, k, v, *entries.values(), softmax_offset),
    )


SPARSE = Layer(
    "sparse_attention",
    (
        Operand("q", autocast),
        Operand("k", autocast),
        Operand("v", autocast),
        Operand("indices", constant=True, optional=True),
        Operand("softmax_offset", one_a_head, optional=True),
    ),
    {"rate": "int?", "softmax_scale": "float?", "return_lse": "bool"},
    read_sparse_attention,
    second="return_lse",
)


def _read_index_loss(
    cp: ContextParallel,
    plan: Any,
    package_plan: type,
    /,
    *,
    q_index: Any,
    k_index: Any,
    weights: Any,
    lse: Any,
    q: Any,
    k: Any,
    indices: Any,
    rate: Any,
    scale: Any,
    softmax_scale: Any,
) -> IndexLossCall:
    check_sparse_plan(cp, plan, package_plan, "index_loss")
    check_sparse_scores("index_loss", plan.problem)
    problem: Problem = plan.problem
    rate = read_rate(plan, rate)
    heads, d_index = read_indexer(plan, rate, q_index, k_index, weights)
    check_queries(plan, q)
    check_values(plan, rate, q, k=k)
    if indices is None:
        raise TypeError("indices is None; index_loss needs those that the indexer chose")
    top_k, _ = read_indices(plan, indices, q, of_kv_heads=False)
    check_same_rows(problem, "q", q, "q_index", q_index)
    if rate is None:
        check_same_rows(problem, "k", k, "k_index", k_index)
    check_lse(problem, lse, q)
    return IndexLossCall(
        "index_loss",
        heads,
        d_index,
        dtype_of(q_index),
        problem.heads_q,
        problem.heads_kv,
        problem.d_qk,
        problem.dtype,
        top_k,
        rate,
        read_scale(scale, d_index),
        read_softmax_scale(problem, softmax_scale),
        needs_grad(q_index, k_index, weights),
    )


INDEX_LOSS = Layer(
    "index_loss",
    (
        Operand("q_index"),
        Operand("k_index"),
        Operand("weights"),
        Operand("lse", constant=True),
        Operand("q", autocast, constant=True),
        Operand("k", autocast, constant=True),
        Operand("indices", constant=True),
    ),
    {"rate": "int?", "scale": "float?", "softmax_scale": "float?"},
    _read_index_loss,
)
