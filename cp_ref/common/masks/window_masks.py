"""Windows with more than a window."""

from __future__ import annotations

import torch

from cp_ref.common.masks.area_rows import FULL, tensor
from cp_ref.spec import read_count

__all__ = ["first_tokens_and_window"]


def first_tokens_and_window(length: int, first: int, left: int) -> torch.Tensor:
    """Tokens see themselves, the `left` tokens before them, and the `first` tokens of all (StreamingLLM's attention
    sinks by position).

    Returns:
        int64 [n, 6]: the window of the tokens after the first ones; the first ones among themselves, with the same
        window if it hides none of them; and the part of them that all others see. The first two share a kernel launch.

    >>> from cp_ref.masks import picture
    >>> print(picture(first_tokens_and_window(7, 2, 2)))
    7 query rows x 7 key rows; a cell is 1 x 1
         k 0
    q    0 1 . . . . . .
         1 1 1 . . . . .
         2 2 2 0 . . . .
         3 2 2 0 0 . . .
         4 2 2 0 0 0 . .
         5 2 2 . 0 0 0 .
         6 2 2 . . 0 0 0
    """
    length = read_count("length", length, at_least=0)
    first, left = read_count("first", first, at_least=0, at_most=length), read_count("left", left, at_least=0)
    own = left if left >= first - 1 else -1
    behind = (first, length)
    return tensor([(*behind, *behind, left, 0), (0, first, 0, first, own, 0), (*behind, 0, first, *FULL)])
