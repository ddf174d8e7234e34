"""A launch's scores in blocks: some rows of a segment, some kv heads, some columns at a time.

legend   g = h_q / h_kv, R = rows of a block, C = columns of a block, H = kv heads of a block. A block's scores
         are [H, g * R, C]: the query heads that share a kv head are folded into the rows, so K and V are never
         repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from cp_fast.backends.band import Columns, make_masks, visible_columns
from cp_fast.backends.base import Segments

__all__ = ["Block", "BlockSize", "cut", "fold", "mask", "size_of", "unfold"]


class BlockSize(NamedTuple):
    """How large a block of scores [H, g * R, C] may be."""

    scores: int  # H * g * R * C
    columns: int  # C
    rows: int  # g * R, about: more are faster to multiply and waste more along a diagonal


class Block(NamedTuple):
    """Rows of one segment, for some kv heads, with the columns that they see."""

    rows: slice  # of q
    columns: list[tuple[slice, Columns]]  # of k and v
    heads_q: slice
    heads_kv: slice


def cut(segments: Segments, h_q: int, h_kv: int, size: BlockSize, device: torch.device) -> Iterator[Block]:
    """Every block of a launch: segment by segment, some kv heads at a time, rows in order."""
    g, masks = h_q // h_kv, make_masks(device)
    for (q0, q1), (kv0, kv1) in zip(pairwise(segments.cu_q), pairwise(segments.cu_kv), strict=True):
        lq, lk = q1 - q0, kv1 - kv0
        width = max(1, min(lk, size.columns))
        height = max(1, min(lq, max(32, size.rows // g), max(1, size.scores // (g * width))))
        heads = max(1, min(h_kv, size.scores // (g * width * height)))
        for head in range(0, h_kv, heads):
            heads_kv = slice(head, min(head + heads, h_kv))
            heads_q = slice(heads_kv.start * g, heads_kv.stop * g)
            for row in range(0, lq, height):
                last = min(row + height, lq)
                seen = visible_columns(row, last, lq, lk, segments.left, segments.right, width, masks)
                columns = [(slice(kv0 + c.start, kv0 + c.stop), c) for c in seen]
                yield Block(slice(q0 + row, q0 + last), columns, heads_q, heads_kv)


def size_of(span: slice) -> int:
    """How many indices a slice with both ends holds."""
    return span.stop - span.start


def fold(x: torch.Tensor, heads_kv: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [R, H * g, d] as a fresh [H, g * R, d] of the dtype."""
    rows, heads_q, d = x.shape
    folded = torch.empty(heads_q, rows, d, dtype=dtype, device=x.device)
    return folded.copy_(x.transpose(0, 1)).view(heads_kv, -1, d)


def unfold(x: torch.Tensor, block: Block) -> torch.Tensor:
    """[H, g * R, d] as [R, H * g, d], a view."""
    return x.view(-1, size_of(block.rows), x.shape[2]).transpose(0, 1)


def mask(s: torch.Tensor, seen: Columns, value: float) -> None:
    """Write `value` over what the rows of a block [H, g * R, C] do not see."""
    if seen.hidden is not None:
        s.view(-1, *seen.hidden.shape).masked_fill_(seen.hidden, value)
