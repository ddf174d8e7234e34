"""Masks of blocks: of frames, of chunks, of blocks that are some steps apart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from cp_ref.common.masks.area_rows import FULL, causal, tensor, upper
from cp_ref.spec import read_count

__all__ = ["block_causal", "chunked", "dilated_blocks"]


def block_causal(length: int, block: int) -> torch.Tensor:
    """Tokens see their own block and all before it: frames of a video, blocks of block diffusion. The last block may be
    shorter.

    Returns:
        int64 [n, 6]: the causal square of all, which kernels compute fastest, and each block's pairs outside it.

    >>> from cp_ref.masks import picture
    >>> print(picture(block_causal(5, 2)))
    5 query rows x 5 key rows; a cell is 1 x 1
         k 0
    q    0 0 1 . . .
         1 0 0 . . .
         2 0 0 0 2 .
         3 0 0 0 0 .
         4 0 0 0 0 0
    """
    blocks = _blocks(length, block)
    return tensor(chain([causal(0, length)], (upper(start, stop) for start, stop in blocks)))


def chunked(length: int, chunk: int) -> torch.Tensor:
    """Tokens see the tokens before them in their own chunk (Llama 4's local layers). The last chunk may be shorter.

    >>> from cp_ref.masks import picture
    >>> print(picture(chunked(5, 2)))
    5 query rows x 5 key rows; a cell is 1 x 1
         k 0
    q    0 0 . . . .
         1 0 0 . . .
         2 . . 1 . .
         3 . . 1 1 .
         4 . . . . 2
    """
    return tensor(causal(start, stop) for start, stop in _blocks(length, chunk, "chunk"))


def dilated_blocks(length: int, block: int, step: int) -> torch.Tensor:
    """Tokens see the tokens before them in their own block, and all of every `step`-th block before it (LongNet's
    dilation, by blocks). The last block may be shorter.

    >>> from cp_ref.masks import picture
    >>> print(picture(dilated_blocks(6, 1, 2)))
    6 query rows x 6 key rows; a cell is 1 x 1
         k 0
    q    0 0 . . . . .
         1 . 1 . . . .
         2 2 . 3 . . .
         3 . 4 . 5 . .
         4 6 . 7 . 8 .
         5 . 9 . a . b
    """
    step = read_count("step", step, at_least=1)

    def seen(n: int, start: int) -> range:
        """The first keys of the blocks that the n-th block, which begins at `start`, sees."""
        return range(n % step * block, start + 1, step * block)

    rows = (
        causal(start, stop) if first == start else (start, stop, first, first + block, *FULL)
        for n, (start, stop) in enumerate(_blocks(length, block))
        for first in seen(n, start)
    )
    return tensor(rows)


def _blocks(length: int, block: int, name: str = "block") -> Iterator[tuple[int, int]]:
    """(start, stop) of each."""
    length, block = read_count("length", length, at_least=0), read_count(name, block, at_least=1)
    return ((start, min(start + block, length)) for start in range(0, length, block))
