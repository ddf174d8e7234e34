"""A launch's scores in blocks: some rows of a segment, some kv heads, some columns at a time.

`score_blocks` follows the lengths on the host, and leaves out hidden blocks. `score_blocks_on_device` is for a GPU and
lengths that are replaced in a captured graph: it visits all rows and all columns of the tensors, and looks up each
row's visible columns on the device. The blocks are the same for any lengths, at the cost of computing hidden ones.

legend   g = h_q / h_kv, R = rows of a block, C = columns of a block, H = kv heads of a block. A block's scores
         are [H, g * R, C]: the query heads that share a kv head are folded into the rows, so K and V are never
         repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from cp_fast.backends.aligned_matrices import aligned
from cp_fast.backends.backend_protocol import VarlenBatch
from cp_fast.backends.blockwise.visible_columns import ColumnBlock, mask_cache, visible_columns

__all__ = [
    "ScoreBlock",
    "ScoreBlockSize",
    "fold",
    "mask",
    "score_blocks",
    "score_blocks_on_device",
    "size_of",
    "unfold",
]


class ScoreBlockSize(NamedTuple):
    """How large a block of scores [H, g * R, C] may be."""

    scores: int  # H * g * R * C
    columns: int  # C
    rows: int  # About g * R: larger blocks multiply faster and waste more along a diagonal.


class ScoreBlock(NamedTuple):
    """Some rows, for some kv heads, with their visible columns."""

    rows: slice  # of q
    columns: Iterable[tuple[slice, ColumnBlock]]  # Of k and v; iterate once.
    heads_q: slice
    heads_kv: slice


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
            yield ScoreBlock(slice(q0 + rows.start, q0 + rows.stop), columns, heads_q, heads_kv)


def score_blocks_on_device(
    segments: VarlenBatch, q: torch.Tensor, k: torch.Tensor, size: ScoreBlockSize
) -> Iterator[ScoreBlock]:
    """Every block of rows by every block of columns, whatever the segments are."""
    first, last = _seen_columns(segments, len(q))
    for rows, width, heads_q, heads_kv in _block_ranges(len(q), len(k), q.shape[1] // k.shape[1], k.shape[1], size):
        spans = (slice(a, min(a + width, len(k))) for a in range(0, len(k), width))
        columns = ((span, _between(first[rows], last[rows], span)) for span in spans)
        yield ScoreBlock(rows, columns, heads_q, heads_kv)


def _block_ranges(n: int, m: int, g: int, h_kv: int, size: ScoreBlockSize) -> Iterator[tuple[slice, int, slice, slice]]:
    """Rows, the number of columns, query heads and kv heads of every block of n rows by m columns."""
    width = max(1, min(m, size.columns))
    height = max(1, min(n, max(32, size.rows // g), max(1, size.scores // (g * width))))
    heads = max(1, min(h_kv, size.scores // (g * width * height)))
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


def fold(x: torch.Tensor, heads_kv: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [R, H * g, d] as a fresh [H, g * R, d] of the dtype, its rows aligned."""
    rows, heads_q, d = x.shape
    folded = aligned((heads_kv, heads_q // heads_kv * rows, d), dtype, x.device)
    folded.view(heads_q, rows, d).copy_(x.transpose(0, 1))
    return folded


def unfold(x: torch.Tensor, block: ScoreBlock) -> torch.Tensor:
    """[H, g * R, d] as [R, H * g, d], a view."""
    return x.view(-1, size_of(block.rows), x.shape[2]).transpose(0, 1)


def mask(s: torch.Tensor, seen: ColumnBlock, value: float) -> None:
    """Write `value` over the hidden scores of a block [H, g * R, C]."""
    if seen.hidden is not None:
        s.view(-1, *seen.hidden.shape).masked_fill_(seen.hidden, value)
