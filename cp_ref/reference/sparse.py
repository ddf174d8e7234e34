"""Sparse attention over ranks: rows read only the keys that they name.

Sparse attention is attention with one more mask. So the schedules of attention play it, with their tiles and their
merge. The positions that a row names travel with its query. A tile sees the pairs that its band shows, if their rows
name them. An indexer's scores, and its loss, need all keys of a row at once: the keys travel as in all_gather. Then
each rank computes its own rows by the definition.

Compressed keys are another problem (`schedules.compressed`): it has the same queries, and other keys, areas and owners.
Attention to tokens and to entries plays one schedule after the other, and merges the results by their lse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from cp_ref.batches.tensors import (
    lse_from_packed,
    lse_to_packed,
    to_format,
    to_packed,
    wide_dtype,
)
from cp_ref.calls import compressed_calls, sparse_calls
from cp_ref.calls.layer import Layer, public_function
from cp_ref.calls.sparse_calls import SparseAttentionCall
from cp_ref.groups.collectives import offset_grad
from cp_ref.reference.executor.merge_partials import add_sink, merge, sink_gradient
from cp_ref.reference.executor.play_schedule import run_backward, run_forward, run_rank_schedule
from cp_ref.reference.executor.rank_tensors import RankTensors
from cp_ref.reference.executor.tile_attention import row_delta
from cp_ref.reference.layer_calls import Done, Passes, Run, called
from cp_ref.reference.reference_attention import real_rows, sink_of
from cp_ref.reference.reference_plan import ContextParallel, Plan
from cp_ref.schedules.compressed import EntryProblem, entry_problem
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, row_positions
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.table import ranges

__all__ = ["compressed_attention", "index_loss", "select_keys", "sparse_attention"]


# ---- the keys that rows name


class NamingTensors(RankTensors):
    """The tensors of a rank whose rows name their keys.

    named: [t, h_q, top_k], positions in the document of each of this rank's packed rows, for every query head. float64:
    a position that was forgotten shows as NaN.
    """

    def __init__(self, problem: Problem, rank: int, device: torch.device, named: torch.Tensor) -> None:
        super().__init__(problem.workload, rank, device)
        self.problem, self.named = problem, named

    def put_own(self, kind: str, *local: torch.Tensor) -> None:
        """Start an operand. With q travels what its rows name."""
        super().put_own(kind, *local, *((self.named,) if kind == "q" else ()))

    def of_tile(self, tile: Sequence[int], dtype: torch.dtype, *kinds: str) -> tuple[torch.Tensor, ...]:
        """A tile's operands, q first, without what its rows name."""
        q, _, *others = super().of_tile(tile, dtype, *kinds)
        return (q, *others)

    def visible(self, tile: Sequence[int]) -> torch.Tensor:
        """The pairs of a tile that are visible, bool [n, h, m]."""
        _, q_start, q_stop, k_start, k_stop, head_start, head_stop = tile
        named = self.tensors["q"][1][q_start:q_stop, head_start:head_stop]
        first = int(row_positions(self.problem, "kv", np.array([k_start]))[1][0])
        return super().visible(tile)[:, None] & names(named, first, k_stop - k_start)


def names(named: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Whether a row names each of the positions first, first + 1, ...: named [..., top_k] -> bool [..., count].

    >>> names(torch.tensor([[7, 4, 7, -1]]), 4, 4).int().tolist()
    [[1, 0, 0, 1]]
    """
    inside = (first <= named) & (named < first + count)
    place = torch.where(inside, named - first, count).long()  # The last place is for all others.
    return named.new_zeros(*named.shape[:-1], count + 1, dtype=torch.bool).scatter_(-1, place, True)[..., :count]


# ---- attention


class _Keys(NamedTuple):
    """Keys that rows see: tokens, or entries of one rate."""

    problem: Problem
    schedule: Schedule
    k: torch.Tensor  # [t_kv, h_kv, d_qk], this rank's packed rows
    v: torch.Tensor
    named: torch.Tensor | None  # See `NamingTensors`; None: rows see all that the mask shows.

    def held(self, rank: int) -> RankTensors:
        """The rank's tensors, empty."""
        if self.named is None:
            return RankTensors(self.problem.workload, rank, self.k.device)
        return NamingTensors(self.problem, rank, self.k.device, self.named)


def keys_of(plan: Plan, rate: int | None) -> tuple[Problem, Schedule]:
    """Attention of the batch to its tokens, or to its entries."""
    if rate is None:
        return plan.problem, plan.schedule
    problem = entry_problem(plan.problem, rate)
    return problem, make_schedule(problem)


def _met_keys(run: Run, k: torch.Tensor, v: torch.Tensor, indices: Any, rate: int | None) -> _Keys:
    problem, schedule = keys_of(run.plan, rate)
    fmt = problem.qkv_format
    named = None if indices is None else _named(run.call, indices, fmt)
    k, v = (to_packed(x, fmt) if rate is None else x for x in (k, v))
    return _Keys(replace(problem, softmax_scale=run.call.scale), schedule, k, v, named)


def _keys_of_sparse(run: Run, tensors: Sequence[Any]) -> tuple[torch.Tensor, list[_Keys], Any]:
    q, k, v, indices, offset = tensors
    return q, [_met_keys(run, k, v, indices, run.call.rate)], offset


def _keys_of_compressed(run: Run, tensors: Sequence[Any]) -> tuple[torch.Tensor, list[_Keys], Any]:
    q, k, v, k_entries, v_entries, indices, offset = tensors
    entries = _met_keys(run, k_entries, v_entries, indices, run.call.rate)
    return q, [_met_keys(run, k, v, None, None), entries], offset


def attention_forward(keys_of_call: Any, run: Run, *tensors: Any) -> Done:
    """Out and lse; saved are both as packed rows, kept is what the schedules save."""
    (plan, cp, _), problem = run, run.plan.problem
    q, met, offset = keys_of_call(run, tensors)
    fmt, batch_size = problem.qkv_format, len(problem.sequences)
    out, lse, kept = torch.zeros(0), torch.zeros(0), list[Any]()
    for keys in met:
        given = to_packed(q, fmt), keys.k, keys.v
        part = run_forward(keys.problem, keys.schedule, cp.comm, *given, held=keys.held(cp.rank))
        out, lse = merge(out, lse, part.out, part.lse) if kept else (part.out, part.lse)
        kept.append(part.saved)
    if (sink := sink_of(problem, offset, lse)) is not None:
        real = real_rows(plan, q.device)
        out[real], lse[real] = add_sink(out[real], lse[real], sink)
    results = to_format(out.to(q.dtype), fmt, batch_size), lse_from_packed(lse, fmt, batch_size)
    return Done(results, (out, lse), kept)


def attention_backward(
    keys_of_call: Any, run: Run, tensors: Sequence[Any], rows: Sequence[torch.Tensor], kept: Any, *grads: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """Gradients of the operands."""
    (plan, cp, _), (out, lse), problem = run, rows, run.plan.problem
    q, met, offset = keys_of_call(run, tensors)
    fmt, batch_size = problem.qkv_format, len(problem.sequences)
    dout = to_packed(grads[0], fmt)
    delta = row_delta(dout, out, lse_to_packed(grads[1], fmt))
    dq, of_keys = torch.zeros_like(to_packed(q, fmt), dtype=lse.dtype), list[torch.Tensor]()
    for keys, saved in zip(met, kept, strict=True):
        given = to_packed(q, fmt), keys.k, keys.v, dout, lse, delta
        share, *found = run_backward(keys.problem, keys.schedule, cp.comm, *given, saved, held=keys.held(cp.rank))
        dq = dq + share
        tokens = not isinstance(keys.problem, EntryProblem)
        found = (g.to(x.dtype) for g, x in zip(found, (keys.k, keys.v), strict=True))
        of_keys += (to_format(g, fmt, batch_size) if tokens else g for g in found)
    doffset = None
    if offset is not None:
        real = real_rows(plan, q.device)
        doffset = offset_grad(cp, sink_gradient(lse[real], delta[real], offset)).to(offset.dtype)
    return to_format(dq.to(q.dtype), fmt, batch_size), *of_keys, None, doffset


def _passes(declared: Layer, keys_of_call: Any) -> Passes:
    return Passes(declared, partial(attention_forward, keys_of_call), partial(attention_backward, keys_of_call))


SPARSE = _passes(sparse_calls.SPARSE, _keys_of_sparse)
COMPRESSED = _passes(compressed_calls.COMPRESSED, _keys_of_compressed)
sparse_attention = public_function(sparse_calls.sparse_attention, called, SPARSE, __name__)
compressed_attention = public_function(compressed_calls.compressed_attention, called, COMPRESSED, __name__)


def _named(call: SparseAttentionCall, indices: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """Indices as `NamingTensors` has them."""
    packed = to_packed(indices, qkv_format).double()
    by_head = packed[:, None] if packed.dim() == 2 else packed
    return by_head.repeat_interleave(call.heads_q // call.index_heads, dim=1)


# ---- an indexer


def select_forward(run: Run, q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor) -> Done:
    """The indices in the user's format."""
    plan, cp, call = run
    fmt, wide = plan.problem.qkv_format, wide_dtype(q_index.dtype)
    met = _meet(plan, cp, call.rate, k_index)
    q, w = (to_packed(x, fmt).to(wide) for x in (q_index, weights))
    keys = met.keys[:, 0].to(wide)
    found = torch.full((len(q), call.top_k), -1, dtype=torch.int32, device=q.device)
    for document in met.documents:
        scores = index_scores(q[document.rows], keys[document.keys], w[document.rows], call.scale)
        found[document.rows] = best(scores, document.visible, call.top_k).int()
    return Done((to_format(found, fmt, len(plan.problem.sequences)),))


SELECTION = Passes(sparse_calls.SELECTION, select_forward)
select_keys = public_function(sparse_calls.select_keys, called, SELECTION, __name__)


class _DocumentRows(NamedTuple):
    """The rows of a document that are this rank's."""

    rows: torch.Tensor  # of the rank's packed buffer, int64 [n]
    keys: slice  # all rows of the document's keys, of the global buffer
    visible: torch.Tensor  # bool [n, m]


class _Met(NamedTuple):
    """All keys that this rank's rows see, after the messages of all_gather."""

    schedule: Schedule
    held: RankTensors  # its "kv" are the tensors that were given, in rows of the global buffer
    documents: list[_DocumentRows]

    @property
    def keys(self) -> torch.Tensor:
        """The first of its tensors: an indexer's keys [t_kv of all ranks, 1, d_i]."""
        return self.held.tensors["kv"][0]


def _meet(plan: Plan, cp: ContextParallel, rate: int | None, k_index: torch.Tensor, *others: torch.Tensor) -> _Met:
    """Gather keys of this rank in the user's format, those of an indexer first."""
    of, schedule = keys_of(plan, rate)
    problem = replace(of, cp_comm_type="all_gather", a2a_size=1)
    schedule = schedule if of.cp_comm_type == "all_gather" else make_schedule(problem)
    held = RankTensors(problem.workload, cp.rank, k_index.device)
    index_rows, *rows = (x if rate else to_packed(x, problem.qkv_format) for x in (k_index, *others))
    held.put_own("kv", index_rows[:, None], *rows)
    visible = torch.zeros(held.rows["q"], held.rows["kv"], dtype=torch.bool, device=held.device)

    def compute(tile: Sequence[int]) -> None:
        _, q_start, q_stop, k_start, k_stop, *_ = tile
        visible[q_start:q_stop, k_start:k_stop] |= held.visible(tile)

    run_rank_schedule("forward", schedule.forward[cp.rank], held, cp.comm, compute)
    own = problem.workload.ownership.q.of(cp.rank)
    there, here = ranges(own.start, own.stop - own.start), real_rows(plan, held.device)
    number, _ = row_positions(problem, "q", there)
    documents: list[_DocumentRows] = []
    of_rows: list[int] = number.tolist()
    for n in sorted(set(of_rows)):
        places = torch.tensor(np.flatnonzero(number == n).tolist(), device=held.device)
        rows_of_all = torch.tensor(there.tolist(), device=held.device)[places]
        first: int = problem.starts_kv[n]
        span = slice(first, first + problem.lengths.len_kv[n])
        documents.append(_DocumentRows(here[places], span, visible[rows_of_all, span]))
    return _Met(schedule, held, documents)


def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """The scores of an indexer [n, m]: q [n, h, d], k [m, d], weights [n, h], of one wide dtype. Each is made of the
    same operations in the same order, whatever the shapes are.

    >>> q, k, w = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[1.0, 0.0, 2.0], [0.0, -1.0, 0.0]]), torch.ones(1, 1)
    >>> index_scores(q, k, w, 0.5).tolist()
    [[3.5, 0.0]]
    """
    scores = weights.new_zeros(len(q), len(k))
    for h in range(q.shape[1]):
        dots = q[:, h, None, :] * k[None]
        dots = torch.nn.functional.pad(dots, (0, (1 << (dots.shape[-1] - 1).bit_length()) - dots.shape[-1]))
        while (half := dots.shape[-1] // 2) > 0:
            dots = dots[..., :half] + dots[..., half:]
        scores = scores + weights[:, h, None] * torch.relu(scale * dots[..., 0])
    return scores


def best(scores: torch.Tensor, visible: torch.Tensor, top_k: int) -> torch.Tensor:
    """The columns of the `top_k` largest visible scores of each row [n, m], int64 [n, top_k], -1 behind the last. Of
    equal ones the lower column is first.

    >>> best(torch.tensor([[1.0, 3.0, 9.0, 3.0]]), torch.tensor([[True, True, False, True]]), 4).tolist()
    [[1, 3, 0, -1]]
    """
    order = torch.sort(scores.masked_fill(~visible, float("-inf")), dim=1, descending=True, stable=True).indices
    hidden_last = torch.sort((~visible).gather(1, order).byte(), dim=1, stable=True).indices
    order = order.gather(1, hidden_last)
    order = order.masked_fill(~visible.gather(1, order), -1)[:, :top_k]
    return torch.nn.functional.pad(order, (0, top_k - order.shape[1]), value=-1)


# ---- the indexer's loss


def loss_forward(run: Run, *tensors: torch.Tensor) -> Done:
    """The loss of each row; kept are the keys that this rank has met, and attention's shares."""
    (plan, cp, call), (q_index, k_index, weights, lse, q, k, indices) = run, tensors
    fmt, wide = plan.problem.qkv_format, wide_dtype(q_index.dtype)
    met = _meet(plan, cp, call.rate, k_index, k)
    queries, lse, named = to_packed(q, fmt), lse_to_packed(lse, fmt), to_packed(indices, fmt)
    keys = met.held.tensors["kv"][1]
    given: list[_Given] = []
    for rows, span, visible in met.documents:
        chosen = visible & names(named[rows], 0, span.stop - span.start)
        shares = attention_shares(queries[rows], keys[span], lse[rows], chosen, call.softmax_scale)
        given.append(_Given(rows, span, chosen, shares.to(wide)))
    q_rows, w, k_rows = (x.to(wide) for x in (to_packed(q_index, fmt), to_packed(weights, fmt), met.keys))
    loss = _loss(given, call.scale, q_rows, w, k_rows)
    return Done((to_format(loss, fmt, len(plan.problem.sequences)),), kept=(met, given))


def loss_backward(
    run: Run, tensors: Sequence[Any], _: Any, kept: tuple[_Met, list[_Given]], dloss: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """Gradients of the indexer's tensors."""
    (met, given), call, problem = kept, run.call, run.plan.problem
    held, fmt, batch_size = met.held, problem.qkv_format, len(problem.sequences)
    q_index, k_index, weights = tensors[:3]
    q_rows, w_rows = to_packed(q_index, fmt), to_packed(weights, fmt)
    k_rows = k_index if call.rate else to_packed(k_index, fmt)
    with torch.enable_grad():
        leaves = [x.to(dloss.dtype).requires_grad_() for x in (q_rows, w_rows, met.keys)]
        loss = _loss(given, call.scale, leaves[0], leaves[1], leaves[2])
    found = [torch.zeros_like(x) for x in leaves]
    if loss.requires_grad:  # else no row of this rank sees a key
        found = torch.autograd.grad(loss, leaves, to_packed(dloss, fmt), materialize_grads=True)
    dq, dweights, dkeys = found
    held.tensors["dkv"] = (dkeys,)
    run_rank_schedule("backward", met.schedule.backward[run.cp.rank], held, run.cp.comm, lambda tile: None)
    dk = torch.zeros_like(k_rows, dtype=dloss.dtype)[:, None]
    held.copy_out("dkv", dk)
    dk = dk[:, 0] if call.rate else to_format(dk[:, 0], fmt, batch_size)
    dq, dweights = (to_format(x, fmt, batch_size) for x in (dq, dweights))
    pairs = zip((dq, dk, dweights), tensors[:3], strict=True)
    return *(g.to(x.dtype) for g, x in pairs), *[None] * 4


class _Given(NamedTuple):
    """The part of attention that the loss of a document's rows reads."""

    rows: torch.Tensor  # of the rank's packed buffer
    keys: slice  # of the global buffer
    chosen: torch.Tensor  # bool [n, m]
    shares: torch.Tensor  # [n, m]: see `attention_shares`


def attention_shares(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, chosen: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """The share of each chosen key [n, m] in the attention of all query heads: q [n, h_q, d], k [m, h_kv, d], lse
    [n, h_q], chosen bool [n, m]. Each row adds up to 1; a row without keys has zeros.

    >>> q, k, chosen = torch.zeros(1, 2, 1), torch.zeros(3, 1, 1), torch.tensor([[True, False, True]])
    >>> attention_shares(q, k, torch.full((1, 2), 2.0).log(), chosen, 1.0).tolist()
    [[0.5, 0.0, 0.5]]
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = softmax_scale * torch.einsum("nhd,mhd->nhm", q.to(lse.dtype), k.to(lse.dtype))
    logarithms = (scores - lse[..., None]).masked_fill(~chosen[:, None], float("-inf")).logsumexp(dim=1)
    return torch.softmax(logarithms, dim=1).masked_fill(~chosen, 0.0)


def _loss(
    given: list[_Given], scale: float, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """The loss of each packed row [t], 0 where nothing is chosen: q [t, h_i, d_i], weights [t, h_i], keys
    [t_kv of all ranks, 1, d_i].
    """
    loss = q.new_zeros(len(q))
    for rows, span, chosen, shares in given:
        seen = keys[span, 0].masked_fill(~chosen.any(dim=0)[:, None], 0.0)  # others may be NaN
        scores = index_scores(q[rows], seen, weights[rows], scale)
        some = chosen.any(dim=1)
        learned = torch.log_softmax(scores[some].masked_fill(~chosen[some], float("-inf")), dim=1)
        differences = torch.xlogy(shares[some], shares[some]) - shares[some] * learned.masked_fill(~chosen[some], 0.0)
        loss = loss.index_add(0, rows[some], differences.sum(dim=1))
    return loss


LOSS = Passes(sparse_calls.INDEX_LOSS, loss_forward, loss_backward)
index_loss = public_function(sparse_calls.index_loss, called, LOSS, __name__)
