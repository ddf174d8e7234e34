"""Backends "cpu" and "torch": attention by PyTorch's own matrix products, in blocks. Every feature, on every device.

No compiler, no kernel library, no full score matrix: a tile takes memory linear in its rows and columns. Half
precisions are converted to float32 once per launch; everything is computed, accumulated and returned in float32
(float64 for float64 inputs). The two backends differ in the device and in the block size: a block fits in a processor's
cache, or keeps a GPU busy for longer than a launch takes. On a GPU this is slow but general: it serves problems that no
kernel library supports.

    legend   n = rows of q, m = rows of k and v, g = h_q / h_kv, R = rows of a block, C = columns of a block,
             H = kv heads of a block. A block's scores are [H, g * R, C]: the query heads that share a kv head are
             folded into the rows, so K and V are never repeated.

On a CPU a row's out, lse and dq have the same bits in every launch in which its keys begin at the same one. Its
neighbours do not matter. Columns are cut at multiples of a block's columns from a segment's first key. The matrix
products of all blocks have equally many columns. Zeros fill rows and head dims up to whole vectors. Then a library adds
up each product in the same order, wherever the row lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from cp_fast.kernels.attention.backend_protocol import (
    Backend,
    BackwardOperands,
    Gradients,
    LaunchOptions,
    LaunchScores,
    Outs,
    Partial,
    VarlenBatch,
)
from cp_fast.kernels.attention.kernel_operands import aligned, aligned_view
from cp_ref.batches.tensors import wide_dtype
from cp_ref.calls.scores import PairScores, ScorePlaces
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature

__all__ = [
    "BlockwiseBackend",
    "ColumnBlock",
    "MaskCache",
    "ScoreBlock",
    "ScoreBlockSize",
    "dropped",
    "fold",
    "mask",
    "mask_cache",
    "modify",
    "of_pairs",
    "of_rows",
    "placed_scores",
    "pulled_back",
    "score_blocks",
    "score_blocks_on_device",
    "size_of",
    "visible_columns",
]

# ---- which columns a block of rows sees
#
# Which columns of a segment a block of its rows sees: the diagonal band of `VarlenBatch`, cut into blocks.
#
# With lq rows and lk columns, shift = lk - lq is what the bottom-right alignment adds to a row.


MaskCache = Callable[[int, int, int, int | None, int | None], torch.Tensor]
"""(rows, columns, offset, left, right) -> bool [rows, columns], True where hidden."""


class ColumnBlock(NamedTuple):
    """A block of columns, and what of it the rows do not see."""

    start: int
    stop: int
    hidden: torch.Tensor | None  # bool [rows, stop - start], True where hidden; None where every row sees every column


def visible_columns(
    first: int, last: int, lq: int, lk: int, left: int | None, right: int | None, width: int, masks: MaskCache
) -> list[ColumnBlock]:
    """The column blocks that rows first:last of the segment see. They begin at multiples of `width`, and the last one
    may be narrower. The list is empty where the rows see nothing.

    >>> [(c.start, c.stop, c.hidden is None) for c in visible_columns(3, 4, 7, 7, 2, 0, 2, mask_cache("cpu"))]
    [(0, 2, False), (2, 4, True)]
    """
    shift = lk - lq
    start = 0 if left is None else max(0, first + shift - left)
    stop = lk if right is None else min(lk, last + shift + right)
    blocks: list[ColumnBlock] = []
    for a in range(start // width * width, stop, width):
        b = min(a + width, lk)
        cut_right = right is not None and b - 1 > first + shift + right
        cut_left = left is not None and a < last - 1 + shift - left
        hidden = masks(last - first, b - a, first + shift - a, left, right) if cut_left or cut_right else None
        blocks.append(ColumnBlock(a, b, hidden))
    return blocks


def mask_cache(device: torch.device | str) -> MaskCache:
    """MaskCache on a device, the last few of them kept: blocks along a diagonal share theirs, and so do all heads.

    For one launch: on a GPU a mask kept for longer would have to be known to every stream, and to outlive a capture.

    >>> mask_cache("cpu")(2, 3, 0, None, 0)
    tensor([[False,  True,  True],
            [False, False,  True]])
    """

    @lru_cache(maxsize=16)
    def hidden(rows: int, columns: int, offset: int, left: int | None, right: int | None) -> torch.Tensor:
        distance = torch.arange(columns, device=device)[None, :] - (torch.arange(rows, device=device)[:, None] + offset)
        if left is None:
            return distance > (0 if right is None else right)
        return distance < -left if right is None else (distance < -left) | (distance > right)

    return hidden


# ---- blocks of scores
#
# A launch's scores in blocks: some rows of a segment, some kv heads, some columns at a time.
#
# `score_blocks` follows the lengths on the host, and leaves out hidden blocks. `score_blocks_on_device` is for a GPU
# and lengths that are replaced in a captured graph: it visits all rows and all columns of the tensors, and looks up
# each row's visible columns on the device. The blocks are the same for any lengths, at the cost of computing hidden
# ones.


class ScoreBlockSize(NamedTuple):
    """How large a block of scores [H, g * R, C] may be."""

    scores: int  # H * g * R * C
    columns: int  # C
    rows: int  # About g * R: larger blocks multiply faster and waste more along a diagonal.
    unit: int = 1  # R and head dims are filled up with zeros to multiples of it, and then C to `columns`.

    def filled(self, n: int) -> int:
        """How many rows, or of a head dim, there are with the zeros."""
        return -(-n // self.unit) * self.unit

    def filled_columns(self, n: int) -> int:
        """How many columns a block has with the zeros."""
        return self.columns if self.unit > 1 else n


class ScoreBlock(NamedTuple):
    """Some rows, for some kv heads, with their visible columns."""

    rows: slice  # of q
    columns: Iterable[tuple[slice, ColumnBlock]]  # Of k and v; iterate once.
    heads_q: slice
    heads_kv: slice
    height: int  # How many rows it has with those that fill it up.


def score_blocks(segments: VarlenBatch, q: torch.Tensor, k: torch.Tensor, size: ScoreBlockSize) -> Iterator[ScoreBlock]:
    """Every block of a launch on q [n, h_q, d] and k [m, h_kv, d]: segment by segment, some kv heads at a time, rows in
    order.
    """
    if q.is_cuda and segments.updated_in_place:
        yield from score_blocks_on_device(segments, q, k, size)
        return
    g, masks = q.shape[1] // k.shape[1], mask_cache(q.device)
    lengths = ((b - a for a, b in pairwise(cumulative)) for cumulative in (segments.cu_q, segments.cu_kv))
    for q0, kv0, lq, lk in zip(*segments.first_rows, *lengths, strict=True):
        for rows, width, heads_q, heads_kv in _block_ranges(lq, lk, g, k.shape[1], size):
            seen = visible_columns(rows.start, rows.stop, lq, lk, segments.left, segments.right, width, masks)
            columns = [(slice(kv0 + c.start, kv0 + c.stop), c) for c in seen]
            height = size.filled(size_of(rows))
            yield ScoreBlock(slice(q0 + rows.start, q0 + rows.stop), columns, heads_q, heads_kv, height)


def score_blocks_on_device(
    segments: VarlenBatch, q: torch.Tensor, k: torch.Tensor, size: ScoreBlockSize
) -> Iterator[ScoreBlock]:
    """Every block of rows by every block of columns, whatever the segments are."""
    first, last = _seen_columns(segments, len(q))
    for rows, width, heads_q, heads_kv in _block_ranges(len(q), len(k), q.shape[1] // k.shape[1], k.shape[1], size):
        spans = (slice(a, min(a + width, len(k))) for a in range(0, len(k), width))
        columns = ((span, _between(first[rows], last[rows], span)) for span in spans)
        yield ScoreBlock(rows, columns, heads_q, heads_kv, size.filled(size_of(rows)))


def _block_ranges(n: int, m: int, g: int, h_kv: int, size: ScoreBlockSize) -> Iterator[tuple[slice, int, slice, slice]]:
    """Rows, the number of columns, query heads and kv heads of every block of n rows by m columns."""
    width = max(1, size.columns if size.unit > 1 else min(m, size.columns))
    height = max(1, min(n, max(32, size.rows // g), max(1, size.scores // (g * width))))
    heads = max(1, min(h_kv, size.scores // (g * width * size.filled(height))))
    for head in range(0, h_kv, heads):
        heads_kv = slice(head, min(head + heads, h_kv))
        for row in range(0, n, height):
            yield slice(row, min(row + height, n)), width, slice(heads_kv.start * g, heads_kv.stop * g), heads_kv


def _seen_columns(segments: VarlenBatch, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first visible column of each row, and the one after its last: int64 [rows] on the device. Rows after the last
    segment see none.
    """
    cu_q, cu_kv = segments.device_cu_q.long(), segments.device_cu_kv.long()
    row = torch.arange(rows, device=cu_q.device)
    here = (torch.searchsorted(cu_q, row, right=True) - 1).clamp_max(len(cu_q) - 2)
    start, stop = cu_kv[here], cu_kv[here + 1]
    diagonal = stop - (cu_q[here + 1] - row)  # Bottom-right: the last row's diagonal ends in the last column.
    first = start if segments.left is None else torch.maximum(start, diagonal - segments.left)
    last = stop if segments.right is None else torch.minimum(stop, diagonal + segments.right + 1)
    return first, last.masked_fill(row >= cu_q[-1], 0)


def _between(first: torch.Tensor, last: torch.Tensor, span: slice) -> ColumnBlock:
    column = torch.arange(span.start, span.stop, device=first.device)
    return ColumnBlock(span.start, span.stop, (column < first[:, None]) | (column >= last[:, None]))


def size_of(span: slice) -> int:
    """How many indices a slice with both ends holds."""
    return span.stop - span.start


def fold(x: torch.Tensor, heads_kv: int, dtype: torch.dtype, height: int, width: int) -> torch.Tensor:
    """Rows [R, H * g, d] as a fresh [H, g * height, width] of the dtype, its rows aligned, zeros beyond R and d."""
    rows, heads_q, d = x.shape
    folded = aligned((heads_kv, heads_q // heads_kv * height, width), dtype, x.device)
    by_head = folded.view(heads_q, height, width)
    if (rows, d) != (height, width):
        by_head.zero_()
    by_head[:, :rows, :d].copy_(x.transpose(0, 1))
    return folded


def of_rows(x: torch.Tensor, block: ScoreBlock) -> torch.Tensor:
    """The rows of a block alone: [H, g * height, C] as [H * g, R, C], a view."""
    return x.view(-1, block.height, x.shape[2])[:, : size_of(block.rows)]


def of_pairs(x: torch.Tensor, block: ScoreBlock, seen: ColumnBlock) -> torch.Tensor:
    """The rows and the columns of a block alone: [H, g * height, C] as [H * g, R, columns], a view."""
    return of_rows(x, block)[..., : seen.stop - seen.start]


def mask(s: torch.Tensor, block: ScoreBlock, seen: ColumnBlock, value: float) -> None:
    """Write `value` over the hidden scores of a block [H, g * height, C], and over the columns that fill it up."""
    if seen.hidden is not None:
        of_pairs(s, block, seen).masked_fill_(seen.hidden, value)
    if seen.stop - seen.start < s.shape[2]:
        s[..., seen.stop - seen.start :].fill_(value)


# ---- scores that depend on places
#
# The places of a block of scores: its sequences, heads and positions, for ALiBi, score_mod and dropout.


def placed_scores(launch: LaunchScores | None, block: ScoreBlock, columns: slice) -> PairScores | None:
    """The inputs of a block's scores [H * g, R, C] with their places; None if scores depend on q and k alone."""
    if launch is None:
        return None
    at, rows = launch.positions, block.rows
    heads = range(launch.first_head + block.heads_q.start, launch.first_head + block.heads_q.stop)
    device = at.k_positions.device
    head = torch.arange(heads.start, heads.stop, dtype=torch.int32, device=device)[:, None, None]
    sequence, position, diagonal = (x[rows][:, None] for x in (at.q_sequences, at.q_positions, at.q_diagonals))
    pairs = ScorePlaces(sequence, head, position, at.k_positions[columns], diagonal - position)
    return PairScores(launch.inputs, pairs)


def modify(s: torch.Tensor, placed: PairScores | None) -> torch.Tensor | None:
    """ALiBi and score_mod on scores [H * g, R, C], in place. Returns what `pulled_back` needs."""
    if placed is None:
        return None
    before = None if placed.inputs.score_mod is None else s.clone()
    changed = placed.modified(s)
    if changed is not s:
        s.copy_(changed)
    return before


def pulled_back(
    before: torch.Tensor | None, ds: torch.Tensor, placed: PairScores | None, p: torch.Tensor
) -> torch.Tensor:
    """The gradient ds [H * g, R, C] of modified scores -> that of the scores before them. p: probabilities."""
    if before is None or placed is None:
        return ds
    return placed.pulled_back(before, ds).masked_fill(p == 0, 0)  # where a pair is hidden: it may have no derivative


def dropped(p: torch.Tensor, placed: PairScores | None) -> torch.Tensor | None:
    """The factors of dropout for probabilities [H * g, R, C], 0 or 1 / (1 - dropout_p); None without dropout."""
    factors = None if placed is None else placed.dropout(p.dtype)
    return None if factors is None else factors.expand(p.shape)


# ---- the kernel library


class BlockwiseBackend(Backend):
    """PyTorch operators on one device type; every feature, float16 to float64."""

    shares_keys = 1
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
            top = total = mix = None  # [H, g * height, 1] twice, [H, g * height, d_v]: online softmax over the columns
            for columns, seen in block.columns:
                s = _scores(queries, keys.block(block.heads_kv, columns), scores, scratch)
                placed = placed_scores(options.score_inputs, block, columns)
                modify(of_pairs(s, block, seen), placed)
                mask(s, block, seen, -torch.inf)
                here = s.amax(-1, keepdim=True)
                new = here if top is None else torch.maximum(top, here)
                # A row that sees nothing yet has new = -inf. With a finite base its exp(-inf - base) is 0, not NaN.
                base = new.clamp_min(torch.finfo(dtype).min)
                p = s.sub_(base).exp_()
                mass = p.sum(-1, keepdim=True)
                if (factors := dropped(of_pairs(p, block, seen), placed)) is not None:
                    of_pairs(p, block, seen).mul_(factors)
                if top is None or total is None or mix is None:
                    total, mix = mass, _product(p, values.block(block.heads_kv, columns))
                else:
                    shrink = top.sub_(base).exp_()
                    total.mul_(shrink).add_(mass)
                    mix.mul_(shrink).baddbmm_(p, values.block(block.heads_kv, columns))
                top = new
            if top is None or total is None or mix is None:
                continue
            mix.div_(total.masked_fill(total == 0, 1))
            out[block.rows, block.heads_q] = of_rows(mix, block)[..., :d_v].transpose(0, 1)
            tops = of_rows(top, block).squeeze(-1)
            lse[block.heads_q, block.rows] = tops + of_rows(total.log_(), block).squeeze(-1)
            largest = max_logit[block.heads_q]
            torch.maximum(largest, tops.amax(-1), out=largest)
        return Partial(out, lse, max_logit)

    @torch.no_grad()
    def backward(self, operands: BackwardOperands, segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """See `Backend.backward`; the gradients come in the compute dtype, and always deterministic."""
        scores, (dout, q, k, v, out, lse, dlse, *_) = options.scores, operands
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
