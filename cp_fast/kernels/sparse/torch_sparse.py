"""Attention over chosen keys on one rank in plain PyTorch, in blocks of query rows: see `SparseKernels`.

legend   n = own query rows, r = rows of a block, m = rows of gathered keys, c = columns, e = h_q / h_kv
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from cp_fast.kernels.sparse.sparse_kernels import Runs, Visible, shared_storage
from cp_ref.batches.tensors import wide_dtype

__all__ = ["backward", "forward", "loss", "loss_backward", "rows_of", "select"]

_NUMBERS = 2**21  # of a block's largest tensor


# ---- selection


def select(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, visible: Visible, top_k: int, scale: float
) -> torch.Tensor:
    """See `SparseKernels`."""
    wide = wide_dtype(q_index.dtype)
    d = 1 << (q_index.shape[-1] - 1).bit_length()
    found = torch.full((len(q_index), top_k), -1, dtype=torch.int32, device=q_index.device)
    for block in _blocks(len(q_index), most=64):
        here = Visible(*(x[block] for x in visible))
        some = here.starts < here.stops
        if not bool(some.any()):
            continue
        first, last = int(here.starts[some].min()), int(here.stops[some].max())
        q, w = _padded(q_index[block].to(wide), d), weights[block].to(wide)
        scores = q.new_empty(len(q), last - first)
        for columns in _blocks(last - first, d * len(q), most=last - first):
            k = _padded(k_index[first + columns.start : first + columns.stop].to(wide), d)
            scores[:, columns] = _scores(q, k, w, scale)
        positions = _positions(here, first, last)
        scores.clamp_(min=torch.finfo(wide).min).masked_fill_(positions < 0, float("-inf"))
        order = scores.sort(dim=1, descending=True, stable=True).indices  # columns, and so positions, ascend
        best = positions.gather(1, order[:, :top_k])
        found[block, : best.shape[1]] = best
    return found


def _scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """The scores [r, c] of q [r, h_i, d] and k [c, d], in the one order of operations."""
    total = q.new_zeros(len(q), len(k))
    for head in range(q.shape[1]):
        dots = q[:, head, None] * k
        while dots.shape[-1] > 1:
            low, high = dots.chunk(2, dim=-1)
            dots = low + high
        total += weights[:, head, None] * (dots[..., 0] * scale).relu_()
    return total


def _padded(x: torch.Tensor, d: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, d - x.shape[-1]))


def _positions(visible: Visible, begin: int, end: int) -> torch.Tensor:
    """The position of each column in [begin, end) in each row's document, int32 [r, c]; -1 where it is hidden."""
    columns = torch.arange(begin, end, dtype=torch.int32, device=visible.starts.device)
    found = columns.new_full((len(visible.starts), end - begin), -1)
    for start, stop, position in zip(*(x.unbind(1) for x in visible), strict=True):
        seen = (columns >= start[:, None]) & (columns < stop[:, None])
        found = torch.where(seen, columns + (position - start)[:, None], found)
    return found


def _blocks(n: int, row: int = 1, most: int = 256) -> Iterator[slice]:
    """Cut n rows into blocks. row: the numbers that one row takes."""
    size = max(min(_NUMBERS // max(row, 1), most), 1)
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


# ---- rows of keys


def rows_of(indices: torch.Tensor, visible: Visible) -> torch.Tensor:
    """See `SparseKernels`."""
    found = torch.empty_like(indices, memory_format=torch.contiguous_format)
    for block in _blocks(len(indices), indices.shape[1] * indices.shape[2], most=len(indices)):
        rows = Visible(*(x[block] for x in visible)).rows(indices[block]).sort(dim=-1).values
        again = torch.zeros_like(rows, dtype=torch.bool)
        again[..., 1:] = rows[..., 1:] == rows[..., :-1]
        found[block] = rows.masked_fill_(again, -1)
    return found


def _keys_of(rows: torch.Tensor, runs: Runs | None, block: slice) -> _Keys:
    """The keys of a block's rows."""
    return _Keys(rows[block] if runs is None else runs.of(block).listed(rows[block]))


class _Keys:
    """The keys of a block's rows, one after the other: of each kv head, top_k numbers of rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        named = (rows >= 0).flatten(0, 1).any(0)
        rows = rows[..., named] if not bool(named.all()) else rows
        self.hidden = rows < 0  # [r, g, top_k]
        self._rows = rows.clamp(min=0).long()

    def of(self, x: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        """x [m, h_kv, d] as [r, h_kv, top_k, d], zero where hidden."""
        if self._rows.shape[1] == 1:
            found = x[self._rows[:, 0]].transpose(1, 2)
        else:
            found = x[self._rows, torch.arange(x.shape[1], device=x.device)[:, None]]
        return found.to(wide).masked_fill(self.hidden[..., None], 0)

    def add(self, to: torch.Tensor, grads: torch.Tensor, *, deterministic: bool) -> None:
        """Add grads [r, h_kv, top_k, d] to the rows that they are of, in `to` [m, h_kv, d]."""
        heads = torch.arange(to.shape[1], device=to.device)[:, None]
        rows = self._rows.expand(-1, to.shape[1], -1)
        grads = grads.masked_fill(self.hidden[..., None], 0)
        if deterministic and to.is_cuda:
            to.index_put_((rows, heads.expand_as(rows)), grads, accumulate=True)  # sorts, and adds in this order
        else:
            flat = to.view(-1, to.shape[-1])
            flat.index_add_(0, (rows * to.shape[1] + heads).flatten(), grads.reshape(-1, to.shape[-1]))


def _numbers(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, runs: Runs | None = None) -> int:
    """The numbers of the largest tensor of a query row: scores, or keys."""
    return (rows.shape[-1] + (0 if runs is None else runs.longest)) * max(q.shape[1], k.shape[1] * k.shape[2])


# ---- attention


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    *,
    runs: Runs | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `SparseKernels`."""
    wide, (n, heads, _) = wide_dtype(q.dtype), q.shape
    out = q.new_empty(n, heads, v.shape[-1])
    lse = q.new_full((n, heads), float("-inf"), dtype=wide)
    for block in _blocks(n, _numbers(q, k, rows, runs)):
        keys = _keys_of(rows, runs, block)
        logits = _logits(q[block], keys, k, scale)  # [r, h_kv, e, top_k]
        total = logits.logsumexp(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], float("-inf"))
        total = total.flatten(1)
        if sink is not None:
            total = torch.logaddexp(total, sink.expand_as(total))
        lse[block] = total
        out[block] = (_weights(logits, total) @ keys.of(v, wide)).flatten(1, 2).to(q.dtype)
    return out, lse


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
    deterministic: bool,
    *,
    one_sum: bool = False,
    runs: Runs | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `SparseKernels`."""
    wide, kv = lse.dtype, k.shape[1]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (k, v))
    joined = one_sum and shared_storage(k, v)
    for block in _blocks(len(q), _numbers(q, k, rows, runs)):
        keys = _keys_of(rows, runs, block)
        some = keys.of(k, wide)
        weights = _weights(_logits(q[block], keys, k, scale), lse[block])
        grads = _folded(dout[block].to(wide), kv)
        delta = (dout[block].to(wide) * out[block].to(wide)).sum(-1)
        if dlse is not None:
            delta = delta - dlse[block]
        dlogits = weights * (grads @ keys.of(v, wide).mT - delta.view(*weights.shape[:3], 1)) * scale
        dlogits = dlogits.masked_fill(keys.hidden[:, :, None], 0)
        dq[block] = (dlogits @ some).flatten(1, 2).to(q.dtype)
        keys.add(dk, dlogits.mT @ _folded(q[block].to(wide), kv), deterministic=deterministic)
        keys.add(dv, weights.mT @ grads, deterministic=deterministic)
    if joined:
        dk[..., : v.shape[-1]] += dv
    return dq, dk, None if joined else dv


def _folded(x: torch.Tensor, kv: int) -> torch.Tensor:
    """[r, h_q, d] as [r, h_kv, e, d]."""
    return x.unflatten(1, (kv, -1))


def _logits(q: torch.Tensor, keys: _Keys, k: torch.Tensor, scale: float) -> torch.Tensor:
    """The scores of a block's chosen keys [r, h_kv, e, top_k], -inf where hidden."""
    wide = wide_dtype(q.dtype)
    products = _folded(q.to(wide), k.shape[1]) @ keys.of(k, wide).mT
    return (products * scale).masked_fill_(keys.hidden[:, :, None], float("-inf"))


def _weights(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(logits - lse); 0 for rows without keys."""
    lse = lse.view(*logits.shape[:3], 1)
    return torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0))


# ---- the indexer's loss


class _Divergence(NamedTuple):
    """Both distributions of a block's rows over their chosen keys, as logarithms [r, top_k], 0 where hidden; and what
    the indexer's scores were made of.
    """

    target: torch.Tensor
    learned: torch.Tensor
    k: torch.Tensor  # [r, top_k, d_i]
    dots: torch.Tensor  # [r, h_i, top_k], times the scale


def loss(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    softmax_scale: float,
) -> torch.Tensor:
    """See `SparseKernels`."""
    found = lse.new_empty(len(q))
    for block in _blocks(len(q), _numbers(q, k, rows)):
        keys = _Keys(rows[block])
        of = _divergence(q_index[block], k_index, weights[block], q[block], k, lse[block], keys, scale, softmax_scale)
        target = of.target.exp().masked_fill(keys.hidden[:, 0], 0)
        found[block] = (target * (of.target - of.learned)).masked_fill(target == 0, 0).sum(-1)
    return found


def loss_backward(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    softmax_scale: float,
    dloss: torch.Tensor,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `SparseKernels`."""
    wide = lse.dtype
    dq = torch.empty_like(q_index, memory_format=torch.contiguous_format)
    dk, dweights = (x.new_zeros(x.shape, dtype=wide) for x in (k_index, weights))
    for block in _blocks(len(q), _numbers(q, k, rows)):
        keys = _Keys(rows[block])
        of = _divergence(q_index[block], k_index, weights[block], q[block], k, lse[block], keys, scale, softmax_scale)
        dscores = (of.learned.exp() - of.target.exp()) * dloss[block, None]
        dscores = dscores.masked_fill(keys.hidden[:, 0], 0)[:, None]  # [r, 1, top_k]
        dweights[block] = (dscores * of.dots.relu()).sum(-1)
        ddots = dscores * weights[block, :, None].to(wide) * (of.dots > 0) * scale
        dq[block] = (ddots @ of.k).to(dq.dtype)
        keys.add(dk[:, None], (ddots.mT @ q_index[block].to(wide))[:, None], deterministic=deterministic)
    return dq, dk, dweights


def _divergence(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    keys: _Keys,
    scale: float,
    softmax_scale: float,
) -> _Divergence:
    wide, hidden = lse.dtype, keys.hidden[:, 0]
    logits = _logits(q.to(wide), keys, k, softmax_scale).flatten(1, 2) - lse[..., None]
    chosen = keys.of(k_index[:, None], wide)[:, 0]
    dots = (q_index.to(wide) @ chosen.mT) * scale
    scores = (weights[..., None].to(wide) * dots.relu()).sum(1).masked_fill(hidden, float("-inf"))
    both = logits.logsumexp(1).masked_fill(hidden, float("-inf")), scores
    target, learned = (x.log_softmax(-1).masked_fill(hidden, 0) for x in both)
    return _Divergence(target, learned, chosen, dots)
