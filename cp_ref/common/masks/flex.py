"""PyTorch's FlexAttention: its `BlockMask` as attention slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from cp_ref.common.masks.area_rows import listed, tensor
from cp_ref.common.masks.document_masks import packed
from cp_ref.common.masks.flex_blocks import seen_rows
from cp_ref.spec import AttentionSliceRow, Feature, Unsupported

__all__ = ["from_block_mask"]

_MOST = 16  # attention slices that may begin in a block

Run = tuple[int, int]  # keys [start, stop) that a query sees


def from_block_mask(block_mask: Any) -> torch.Tensor:
    """The attention slices of a `torch.nn.attention.flex_attention.BlockMask`. Its `mask_mod` is asked about every
    pair, and compared with its blocks.

    Args:
        block_mask: what `create_block_mask` returned, the same for all heads (H=None); or one that was made by hand, if
            its blocks and its `mask_mod` agree.

    Returns:
        int64 [n, 6]. Rows of a document mask may lie in several documents: they are those of the packed buffer. A mask
        with B > 1 has a mask for each row of the batch, one after the other: q [b, s, h, d] is the buffer
        q.flatten(0, 1), whose sequences have s tokens each.

    Raises:
        TypeError: it is no BlockMask, or `mask_mod` returns no bool. ValueError: its lists of blocks have no meaning.
        Unsupported: it differs between heads; blocks and `mask_mod` disagree, so that FlexAttention computes
        other pairs when it is compiled; or a block is not a union of a few diagonal bands (16 may begin in it). The
        block is named.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> from cp_ref.masks import picture
    >>> def prefix_of_two(b, h, q, k):
    ...     return (k <= q) | (k < 2)
    >>> print(picture(from_block_mask(create_block_mask(prefix_of_two, None, None, 5, 5, device="cpu"))))
    5 query rows x 5 key rows; a cell is 1 x 1
         k 0
    q    0 0 0 . . .
         1 0 0 . . .
         2 1 1 1 . .
         3 1 1 1 1 .
         4 1 1 1 1 1
    """
    if not all(hasattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "mask_mod", "BLOCK_SIZE")):
        raise TypeError(f"block_mask is a {type(block_mask).__name__}; it must be a FlexAttention BlockMask")
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    if heads != 1:
        raise Unsupported(
            f"a BlockMask of {heads} heads",
            {"from_block_mask": {Feature.AREAS}},
            "areas are the same for all of them: make it with H=None; a score_mod that gives hidden pairs -inf may "
            "look at the head",
        )
    rows, keys = block_mask.seq_lengths
    tables = [tensor(band.row() for band in _bands(block_mask, b)) for b in range(batch)]
    return packed(tables, [b * rows for b in range(batch)], [b * keys for b in range(batch)])


def _bands(block_mask: Any, b: int) -> list[_Band]:
    """The bands of one row of the batch."""
    found: list[_Band] = []
    begun: Counter[tuple[int, int]] = Counter()  # by block
    going: list[_Band] = []  # those of the row before
    for i, runs in _rows(block_mask, b):
        before, going = going, []
        for run in runs:
            band = next((one for one in before if one.takes(run)), None)
            if band is None:
                band = _Band(i, run)
                found.append(band)
                begun[_block(block_mask, i, run[0])] += 1
            else:
                before.remove(band)
                band.add(run)
            going.append(band)
        _refuse_many(block_mask, b, begun)
    return found


class _Band:
    """A diagonal band in a rectangle, row by row: the first visible key stays, and then moves on with the row; the last
    one moves on, and then stays.
    """

    def __init__(self, i: int, run: Run) -> None:
        self.first_row, self.first_run, self.rows, self.last_run = i, run, 1, run
        self.start_moves = self.stop_stays = False

    def takes(self, run: Run) -> bool:
        """Whether the next row may see this run."""
        start, stop = run[0] - self.last_run[0], run[1] - self.last_run[1]
        return start in ((1,) if self.start_moves else (0, 1)) and stop in ((0,) if self.stop_stays else (0, 1))

    def add(self, run: Run) -> None:
        """The next row."""
        self.start_moves |= run[0] > self.last_run[0]
        self.stop_stays |= run[1] == self.last_run[1]
        self.rows, self.last_run = self.rows + 1, run

    def row(self) -> AttentionSliceRow:
        """The attention slice."""
        q_start, q_stop = self.first_row, self.first_row + self.rows
        k_start, k_stop = self.first_run[0], self.last_run[1]
        corner = k_stop - q_stop
        left = corner - (self.last_run[0] - (q_stop - 1)) if self.start_moves else -1
        right = self.first_run[1] - 1 - q_start - corner if k_stop > self.first_run[1] else -1
        return q_start, q_stop, k_start, k_stop, left, right


def _rows(block_mask: Any, b: int) -> Iterator[tuple[int, list[Run]]]:
    """Each query, and the runs of keys that it sees."""
    for start, seen in seen_rows(block_mask, b):
        edges = torch.nn.functional.pad(seen, (1, 1)).int().diff(dim=1)
        for i, row in enumerate(edges, start):
            first, last = (_places(row == step) for step in (1, -1))
            yield i, list(zip(first, last, strict=True))


def _places(where: torch.Tensor) -> list[int]:
    return listed(where.nonzero().flatten())


def _block(block_mask: Any, i: int, j: int) -> tuple[int, int]:
    return i // block_mask.BLOCK_SIZE[0], j // block_mask.BLOCK_SIZE[1]


def _refuse_many(block_mask: Any, b: int, begun: Counter[tuple[int, int]]) -> None:
    """Raise Unsupported where too many diagonal bands begin in one block."""
    for place, number in begun.most_common(1):
        if number > _MOST:
            q, k = (n * size for n, size in zip(place, block_mask.BLOCK_SIZE, strict=True))
            row = f" of row {b}" if len(block_mask.kv_num_blocks) > 1 else ""
            raise Unsupported(
                f"the BlockMask, in its block of queries {q}:{q + block_mask.BLOCK_SIZE[0]} and keys {k}:"
                f"{k + block_mask.BLOCK_SIZE[1]}{row},",
                {"from_block_mask": {Feature.AREAS}},
                f"more than {_MOST} bands begin there; blocks must be unions of a few bands. A score_mod takes every "
                "mask: let it return -inf where mask_mod hides, with attn_mask_type='no_mask'",
            )
