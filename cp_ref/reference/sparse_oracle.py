"""Sparse attention by its definition: the oracle for `select_keys`, `sparse_attention` and `index_loss`.

Global tensors, one document at a time, the whole score matrix, float64. It knows no rank, no schedule and no tile, so
none of their mistakes can hide in it; gradients come from autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from cp_ref.batches.tensors import lse_from_packed, lse_to_packed, to_format, to_packed
from cp_ref.reference.oracle import attend, inside_areas, visible_in
from cp_ref.schedules.problem import Problem

__all__ = [
    "DocumentRows",
    "chosen_keys",
    "dense_index_loss",
    "dense_index_scores",
    "dense_select_keys",
    "dense_sparse_attention",
    "documents_of",
]


class DocumentRows(NamedTuple):
    """A document's rows of the packed global tensors, and who sees whom."""

    rows: slice
    keys: slice
    visible: torch.Tensor  # bool [n, m]


def documents_of(problem: Problem, device: torch.device | str = "cpu") -> Iterator[DocumentRows]:
    """All documents of a problem, whose areas, if there are any, lie inside of documents.

    >>> from cp_ref.schedules.problem import Sequence
    >>> two = Problem(1, (Sequence(1, 1, 2, 2), Sequence(2, 2, 2, 2)), qkv_format="thd")
    >>> [(rows.start, rows.stop, visible.int().tolist()) for rows, _, visible in documents_of(two)]
    [(0, 1, [[1]]), (2, 4, [[1, 0], [1, 1]])]
    """
    device = torch.device(device)
    for s, q, k in zip(problem.sequences, problem.starts_q, problem.starts_kv, strict=False):
        rows, keys = slice(q, q + s.len_q), slice(k, k + s.len_kv)
        if problem.areas is None:
            yield DocumentRows(rows, keys, visible_in(problem, s, device))
        else:
            i, j = (torch.arange(x.start, x.stop, device=device) for x in (rows, keys))
            yield DocumentRows(rows, keys, inside_areas(problem.areas, i[:, None], j[None, :]))


def dense_index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """The scores of an indexer [n, m], of q [n, h_i, d_i], k [m, d_i] and weights [n, h_i].

    >>> q, k, weights = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[2.0], [-3.0]]), torch.tensor([[1.0, 5.0]])
    >>> dense_index_scores(q, k, weights, 1.0)
    tensor([[ 2., 15.]])
    """
    return torch.einsum("nh,nhm->nm", weights, torch.relu(scale * torch.einsum("nhd,md->nhm", q, k)))


def dense_select_keys(
    problem: Problem,
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    *,
    top_k: int,
    scale: float | None = None,
) -> torch.Tensor:
    """`select_keys` of global tensors, with scores in float64: int32 [..., top_k].

    Args:
        problem: the batch and its mask.
        The others: as in `select_keys`.
    """
    fmt = problem.qkv_format
    q, k, w = (to_packed(x, fmt).double() for x in (q_index, k_index, weights))
    found = torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
    for rows, keys, visible in documents_of(problem, q.device):
        scores = dense_index_scores(q[rows], k[keys], w[rows], q.shape[-1] ** -0.5 if scale is None else scale)
        for i, shown in enumerate(visible):
            best = sorted((-float(scores[i, j]), j) for j in range(len(shown)) if shown[j])[:top_k]
            found[rows.start + i, : len(best)] = torch.tensor([j for _, j in best], dtype=torch.int32)
    return to_format(found, fmt, len(problem.sequences))


def chosen_keys(indices: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Which keys the rows of a document see that name them: indices [n, ..., top_k], visible bool [n, m] -> bool
    [n, ..., m].

    >>> visible = torch.tensor([[True, True, False]])
    >>> chosen_keys(torch.tensor([[1, 2, -1, 3, 1]]), visible)
    tensor([[False,  True, False]])
    """
    named = torch.zeros(*indices.shape[:-1], visible.shape[1], dtype=torch.bool, device=indices.device)
    for j in range(visible.shape[1]):
        named[..., j] = (indices == j).any(dim=-1)
    return named & (visible if indices.dim() == 2 else visible[:, None])


def dense_sparse_attention(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    *,
    softmax_offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_attention` of global tensors, in float64.

    Args:
        problem: the batch, its mask, scale and softmax_type; a thd tensor may be longer than its documents.
        The others: as in `sparse_attention`.

    Returns:
        out and lse, float64, as `dense_attention` returns them.
    """
    fmt, batch_size = problem.qkv_format, len(problem.sequences)
    q, k, v = (to_packed(x, fmt).double() for x in (q, k, v))
    named = to_packed(indices, fmt)
    by_head = named[:, None] if named.dim() == 2 else named
    by_head = by_head.expand(-1, problem.heads_kv, -1).repeat_interleave(problem.heads_per_kv, dim=1)
    out = q.new_zeros(q.shape[0], problem.heads_q, problem.d_v)
    lse = q.new_full((q.shape[0], problem.heads_q), float("-inf"))
    for rows, keys, visible in documents_of(problem, q.device):
        chosen = chosen_keys(by_head[rows], visible)
        out[rows], lse[rows], _ = attend(problem, chosen, q[rows], k[keys], v[keys], softmax_offset, None)
    return to_format(out, fmt, batch_size), lse_from_packed(lse, fmt, batch_size)


def dense_index_loss(
    problem: Problem,
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """`index_loss` of global tensors, in float64: a number a row.

    Args:
        problem: the batch, its mask and scale.
        The others: as in `index_loss`.
    """
    fmt = problem.qkv_format
    q_index, k_index, weights, q, k = (to_packed(x, fmt).double() for x in (q_index, k_index, weights, q, k))
    lse, named = lse_to_packed(lse, fmt).double(), to_packed(indices, fmt)
    k = k.repeat_interleave(problem.heads_per_kv, dim=1)
    factor: float = q_index.shape[-1] ** -0.5 if scale is None else scale
    loss = q_index.new_zeros(len(q_index))
    for rows, keys, visible in documents_of(problem, q.device):
        chosen = chosen_keys(named[rows], visible)
        learned = dense_index_scores(q_index[rows], k_index[keys], weights[rows], factor)
        scores = problem.scale * torch.einsum("nhd,mhd->nhm", q[rows], k[keys])
        of_heads = torch.logsumexp(scores - lse[rows][..., None], dim=1)
        parts: list[torch.Tensor] = []
        for i, of_row in enumerate(chosen):
            if not of_row.any():
                parts.append(loss.new_zeros(()))
                continue
            target = torch.softmax(of_heads[i, of_row], dim=0)
            logarithms = torch.log_softmax(learned[i, of_row], dim=0)
            parts.append((torch.xlogy(target, target) - target * logarithms).sum())
        loss[rows] = torch.stack(parts) if parts else loss[rows]
    return to_format(loss, fmt, len(problem.sequences))
