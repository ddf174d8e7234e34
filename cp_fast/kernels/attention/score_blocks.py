"""A launch's scores in blocks of rows, kv heads and columns: which there are, what of them is hidden, and their places.

legend   R = rows of a block, C = columns of a block, H = kv heads of a block, g = h_q / h_kv. A block's scores are
         [H, g * R, C]: the query heads that share a kv head are folded into the rows, so K and V are never
         repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from cp_fast.kernels.attention.backend_protocol import LaunchScores
from cp_fast.kernels.attention.kernel_operands import aligned
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.calls.scores import PairScores, ScorePlaces

__all__ = [
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
