"""Windows with more than a window."""

from __future__ import annotations

import torch

from cp_ref.common.masks.rows import FULL, tensor
from cp_ref.spec import read_count

__all__ = ["first_tokens_and_window"]


def first_tokens_and_window(length: int, first: int, left: int) -> torch.Tensor:
    """Tokens see themselves, the `left` tokens before them, and the `first` tokens of all (StreamingLLM's attention
    sinks by position).

    Returns:
        int64 [n, 6]: the window; of the first tokens those that left the window, first one by one, then all.

    >>> from cp_ref.masks import picture
    >>> print(picture(first_tokens_and_window(7, 2, 2)))
    7 query rows x 7 key rows; a cell is 1 x 1
         k 0
    q    0 0 . . . . . .
         1 0 0 . . . . .
         2 0 0 0 . . . .
         3 1 0 0 0 . . .
         4 2 2 0 0 0 . .
         5 2 2 . 0 0 0 .
         6 2 2 . . 0 0 0
    """
    length = read_count("length", length, at_least=0)
    first, left = read_count("first", first, at_least=0, at_most=length), read_count("left", left, at_least=0)
    behind = left + 1  # the first query that does not see token 0 through its window
    last = min(behind + first - 1, length)  # the first one that sees none of the first tokens through it
    return tensor(
        [(0, length, 0, length, left, 0), (behind, last, 0, last - behind, -1, 0), (last, length, 0, first, *FULL)]
    )
