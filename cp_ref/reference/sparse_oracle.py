"""Sparse attention by its definition: the oracle for `select_keys`, `sparse_attention` and `index_loss`, and for
compressed keys: `compress_keys` and `compressed_attention`.

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
    "dense_compress_keys",
    "dense_compressed_attention",
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


def documents_of(
    problem: Problem, device: torch.device | str = "cpu", rate: int | None = None
) -> Iterator[DocumentRows]:
    """All documents of a problem, whose areas, if there are any, lie inside of documents.

    rate: the keys are windows of this many tokens, document after document; None: they are tokens.

    >>> from cp_ref.schedules.problem import Sequence
    >>> two = Problem(1, (Sequence(1, 1, 2, 2), Sequence(2, 2, 2, 2)), qkv_format="thd")
    >>> [(rows.start, rows.stop, visible.int().tolist()) for rows, _, visible in documents_of(two)]
    [(0, 1, [[1]]), (2, 4, [[1, 0], [1, 1]])]
    >>> [(keys.start, keys.stop, visible.int().tolist()) for _, keys, visible in documents_of(two, rate=2)]
    [(0, 0, [[]]), (0, 1, [[0], [1]])]
    """
    device = torch.device(device)
    if rate is not None:
        first = 0
        for s, q in zip(problem.sequences, problem.starts_q, strict=False):
            t, w = (torch.arange(count, device=device) for count in (s.len_q, s.len_q // rate))
            yield DocumentRows(slice(q, q + s.len_q), slice(first, first + len(w)), (w + 1) * rate <= t[:, None] + 1)
            first += len(w)
        return
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
    rate: int | None = None,
) -> torch.Tensor:
    """`select_keys` of global tensors, with scores in float64: int32 [..., top_k].

    Args:
        problem: the batch and its mask.
        The others: as in `select_keys`.
    """
    fmt = problem.qkv_format
    q, w = (to_packed(x, fmt).double() for x in (q_index, weights))
    k = _key_rows(problem, rate, k_index)
    found = torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
    for rows, keys, visible in documents_of(problem, q.device, rate):
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
    indices: torch.Tensor | None,
    *,
    softmax_offset: torch.Tensor | None = None,
    rate: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_attention` of global tensors, in float64.

    Args:
        problem: the batch, its mask, scale and softmax_type; a thd tensor may be longer than its documents.
        The others: as in `sparse_attention`; entries are packed, those of all ranks, document after document.

    Returns:
        out and lse, float64, as `dense_attention` returns them.
    """
    keys = [(rate, _key_rows(problem, rate, k), _key_rows(problem, rate, v), indices)]
    return _attended(problem, q, keys, softmax_offset)


def dense_compressed_attention(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_entries: torch.Tensor,
    v_entries: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    rate: int,
    softmax_offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`compressed_attention` of global tensors, in float64; see `dense_sparse_attention`."""
    tokens = None, _key_rows(problem, None, k), _key_rows(problem, None, v), None
    entries = rate, k_entries.double(), v_entries.double(), indices
    return _attended(problem, q, [tokens, entries], softmax_offset)


def _key_rows(problem: Problem, rate: int | None, x: torch.Tensor) -> torch.Tensor:
    return (x if rate is not None else to_packed(x, problem.qkv_format)).double()


def _attended(
    problem: Problem,
    q: torch.Tensor,
    kinds: list[tuple[int | None, torch.Tensor, torch.Tensor, torch.Tensor | None]],
    softmax_offset: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over keys of several kinds: of each its rate, k, v, and indices or None."""
    fmt, batch_size = problem.qkv_format, len(problem.sequences)
    q = to_packed(q, fmt).double()
    out = q.new_zeros(q.shape[0], problem.heads_q, problem.d_v)
    lse = q.new_full((q.shape[0], problem.heads_q), float("-inf"))
    by_document = zip(*(documents_of(problem, q.device, rate) for rate, *_ in kinds), strict=True)
    for found in by_document:
        rows = found[0].rows
        seen, of_k, of_v = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for (_, keys, visible), (_, k, v, indices) in zip(found, kinds, strict=True):
            chosen = visible[:, None].expand(-1, problem.heads_q, -1)
            if indices is not None:
                named = to_packed(indices, fmt)[rows]
                by_head = (named[:, None] if named.dim() == 2 else named).expand(-1, problem.heads_kv, -1)
                chosen = chosen_keys(by_head.repeat_interleave(problem.heads_per_kv, dim=1), visible)
            seen, of_k, of_v = [*seen, chosen], [*of_k, k[keys]], [*of_v, v[keys]]
        given = torch.cat(seen, dim=-1), q[rows], torch.cat(of_k), torch.cat(of_v)
        out[rows], lse[rows], _ = attend(problem, *given, softmax_offset, None)
    return to_format(out, fmt, batch_size), lse_from_packed(lse, fmt, batch_size)


def dense_compress_keys(
    problem: Problem,
    values: torch.Tensor,
    gates: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rate: int,
    overlap: bool = False,
) -> torch.Tensor:
    """`compress_keys` of global tensors, in float64: the entries of all documents [n, d], packed.

    >>> from cp_ref.schedules.problem import Sequence
    >>> one = Problem(1, (Sequence(3, 3, 3, 3),), qkv_format="thd")
    >>> dense_compress_keys(one, torch.tensor([[1.0], [3.0], [9.0]]), torch.zeros(3, 1), rate=2).tolist()
    [[2.0]]
    """
    fmt = problem.qkv_format
    values, gates = (to_packed(x, fmt).double() for x in (values, gates))
    half = values.shape[-1] // 2 if overlap else 0
    found = list[torch.Tensor]()
    for s, start in zip(problem.sequences, problem.starts_q, strict=False):
        for w in range(s.len_q // rate):
            of_windows = list[tuple[torch.Tensor, torch.Tensor]]()
            for number, channels in ((w - 1, slice(0, half)), (w, slice(half, None))):
                if number >= 0 and (overlap or number == w):
                    rows = slice(start + number * rate, start + (number + 1) * rate)
                    logits = gates[rows] if bias is None else gates[rows] + bias.double()
                    of_windows.append((values[rows, channels], logits[:, channels]))
            x, logits = (torch.cat(parts) for parts in zip(*of_windows, strict=True))
            found.append((torch.softmax(logits, dim=0) * x).sum(dim=0))
    return torch.stack(found) if found else values[:0, half:]


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
    rate: int | None = None,
) -> torch.Tensor:
    """`index_loss` of global tensors, in float64: a number a row.

    Args:
        problem: the batch, its mask and scale.
        The others: as in `index_loss`.
    """
    fmt = problem.qkv_format
    q_index, weights, q = (to_packed(x, fmt).double() for x in (q_index, weights, q))
    k_index, k = (_key_rows(problem, rate, x) for x in (k_index, k))
    lse, named = lse_to_packed(lse, fmt).double(), to_packed(indices, fmt)
    k = k.repeat_interleave(problem.heads_per_kv, dim=1)
    factor: float = q_index.shape[-1] ** -0.5 if scale is None else scale
    loss = q_index.new_zeros(len(q_index))
    for rows, keys, visible in documents_of(problem, q.device, rate):
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
