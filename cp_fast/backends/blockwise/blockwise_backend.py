"""Backends "cpu" and "torch": attention by PyTorch's own matrix products, in blocks. Every feature, on every device.

No compiler, no kernel library, no full score matrix: a tile takes memory linear in its rows and columns. Half
precisions are converted to float32 once per launch; everything is computed, accumulated and returned in float32
(float64 for float64 inputs). The two backends differ in the device and in the block size: a block fits in a processor's
cache, or keeps a GPU busy for longer than a launch takes. On a GPU this is slow but general: it serves problems that no
kernel library supports.

    legend   n = rows of q, m = rows of k and v, g = h_q / h_kv, R = rows of a block, C = columns of a block,
             H = kv heads of a block. A block's scores are [H, g * R, C]: the query heads that share a kv head are
             folded into the rows, so K and V are never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.backends.aligned_matrices import aligned, aligned_view
from cp_fast.backends.backend_protocol import (
    Backend,
    BackwardOperands,
    Gradients,
    LaunchOptions,
    Partial,
    VarlenBatch,
)
from cp_fast.backends.blockwise.placed_scores import dropped, modify, placed_scores, pulled_back
from cp_fast.backends.blockwise.score_blocks import ScoreBlockSize, fold, mask, score_blocks, size_of, unfold
from cp_ref.common.wide_dtype import wide_dtype
from cp_ref.spec import Feature, ScoreOptions

__all__ = ["BlockwiseBackend"]


class BlockwiseBackend(Backend):
    """PyTorch operators on one device type; every feature, float16 to float64."""

    shares_keys = 1

    def __init__(self, name: str, device: Feature, size: ScoreBlockSize) -> None:
        """`device` is Feature.CPU or Feature.CUDA."""
        self.name = name
        self.size = size
        self.features: frozenset[Feature] = frozenset(
            {
                Feature.GQA,
                Feature.ASYMMETRIC_DIMS,
                Feature.GQA_ASYMMETRIC_DIMS,
                Feature.HEAD_DIM_OVER_128,
                Feature.HEAD_DIM_OVER_256,
                Feature.HEAD_DIM_ODD,
                Feature.SOFTCAP,
                Feature.ALIBI,
                Feature.SCORE_MOD,
                Feature.DROPOUT,
                Feature.LSE_GRADIENT,
                Feature.MAX_LOGIT,
                Feature.DETERMINISTIC,
                Feature.IN_PLACE,
                device,
                Feature.FLOAT16,
                Feature.BFLOAT16,
                Feature.FLOAT32,
                Feature.FLOAT64,
            }
        )

    def why_not(self) -> str | None:
        """None: it works on any machine with the device."""
        return (
            "PyTorch sees no CUDA device" if Feature.CUDA in self.features and not torch.cuda.is_available() else None
        )

    @torch.no_grad()
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: VarlenBatch, options: LaunchOptions
    ) -> Partial:
        """See `Backend.forward`; out, lse and max_logit come in the compute dtype."""
        scores, dtype = options.scores, wide_dtype(q.dtype)
        (n, h_q, _), d_v = q.shape, v.shape[2]
        out = torch.zeros(n, h_q, d_v, dtype=dtype, device=q.device)
        lse = torch.full((h_q, n), -torch.inf, dtype=dtype, device=q.device)
        max_logit = torch.full((h_q,), -torch.inf, dtype=dtype, device=q.device)
        keys, values = _head_major(k, dtype), _head_major(v, dtype)
        scratch = _Scratch(q)
        for block in score_blocks(segments, q, k, self.size):
            queries = fold(q[block.rows, block.heads_q], size_of(block.heads_kv), dtype).mul_(scores.scale)
            top = total = mix = None  # [H, g * R, 1] twice, [H, g * R, d_v]: online softmax over the column blocks
            for columns, seen in block.columns:
                s = _scores(queries, keys[block.heads_kv, columns], scores, scratch)
                placed = placed_scores(options.score_inputs, block, columns)
                modify(s, placed, block)
                mask(s, seen, -torch.inf)
                here = s.amax(-1, keepdim=True)
                new = here if top is None else torch.maximum(top, here)
                # A row that sees nothing yet has new = -inf. With a finite base its exp(-inf - base) is 0, not NaN.
                base = new.clamp_min(torch.finfo(dtype).min)
                p = s.sub_(base).exp_()
                mass = p.sum(-1, keepdim=True)
                if (factors := dropped(p, placed, block)) is not None:
                    p.mul_(factors)
                if top is None or total is None or mix is None:
                    total, mix = mass, _product(p, values[block.heads_kv, columns])
                else:
                    shrink = top.sub_(base).exp_()
                    total.mul_(shrink).add_(mass)
                    mix.mul_(shrink).baddbmm_(p, values[block.heads_kv, columns])
                top = new
            if top is None or total is None or mix is None:
                continue
            mix.div_(total.masked_fill(total == 0, 1))
            out[block.rows, block.heads_q] = unfold(mix, block)
            lse[block.heads_q, block.rows] = (top + total.log_()).view(-1, size_of(block.rows))
            largest = max_logit[block.heads_q]
            torch.maximum(largest, top.view(-1, size_of(block.rows)).amax(-1), out=largest)
        return Partial(out, lse, max_logit)

    @torch.no_grad()
    def backward(self, operands: BackwardOperands, segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """See `Backend.backward`; the gradients come in the compute dtype, and always deterministic."""
        scores, (dout, q, k, v, out, lse, dlse, *_) = options.scores, operands
        dtype = wide_dtype(q.dtype)
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        keys, values = _head_major(k, dtype), _head_major(v, dtype)
        dkeys, dvalues = (aligned(x.shape, dtype, x.device).zero_() for x in (keys, values))
        scratch = _Scratch(q)
        for block in score_blocks(segments, q, k, self.size):
            queries = fold(q[block.rows, block.heads_q], size_of(block.heads_kv), dtype).mul_(scores.scale)
            douts = fold(dout[block.rows, block.heads_q], size_of(block.heads_kv), dtype)
            outs = fold(out[block.rows, block.heads_q], size_of(block.heads_kv), dtype)
            delta = outs.mul_(douts).sum(-1, keepdim=True)
            if dlse is not None:
                delta.sub_(dlse[block.heads_q, block.rows].reshape(delta.shape))
            norm = lse[block.heads_q, block.rows].to(dtype).reshape(delta.shape)
            norm = norm.masked_fill(norm == -torch.inf, torch.inf)  # a row that sees nothing: p = exp(s - inf) = 0
            dqueries = None
            for columns, seen in block.columns:
                key, value = keys[block.heads_kv, columns], values[block.heads_kv, columns]
                s = _scores(queries, key, scores, scratch)
                slope = _slope(s, scores, scratch)
                placed = placed_scores(options.score_inputs, block, columns)
                before = modify(s, placed, block)
                p = s.sub_(norm).exp_()
                mask(p, seen, 0)
                dp = torch.bmm(douts, value.mT, out=scratch.buffer(1, s.shape))
                if (factors := dropped(p, placed, block)) is not None:
                    dp.mul_(factors)
                ds = pulled_back(before, dp.sub_(delta).mul_(p), placed, p)
                if factors is not None:
                    p.mul_(factors)
                dvalues[block.heads_kv, columns].baddbmm_(p.mT, douts)
                if slope is not None:
                    ds.mul_(slope)
                dkeys[block.heads_kv, columns].baddbmm_(ds.mT, queries)
                dqueries = _product(ds, key) if dqueries is None else dqueries.baddbmm_(ds, key)
            if dqueries is not None:
                dq[block.rows, block.heads_q] = unfold(dqueries.mul_(scores.scale), block)
        return Gradients(dq, dkeys.transpose(0, 1).contiguous(), dvalues.transpose(0, 1).contiguous())


class _Scratch:
    """Buffers for the scores of one block, reused by every block of a launch."""

    def __init__(self, q: torch.Tensor) -> None:
        """Of q's compute dtype; they grow to the largest shape that is asked for."""
        self._buffers = [torch.empty(0, dtype=wide_dtype(q.dtype), device=q.device) for _ in range(3)]

    def buffer(self, which: int, shape: Sequence[int]) -> torch.Tensor:
        """Buffer 0, 1 or 2 in this shape, its contents undefined."""
        return aligned_view(self._buffers[which], shape)


def _head_major(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """k or v [m, h_kv, d] as [h_kv, m, d] of the compute dtype, its rows aligned."""
    return aligned((x.shape[1], x.shape[0], x.shape[2]), dtype, x.device).copy_(x.transpose(0, 1))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, [H, R, C] and [H, C, d] -> [H, R, d], its rows aligned."""
    return torch.bmm(a, b, out=aligned((*a.shape[:2], b.shape[2]), a.dtype, a.device))


def _scores(queries: torch.Tensor, key: torch.Tensor, options: ScoreOptions, scratch: _Scratch) -> torch.Tensor:
    """The scores [H, g * R, C] of scaled queries [H, g * R, d] and keys [H, C, d], in buffer 0."""
    s = torch.bmm(queries, key.mT, out=scratch.buffer(0, (*queries.shape[:2], key.shape[1])))
    return s.div_(options.softcap).tanh_().mul_(options.softcap) if options.softcap > 0 else s


def _slope(s: torch.Tensor, options: ScoreOptions, scratch: _Scratch) -> torch.Tensor | None:
    """How scores s rise with their products, in buffer 2; None for 1."""
    if options.softcap <= 0:
        return None
    return torch.div(s, options.softcap, out=scratch.buffer(2, s.shape)).square_().neg_().add_(1)
