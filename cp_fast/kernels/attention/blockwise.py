"""Backends "cpu" and "torch": attention by PyTorch's own matrix products, in blocks. Every feature, on every device.

No compiler, no kernel library, no full score matrix: a tile takes memory linear in its rows and columns. Half
precisions are converted to float32 once per launch; everything is computed, accumulated and returned in float32
(float64 for float64 inputs). The two backends differ in the device and in the block size: a block fits in a processor's
cache, or keeps a GPU busy for longer than a launch takes. On a GPU this is slow but general: it serves problems that no
kernel library supports.

    legend   as in `score_blocks`; n = rows of q, m = rows of k and v

On a CPU a row's out, lse and dq have the same bits in every launch in which its keys begin at the same one. Its
neighbours do not matter. Columns are cut at multiples of a block's columns from a segment's first key. The matrix
products of all blocks have equally many columns. Zeros fill rows and head dims up to whole vectors. Then a library adds
up each product in the same order, wherever the row lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cp_fast.kernels.attention.backend_protocol import (
    Backend,
    BackwardOperands,
    Gradients,
    LaunchOptions,
    Outs,
    Partial,
)
from cp_fast.kernels.attention.kernel_operands import aligned, aligned_view
from cp_fast.kernels.attention.score_blocks import (
    ScoreBlock,
    ScoreBlockSize,
    dropped,
    fold,
    mask,
    modify,
    of_pairs,
    of_rows,
    placed_scores,
    pulled_back,
    score_blocks,
    size_of,
)
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.batches.tensors import wide_dtype
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature

__all__ = ["BlockwiseBackend"]


class _Sums(NamedTuple):
    """The online softmax of a block's rows, over the columns so far."""

    top: torch.Tensor  # [H, g * height, 1], the largest score
    total: torch.Tensor  # [H, g * height, 1], the sum of exp(score - top)
    mix: torch.Tensor  # [H, g * height, d_v], the sum of the values with these weights, after dropout


class BlockwiseBackend(Backend):
    """PyTorch operators on one device type; every feature, float16 to float64."""

    shared_keys_tile = 1
    writes_rows = True

    def __init__(self, name: str, device: Feature, size: ScoreBlockSize) -> None:
        """`device` is Feature.CPU or Feature.CUDA."""
        self.name = name
        self.size = size
        self.key_block = size.columns if device is Feature.CPU else 0
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
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: VarlenBatch,
        options: LaunchOptions,
        outs: Outs | None = None,
    ) -> Partial:
        """See `Backend.forward`; out, lse and max_logit come in the compute dtype, except with `outs`."""
        scores, dtype = options.scores, wide_dtype(q.dtype)
        (n, h_q, _), d_v = q.shape, v.shape[2]
        out, lse = outs or (
            torch.zeros(n, h_q, d_v, dtype=dtype, device=q.device),
            torch.full((h_q, n), -torch.inf, dtype=dtype, device=q.device),
        )
        max_logit = torch.full((h_q,), -torch.inf, dtype=dtype, device=q.device)
        keys, values = _HeadMajor(k, dtype, self.size), _HeadMajor(v, dtype, self.size)
        scratch = _Scratch(q)
        for block in score_blocks(segments, q, k, self.size):
            queries = self._folded(q, block, dtype).mul_(scores.scale)
            sums: _Sums | None = None
            for columns, seen in block.columns:
                s = _scores(queries, keys.block(block.heads_kv, columns), scores, scratch)
                placed = placed_scores(options.score_inputs, block, columns)
                modify(of_pairs(s, block, seen), placed)
                mask(s, block, seen, -torch.inf)
                here = s.amax(-1, keepdim=True)
                top = here if sums is None else torch.maximum(sums.top, here)
                # A row that sees nothing yet has top = -inf. With a finite base its exp(-inf - base) is 0, not NaN.
                base = top.clamp_min(torch.finfo(dtype).min)
                p = s.sub_(base).exp_()
                mass = p.sum(-1, keepdim=True)
                if (factors := dropped(of_pairs(p, block, seen), placed)) is not None:
                    of_pairs(p, block, seen).mul_(factors)
                value = values.block(block.heads_kv, columns)
                if sums is None:
                    sums = _Sums(top, mass, _product(p, value))
                else:
                    shrink = sums.top.sub_(base).exp_()
                    sums.mix.mul_(shrink).baddbmm_(p, value)
                    sums = _Sums(top, sums.total.mul_(shrink).add_(mass), sums.mix)
            if sums is None:
                continue
            top, total, mix = sums
            mix.div_(total.masked_fill(total == 0, 1))
            out[block.rows, block.heads_q] = of_rows(mix, block)[..., :d_v].transpose(0, 1)
            tops = of_rows(top, block).squeeze(-1)
            lse[block.heads_q, block.rows] = tops + of_rows(total.log_(), block).squeeze(-1)
            largest = max_logit[block.heads_q]
            torch.maximum(largest, tops.amax(-1), out=largest)
        return Partial(out, lse, max_logit)

    @torch.no_grad()
    def backward(self, given: list[BackwardOperands], segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """See `Backend.backward`; the gradients come in the compute dtype, and always deterministic."""
        scores, (dout, q, k, v, out, lse, dlse, *_) = options.scores, given.pop()
        dtype, d_qk = wide_dtype(q.dtype), q.shape[2]
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        keys, values = _HeadMajor(k, dtype, self.size), _HeadMajor(v, dtype, self.size)
        dkeys, dvalues = keys.gradient(), values.gradient()
        scratch = _Scratch(q)
        for block in score_blocks(segments, q, k, self.size):
            queries = self._folded(q, block, dtype).mul_(scores.scale)
            douts, outs = self._folded(dout, block, dtype), self._folded(out, block, dtype)
            delta = outs.mul_(douts).sum(-1, keepdim=True)
            if dlse is not None:
                of_rows(delta, block).sub_(dlse[block.heads_q, block.rows, None])
            norm = torch.full_like(delta, torch.inf)  # Rows that fill the block up have p = exp(s - inf) = 0.
            of_rows(norm, block).copy_(lse[block.heads_q, block.rows, None])
            norm.masked_fill_(norm == -torch.inf, torch.inf)  # A row that sees nothing has it too.
            dqueries = None
            for columns, seen in block.columns:
                key, value = (x.block(block.heads_kv, columns) for x in (keys, values))
                s = _scores(queries, key, scores, scratch)
                slope = _slope(s, scores, scratch)
                placed = placed_scores(options.score_inputs, block, columns)
                before = modify(of_pairs(s, block, seen), placed)
                p = s.sub_(norm).exp_()
                mask(p, block, seen, 0)
                dp = torch.bmm(douts, value.mT, out=scratch.buffer(1, s.shape))
                of_p, of_dp = (of_pairs(x, block, seen) for x in (p, dp))
                if (factors := dropped(of_p, placed)) is not None:
                    of_dp.mul_(factors)
                ds = dp.sub_(delta).mul_(p)
                if before is not None:
                    of_dp.copy_(pulled_back(before, of_dp, placed, of_p))
                if factors is not None:
                    of_p.mul_(factors)
                if slope is not None:
                    ds.mul_(slope)
                _add_product(dvalues[block.heads_kv, columns], p, douts)
                _add_product(dkeys[block.heads_kv, columns], ds, queries)
                dqueries = _product(ds, key) if dqueries is None else dqueries.baddbmm_(ds, key)
            if dqueries is not None:
                found = of_rows(dqueries.mul_(scores.scale), block)
                dq[block.rows, block.heads_q] = found[..., :d_qk].transpose(0, 1)
        dk, dv = (x[..., : y.shape[2]].transpose(0, 1).contiguous() for x, y in ((dkeys, k), (dvalues, v)))
        return Gradients(dq, dk, dv)

    def _folded(self, x: torch.Tensor, block: ScoreBlock, dtype: torch.dtype) -> torch.Tensor:
        """The rows and heads of a block, as `fold` has them."""
        width = self.size.filled(x.shape[2])
        return fold(x[block.rows, block.heads_q], size_of(block.heads_kv), dtype, block.height, width)


class _HeadMajor:
    """k or v [m, h_kv, d] as [h_kv, m, d] of the compute dtype, its rows aligned and filled up with zeros."""

    def __init__(self, x: torch.Tensor, dtype: torch.dtype, size: ScoreBlockSize) -> None:
        self._size = size
        self._rows = aligned((x.shape[1], x.shape[0], size.filled(x.shape[2])), dtype, x.device)
        self._rows[..., x.shape[2] :].zero_()
        self._rows[..., : x.shape[2]].copy_(x.transpose(0, 1))
        self._kept: tuple[tuple[int, ...], torch.Tensor] | None = None

    def block(self, heads: slice, columns: slice) -> torch.Tensor:
        """Some heads and columns, [H, C, d]: a view, or a copy with zeros where a segment ends before the block."""
        here, width = self._rows[heads, columns], self._size.filled_columns(size_of(columns))
        if here.shape[1] == width:
            return here
        place = (heads.start, heads.stop, columns.start, columns.stop)
        if self._kept is None or self._kept[0] != place:  # The next rows of a segment ask for the same.
            filled = aligned((here.shape[0], width, here.shape[2]), here.dtype, here.device).zero_()
            filled[:, : here.shape[1]].copy_(here)
            self._kept = place, filled
        return self._kept[1]

    def gradient(self) -> torch.Tensor:
        """Zeros [h_kv, m, d] for its gradient, with as much room."""
        return aligned(self._rows.shape, self._rows.dtype, self._rows.device).zero_()


class _Scratch:
    """Buffers for the scores of one block, reused by every block of a launch."""

    def __init__(self, q: torch.Tensor) -> None:
        """Of q's compute dtype; they grow to the largest shape that is asked for."""
        self._buffers = [torch.empty(0, dtype=wide_dtype(q.dtype), device=q.device) for _ in range(3)]

    def buffer(self, which: int, shape: Sequence[int]) -> torch.Tensor:
        """Buffer 0, 1 or 2 in this shape, its contents undefined."""
        return aligned_view(self._buffers[which], shape)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total [H, up to C, d] += a^T @ b, of [H, R, C] and [H, R, d]: its first columns."""
    if total.shape[1] == a.shape[2]:
        total.baddbmm_(a.mT, b)
    else:
        total.add_(torch.bmm(a.mT, b)[:, : total.shape[1]])


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, [H, R, C] and [H, C, d] -> [H, R, d], its rows aligned."""
    return torch.bmm(a, b, out=aligned((*a.shape[:2], b.shape[2]), a.dtype, a.device))


def _scores(queries: torch.Tensor, key: torch.Tensor, options: ScoreSpec, scratch: _Scratch) -> torch.Tensor:
    """The scores [H, g * R, C] of scaled queries [H, g * R, d] and keys [H, C, d], in buffer 0."""
    s = torch.bmm(queries, key.mT, out=scratch.buffer(0, (*queries.shape[:2], key.shape[1])))
    return s.div_(options.softcap).tanh_().mul_(options.softcap) if options.softcap > 0 else s


def _slope(s: torch.Tensor, options: ScoreSpec, scratch: _Scratch) -> torch.Tensor | None:
    """How scores s rise with their products, in buffer 2; None for 1."""
    if options.softcap <= 0:
        return None
    return torch.div(s, options.softcap, out=scratch.buffer(2, s.shape)).square_().neg_().add_(1)
